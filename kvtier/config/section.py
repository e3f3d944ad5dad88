"""The base class of the configuration's sections, and the kinds of values that keys take.

Rules
-----
* A field's name ends in its unit (``capacity_bytes``, ``lease_ns``). Its key in the file does not
  (``capacity = "2GiB"``), because there the value carries the unit. ``key_of`` maps the name
  to the key.
* Every field has a default. The description says what the field does, ``why`` the reason for the
  default.
* ``live`` instead of ``why`` marks fields that a reload applies. All others need a restart.
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
    "above",
    "choices_of",
    "extra_of",
    "is_optional",
    "key_of",
    "kind_of",
    "live",
    "why",
]

MS = 10**6
SECOND = 10**9
HOUR = 3600 * SECOND
PAGE = 4096
"""Bytes; what direct I/O and mappings are aligned to."""
MIB = 2**20
GIB = 2**30


def key_of(field_name: str) -> str:
    """Return the key that a field has in the file: its name without the unit."""
    return field_name.removesuffix("_bytes").removesuffix("_ns")


def why(reason: str, *, shown: str = "", **more: str | bool) -> dict[str, Any]:
    """Say why a field's default is what it is.

    ``shown`` stands in documents for a default that depends on the machine or is no value. More:
    ``example``, a value that it takes, and ``secret``, which keeps it from being shown.
    """
    return {"reason": reason, "shown_default": shown, **more}


def live(reason: str, **more: str) -> dict[str, Any]:
    """Say the same of a field that a running daemon takes anew."""
    return why(reason, **more) | {"live": True}


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """Return what ``why`` or ``live`` says of a field."""
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
    """What the sections share: nothing unknown, nothing coerced, nothing changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def conflicts(self) -> Iterable[ConfigError]:
        """Return what keys have against each other; nothing where they fit."""
        return ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for conflict in self.conflicts():
            raise conflict
        return self


HostNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(\*|[\w.-]+)$")], ...],
    Field(
        json_schema_extra=why(
            "Any web site can make its own name resolve to loopback.",
            shown="none",
            example='["kvtier.example"]',
        ),
        description="Names, without a port, that are accepted as Host in requests over loopback, "
        "such as the one that a reverse proxy on this machine passes on. IP addresses, localhost "
        "and the machine's host name are always accepted; * accepts any.",
    ),
]
"""The type of a server's ``allowed_hosts``."""


def above(field: str, size_bytes: int, limit_name: str, limit_bytes: int) -> Iterable[ConfigError]:
    """Return the fault of a size above what bounds it, if it is."""
    if size_bytes > limit_bytes:
        yield ConfigError(
            field,
            f"{format_size(size_bytes)} is more than {limit_name}, {format_size(limit_bytes)}",
            f"lower {field} or raise {limit_name.removeprefix('half of ')}",
        )


class ValueKind(StrEnum):
    """Each is what the documents call it."""

    SIZE = "size"
    DURATION = "duration"
    FLAG = "true or false"
    WHOLE = "whole number"
    NUMBER = "number"
    NUMBERS = "list of numbers"
    TEXTS = "list of texts"
    CHOICE = "one of"
    PATH = "path"
    ADDRESS = "host:port"
    TEXT = "text"


_BY_TYPE = (
    (bool, ValueKind.FLAG),
    (int, ValueKind.WHOLE),
    (float, ValueKind.NUMBER),
    (tuple[int], ValueKind.NUMBERS),
    (tuple[str], ValueKind.TEXTS),
    (Path, ValueKind.PATH),
    (ListenAddress, ValueKind.ADDRESS),
    (str, ValueKind.TEXT),
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
    """Return the words that a field takes, where it does not take any."""
    literals = [each for each in _members(field.annotation) if get_origin(each) is Literal]
    return tuple(str(word) for each in literals for word in get_args(each))


def is_optional(field: FieldInfo) -> bool:
    """Tell whether a field may have no value, which is written as an empty text."""
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
