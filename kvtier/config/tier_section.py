"""What shared code may ask of the settings of any tier; the tier's package defines the section."""

from pathlib import Path
from typing import ClassVar, Self

from kvtier.config.section import Section
from kvtier.core.slow_tier import WriteMode
from kvtier.core.tier_registry import TierName
from kvtier.errors import ConfigError, StartError
from kvtier.secret import read_secret, secret_lines

__all__ = ["TierSection", "secret_in"]


class TierSection(Section):
    """The settings of one tier. Override ``is_enabled`` and ``place``, and what differs."""

    place_key: ClassVar[str] = "directory"
    """Key that says where the blocks are."""
    switch_key: ClassVar[str] = "enabled"
    """Key that says whether there is such a tier."""
    file_backed_key: ClassVar[str] = ""
    """Key whose value may come from a file instead, which the key with ``_file`` names."""
    fixed_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that only a restart changes, even while the tier is detached."""

    @property
    def is_enabled(self) -> bool:
        """Whether this node is to have the tier."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """Where the blocks are. No two open tiers may have the same place."""
        raise NotImplementedError

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
        """Share of what leaves the CPU tier that is written, with the mode ``DEMOTE``."""
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
        """Return the same with another value of ``file_backed_key``.

        Raises ValueError if it makes no sense; its text follows the name of a file.
        """
        return self.model_copy(update={self.file_backed_key: value})

    def eviction_policy(self, cpu_policy: str) -> str:  # others follow it
        """Return the policy by which the tier evicts when the CPU tier goes by ``cpu_policy``."""
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
