"""What holds, key by key, for people and scripts: values as a file writes them, without secrets."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from kvtier.config.document import as_toml, toml_of
from kvtier.config.model import Config, all_fields
from kvtier.config.section import extra_of

__all__ = ["changes", "document", "render_toml", "shown"]

_PLACE = r"(?:[\w.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?"
_PLACES = re.compile(rf"{_PLACE}(?:,{_PLACE})*(?:/[\w.-]*)*|(?:/[\w.-]+)+(?:\?db=\d+)?")
"""Hosts with ports and a database or service behind them, or the path of a socket."""


def document(config: Config) -> dict[str, dict[str, Any]]:
    """Return each key's value with its source, and whether a running daemon takes a new one."""
    return {
        key: {
            "value": json.loads(_text(config, section, name, field)),  # JSON reads such TOML
            "source": config.source_of(key),
            "reload": "live" if extra_of(field).get("live") else "restart",
        }
        for key, section, name, field in all_fields()
    }


def shown(key: str, config: Config) -> str:
    """Return a key's value in TOML; of a secret only what is none."""
    return next(
        _text(config, section, name, field)
        for each, section, name, field in all_fields()
        if each == key
    )


def changes(before: Config, after: Config) -> Iterator[tuple[str, bool]]:
    """Yield each key that differs, and whether a running daemon takes a new value of it."""
    for key, section, name, field in all_fields():
        values = [getattr(getattr(config, section), name) for config in (before, after)]
        if values[0] != values[1]:
            yield key, bool(extra_of(field).get("live"))


def render_toml(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a ``document`` as a file, each value with its source in a comment.

    A secret is commented out, since what stands for it must not be taken for it.
    """
    secrets = {key for key, _, _, field in all_fields() if extra_of(field).get("secret")}
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, each in found.items():
        section, _, key = name.partition(".")
        line = f"{key} = {toml_of(each['value'])}"
        is_hidden = name in secrets and each["value"]
        sections.setdefault(section, []).append(
            (f"# {line}" if is_hidden else line, each["source"])
        )
    width = max((len(line) for lines in sections.values() for line, _ in lines), default=0)
    return "\n\n".join(
        "\n".join([f"[{section}]", *(f"{line:<{width}}  # {source}" for line, source in lines)])
        for section, lines in sections.items()
    )


def _text(config: Config, section: str, name: str, field: FieldInfo) -> str:
    value = getattr(getattr(config, section), name)
    return as_toml(name, _masked(str(value)) if extra_of(field).get("secret") else value)


def _masked(url: str) -> str:
    """Return a URL without user and password, and without what might be a part of them."""
    scheme, slashes, rest = url.partition("://")
    credentials, at, places = rest.rpartition("@")
    if not _PLACES.fullmatch(places):
        places = "***"
    return scheme + slashes + ("***@" if credentials or at else "") + places if url else ""
