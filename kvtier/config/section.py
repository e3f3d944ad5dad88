"""What the sections of the configuration share.

Rules
-----
* A field's name ends in its unit (``capacity_bytes``, ``lease_ns``); its key in the file does not
  (``capacity = "2GiB"``), because there the value carries the unit. ``key_of`` maps one to other.
* Every field has a default, and its description says what it is for and why that default.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from kvtier.config.units import format_size
from kvtier.errors import ConfigError

__all__ = ["GIB", "HOUR", "MIB", "MS", "PAGE", "SECOND", "Section", "at_most", "key_of", "shown"]

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


def shown(text: str, **more: str | bool) -> dict[str, Any]:
    """Describe a default that depends on the machine, or that has no value, for the documents."""
    return {"shown_default": text, **more}


class Section(BaseModel):
    """What the sections share: nothing unknown, nothing coerced, nothing changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def at_most(field: str, size_bytes: int, limit_name: str, limit_bytes: int) -> None:
    """Raise ConfigError where a size is above what bounds it."""
    if size_bytes > limit_bytes:
        raise ConfigError(
            field,
            f"{format_size(size_bytes)} is more than {limit_name}, {format_size(limit_bytes)}",
            f"lower {field} or raise {limit_name.removeprefix('half of ')}",
        )
