"""The settings section ``[directory]``."""

from pathlib import Path

from kvtier.config.section import MIB, SECOND, setting
from kvtier.config.tiers import TierSection


class DirectoryConfig(TierSection):
    """Blocks as files of a directory."""

    enabled: bool = setting(False, "Whether there is such a tier.", why="It is an example.")
    directory: Path = setting(
        Path("/nonexistent"), "Where the files are.", why="There is none to assume.", shown="none"
    )
    capacity_bytes: int = setting(64 * MIB, "Total size of the files.", why="For tests.", ge=MIB)
    deadline_ns: int = setting(
        2 * SECOND, "A read or write fails after this time.", why="For tests.", ge=SECOND
    )

    @property
    def is_enabled(self) -> bool:
        return self.enabled

    @property
    def place(self) -> str:
        return str(self.directory)

    @property
    def reported_bytes(self) -> int:
        return self.capacity_bytes


SETTINGS = DirectoryConfig
