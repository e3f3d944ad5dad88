"""Sections of tiers: the base class for slow tiers, the CPU tier, and encryption keys."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Self

from kvtier.config.section import GIB, MIB, PAGE, Section, at_most, setting
from kvtier.core.slow_tier import WriteMode
from kvtier.core.tier_registry import TierName
from kvtier.errors import ConfigError, StartError
from kvtier.secret import read_secret, secret_lines

__all__ = [
    "CpuConfig",
    "SealConfig",
    "TierSection",
    "default_cache_directory",
    "secret_in",
]


class TierSection(Section):
    """The settings of one tier. Override ``is_enabled``, ``place`` and all that differs."""

    place_key: ClassVar[str] = "directory"
    """Key of the location of the blocks."""
    switch_key: ClassVar[str] = "enabled"
    """Key that enables the tier."""
    file_backed_key: ClassVar[str] = ""
    """Key whose value may come from a file instead, which the key with ``_file`` names."""
    fixed_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that only a restart changes, even while the tier is detached."""

    @property
    @abstractmethod
    def is_enabled(self) -> bool:
        """Whether this node uses the tier."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Location of the blocks. No two open tiers may have the same one."""

    @property
    def is_required(self) -> bool:
        """Whether the daemon may start only with the tier."""
        return False

    @property
    def write_mode(self) -> WriteMode:
        """When blocks are written to the tier."""
        return WriteMode.STORE

    @property
    def gate_share(self) -> float:
        """Share of the blocks leaving the CPU tier that is written, in mode ``DEMOTE``."""
        return 1.0

    @property
    def seal_mode(self) -> str:
        """How blocks are sealed; anything but ``off`` needs keys."""
        return "off"

    @property
    def scrub_bytes_per_s(self) -> int:
        """Bytes a second to read in the background to find damaged blocks."""
        return 0

    @property
    def reported_bytes(self) -> int:
        """Capacity to report to operators; 0 if only a server knows it."""
        return 0

    @property
    def state_directory(self) -> Path | None:
        """Directory in which the daemon may save its own documents."""
        return None

    @property
    def secret_file(self) -> Path | None:
        """File that has the value of ``file_backed_key``."""
        return getattr(self, f"{self.file_backed_key}_file") if self.file_backed_key else None

    def with_secret(self, value: str) -> Self:
        """Return a copy with another value of ``file_backed_key``.

        Raises ValueError if the value is invalid; its text follows the name of a file.
        """
        return self.model_copy(update={self.file_backed_key: value})

    def eviction_policy(self, cpu_policy: str) -> str:  # some tiers follow it
        """Return the tier's eviction policy if the CPU tier uses ``cpu_policy``."""
        return "lru"


def secret_in(name: TierName, section: TierSection, path: Path) -> str:
    """Return the setting of a tier that is in a file. Raises ConfigError without its content."""
    key = f"{name}.{section.file_backed_key}"
    remedy = f"write the {section.file_backed_key.upper()} on one line, as in {key}"
    try:
        lines = [line for _, line in secret_lines(read_secret(path, f"{key}_file"))]
    except StartError as error:
        raise ConfigError(error.field, error.problem, error.remedy) from None
    if len(lines) != 1:
        problem = f"{path} must have exactly one line, not {len(lines)}"
        raise ConfigError(f"{key}_file", problem, remedy)
    try:
        section.with_secret(lines[0])
    except ValueError as fault:
        raise ConfigError(f"{key}_file", f"{path} {fault}", remedy) from None
    return lines[0]


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
