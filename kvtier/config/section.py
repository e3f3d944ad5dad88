"""The base class of the configuration's sections, and the kinds of values that keys take.

Rules
-----
* A field's name ends in its unit (``capacity_bytes``, ``lease_ns``). Its key in the file does not
  (``capacity = "2GiB"``), because there the unit is part of the value. ``key_of`` maps the name to
  the key.
* Every field is a ``setting`` with a default, a description, and the reason for the default.
* A reload applies the settings marked ``live``. All others need a restart.
* Rules between keys are in ``conflicts``, one error for each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from kvtier.config.units import format_size
from kvtier.errors import ConfigError

__all__ = [
    "GIB",
    "HOUR",
    "MIB",
    "MS",
    "PAGE",
    "SECOND",
    "HostNames",
    "ListenAddress",
    "Section",
    "ValueKind",
    "at_most",
    "choices_of",
    "extra_of",
    "is_optional",
    "key_of",
    "kind_of",
    "setting",
]

MS = 10**6
SECOND = 10**9
HOUR = 3600 * SECOND
PAGE = 4096
"""Bytes; the alignment of direct I/O and mappings."""
MIB = 2**20
GIB = 2**30


def key_of(field_name: str) -> str:
    """Return the key that a field has in the file: its name without the unit."""
    return field_name.removesuffix("_bytes").removesuffix("_ns")


def setting(
    default: object, description: str, *, why: str, live: bool = False, shown: str = "", **more: Any
) -> Any:
    """Return a field with its documentation.

    ``why`` is the reason for the default. ``shown`` replaces the default in documents if it depends
    on the machine or is empty. ``more`` may contain ``example``, ``secret`` (the value is never
    shown), and arguments of pydantic's ``Field``; with ``default_factory``, ``default`` is ignored.
    """
    extra: dict[str, Any] = {"reason": why, "live": live, "shown_default": shown}
    extra |= {name: more.pop(name) for name in ("example", "secret") if name in more}
    if "default_factory" not in more:
        more["default"] = default
    return Field(description=description, json_schema_extra=extra, **more)


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """Return the documentation of a field besides its description; see ``setting``."""
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a TCP port to listen on; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Section(BaseModel):
    """Base class of sections: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def conflicts(self) -> Iterable[ConfigError]:
        """Return the errors of values that do not fit together."""
        return ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for conflict in self.conflicts():
            raise conflict
        return self


HostNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(\*|[\w.-]+)$")], ...],
    setting(
        (),
        "Host names, without a port, that are accepted as Host in requests over loopback, for "
        "example the name that a reverse proxy on this machine passes on. IP addresses, localhost "
        "and the machine's host name are always accepted; * accepts any name.",
        why="Any web site can make its own name resolve to loopback.",
        shown="none",
        example='["kvtier.example"]',
    ),
]
"""The type of a server's ``allowed_hosts``."""


def at_most(field: str, size_bytes: int, limit: str, limit_bytes: int) -> Iterable[ConfigError]:
    """Yield an error if a size is above the value of another key."""
    if size_bytes > limit_bytes:
        yield ConfigError(
            field,
            f"{format_size(size_bytes)} is more than {limit}, {format_size(limit_bytes)}",
            f"lower {field} or raise {limit.removeprefix('half of ')}",
        )


class ValueKind(StrEnum):
    """The kind of a setting's value, in the words of the documentation."""

    SIZE = "size"
    DURATION = "duration"
    FLAG = "true or false"
    INTEGER = "integer"
    NUMBER = "number"
    INTEGERS = "list of integers"
    STRINGS = "list of strings"
    CHOICE = "one of"
    PATH = "path"
    ADDRESS = "host:port"
    STRING = "string"


_BY_TYPE = (
    (bool, ValueKind.FLAG),
    (int, ValueKind.INTEGER),
    (float, ValueKind.NUMBER),
    (tuple[int], ValueKind.INTEGERS),
    (tuple[str], ValueKind.STRINGS),
    (Path, ValueKind.PATH),
    (ListenAddress, ValueKind.ADDRESS),
    (str, ValueKind.STRING),
)


def kind_of(name: str, field: FieldInfo) -> ValueKind:
    """Return the kind of the field called ``name``."""
    if name.endswith("_bytes"):
        return ValueKind.SIZE
    if name.endswith("_ns"):
        return ValueKind.DURATION
    types = set(map(_class, _members(field.annotation)))
    return next((kind for each, kind in _BY_TYPE if each in types), ValueKind.CHOICE)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field accepts; empty if it accepts any."""
    literals = [each for each in _members(field.annotation) if get_origin(each) is Literal]
    return tuple(str(word) for each in literals for word in get_args(each))


def is_optional(field: FieldInfo) -> bool:
    """Return whether a field may be None, which is written as an empty string."""
    return type(None) in _members(field.annotation)


def _members(annotation: object) -> tuple[object, ...]:
    """Return the parts of a union, or else the annotation itself."""
    is_union = get_origin(annotation) in {Union, UnionType}
    return get_args(annotation) if is_union else (annotation,)


def _class(annotation: object) -> object:
    """Return an annotation's type without its metadata; for a tuple, also the type of its items."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return arguments[0]
    if origin is tuple:
        return tuple[_class(arguments[0])]  # type: ignore[misc]  # a value here, not an annotation
    return origin or annotation
