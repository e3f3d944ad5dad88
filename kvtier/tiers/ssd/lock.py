"""One process a directory."""

from pathlib import Path

from kvtier.errors import StartError
from kvtier.lock import hold_lock

__all__ = ["lock_directory"]

_FIELD = "ssd.directory"


def lock_directory(directory: Path) -> int:
    """Make the directory where needed and hold it; returns what ``let_go`` takes.

    A directory made here is 0700; one that exists keeps its mode. Raises StartError.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise StartError(_FIELD, f"{directory} is no directory", "name another one") from None
    except NotADirectoryError:
        raise StartError(
            _FIELD, f"a part of {directory} is no directory", "name another one"
        ) from None
    except OSError as error:
        raise StartError(
            _FIELD,
            f"cannot make {directory}: {error.strerror}",
            "make its parent writable for this user or name another one",
        ) from None
    return hold_lock(directory / "lock", _FIELD, str(directory))
