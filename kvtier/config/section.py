"""What the sections of the configuration share.

Rules
-----
* A field's name ends in its unit (``capacity_bytes``, ``lease_ns``); its key in the file does not
  (``capacity = "2GiB"``), because there the value carries the unit. ``key_of`` maps one to other.
* Every field has a default. Its description says what it is for, ``why`` why that default.
* ``live`` instead of ``why`` marks what a reload applies; all else needs a restart.
* What two keys must have in common is said by ``conflicts``, one fault for each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Self

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
    "above",
    "extra_of",
    "key_of",
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
