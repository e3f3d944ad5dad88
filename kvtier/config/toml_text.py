"""Configuration values as TOML text, and the effective configuration with secrets masked."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from kvtier.config.model import Config, all_settings
from kvtier.config.section import ValueKind, extra_of, kind_of
from kvtier.config.units import format_duration, format_size

__all__ = [
    "as_toml",
    "changes",
    "default_of",
    "document",
    "example_of",
    "render_toml",
    "shown",
    "toml_of",
]


def as_toml(name: str, value: object) -> str:
    """Return a field's value as the file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        if name.endswith("_bytes"):
            return f'"{format_size(value)}"'
        return f'"{format_duration(value)}"' if name.endswith("_ns") else str(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, tuple):
        return toml_of(list(value))
    return toml_of("" if value is None else str(value))


def toml_of(value: object) -> str:
    """Return a string, number, boolean or a list of them in TOML."""
    # TOML is like JSON here, except for this character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def default_of(name: str, field: FieldInfo) -> str:
    """Return the default of a field in TOML, or in words if it has no fixed one."""
    return extra_of(field)["shown_default"] or as_toml(name, field.default)


def example_of(name: str, field: FieldInfo) -> str:
    """Return a valid value of the field, in TOML."""
    if example := extra_of(field).get("example"):
        is_list = kind_of(name, field) in {ValueKind.INTEGERS, ValueKind.STRINGS}
        return str(example) if is_list else f'"{example}"'
    return as_toml(name, field.default)


_PLACE = r"(?:[\w.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?"
_PLACES = re.compile(rf"{_PLACE}(?:,{_PLACE})*(?:/[\w.-]*)*|(?:/[\w.-]+)+(?:\?db=\d+)?")
"""Matches hosts with ports and a database or service name, or the path of a socket."""


def document(config: Config) -> dict[str, dict[str, Any]]:
    """Return the value and source of each key, and whether a reload applies it."""
    return {
        key: {
            "value": json.loads(_text(config, section, name, field)),  # JSON reads such TOML
            "source": config.source_of(key),
            "reload": "live" if extra_of(field).get("live") else "restart",
        }
        for key, section, name, field in all_settings()
    }


def shown(key: str, config: Config) -> str:
    """Return a key's value in TOML, with secrets masked."""
    return next(
        _text(config, section, name, field)
        for each, section, name, field in all_settings()
        if each == key
    )


def changes(before: Config, after: Config) -> Iterator[tuple[str, bool]]:
    """Yield each key that differs, and whether a reload applies it."""
    for key, section, name, field in all_settings():
        values = [getattr(config.section(section), name) for config in (before, after)]
        if values[0] != values[1]:
            yield key, bool(extra_of(field).get("live"))


def render_toml(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a ``document`` as a TOML file, with the source of each value in a comment.

    Secrets are commented out, so that a mask is never used as a value.
    """
    secrets = {key for key, _, _, field in all_settings() if extra_of(field).get("secret")}
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
    value = getattr(config.section(section), name)
    return as_toml(name, _masked(str(value)) if extra_of(field).get("secret") else value)


def _masked(url: str) -> str:
    """Return a URL without user and password, and without anything that may be part of them."""
    scheme, slashes, rest = url.partition("://")
    credentials, at, places = rest.rpartition("@")
    if not _PLACES.fullmatch(places):
        places = "***"
    return scheme + slashes + ("***@" if credentials or at else "") + places if url else ""
