"""What a configuration keeps in a file of its own: the remote tier's URL, for its password."""

from pathlib import Path

from pydantic import ValidationError

from kvtier.config.model import Config
from kvtier.config.tiers import RemoteConfig
from kvtier.errors import ConfigError, StartError
from kvtier.secret import read_secret, secret_lines

__all__ = ["url_in", "with_url"]

_FIELD = "remote.url_file"


def with_url(config: Config) -> Config:
    """Return ``config`` with the URL that ``remote.url_file`` holds; itself without such a file.

    Reads the file each time. Raises ConfigError, which never tells what is in it.
    """
    path = config.remote.url_file
    return config if path is None else config.with_url(url_in(path), str(path))


def url_in(path: Path) -> str:
    """Return the URL in a file; raises ConfigError likewise."""
    try:
        lines = [line for _, line in secret_lines(read_secret(path, _FIELD))]
    except StartError as error:
        raise ConfigError(error.field, error.problem, error.remedy) from None
    if len(lines) != 1:
        raise _refusal(f"{path} has {len(lines)} lines and not one")
    try:
        RemoteConfig(url=lines[0])
    except ValidationError:  # it would repeat what is there
        raise _refusal(f"{path} has no URL of a Redis server") from None
    return lines[0]


def _refusal(problem: str) -> ConfigError:
    return ConfigError(_FIELD, problem, "write one line there, such as remote.url would be")
