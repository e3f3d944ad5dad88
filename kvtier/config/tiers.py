"""Sections of the CPU tier and of the keys; the packages of slower tiers define theirs."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvtier.config.section import GIB, MIB, PAGE, Section, at_most, setting
from kvtier.errors import ConfigError

__all__ = ["CpuConfig", "SealConfig", "default_cache_directory"]


def default_cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default directory of the SSD tier: in the user's cache directory."""
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvtier"


class CpuConfig(Section):
    """The CPU tier: shared memory that engines map."""

    capacity_bytes: int = setting(
        2 * GIB,
        "Memory of the tier, allocated at start.",
        why="Fits a workstation; on a GPU node use most of the free memory.",
        ge=MIB,
    )
    slab_bytes: int = setting(
        64 * MIB,
        "Unit in which memory is assigned to block sizes.",
        why="Large enough that little is wasted at the end of a slab, and small enough that memory "
        "can move between block sizes.",
        ge=64 * 1024,
        le=16 * GIB,
        multiple_of=PAGE,
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that a slab fits into the tier."""
        return at_most("cpu.slab", self.slab_bytes, "cpu.capacity", self.capacity_bytes)


class SealConfig(Section):
    """Keys that protect blocks at rest, in the SSD and the remote tier."""

    key_file: Path | None = setting(
        None,
        "File of keys, one per line: a name and 64 hexadecimal digits. The first key encrypts, all "
        "of them decrypt. To rotate keys, insert a new first line, and remove the old line once "
        "no stored block needs it. Must not be readable by others.",
        why="Only the operator can provide keys.",
        shown="none",
        example="/etc/kvtier/keys",
    )
