"""The section ``[ssd]`` of the configuration."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtier.config.section import GIB, HOUR, MIB, MS, PAGE, SECOND, at_most, setting
from kvtier.config.tiers import TierSection, default_cache_directory
from kvtier.core.eviction import EVICTION_POLICIES, own_order_of
from kvtier.core.slow_tier import WriteMode
from kvtier.core.tier_registry import TierName
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import Config

__all__ = ["SETTINGS", "SsdConfig", "ssd_settings"]

if TYPE_CHECKING:
    SsdEvictionName = str
else:
    _RANKED = [name for name, policy in EVICTION_POLICIES.items() if policy.is_ranked]
    SsdEvictionName = Literal[("auto", *_RANKED, "lru")]


class SsdConfig(TierSection):
    """The SSD tier: segment files in one directory."""

    fixed_keys: ClassVar[frozenset[str]] = frozenset({"eviction"})

    enabled: bool = setting(
        True,
        "Whether there is an SSD tier.",
        why="It keeps blocks across restarts.",
    )
    required: bool = setting(
        False,
        "Whether the daemon refuses to start without this tier. false: it starts without the tier "
        "and opens it once the directory can be used; on a volume with less space than "
        "ssd.capacity the tier uses the space that is available.",
        why="A cache without its disk is better than no cache.",
    )
    directory: Path = setting(
        None,
        "Directory of the segment files. It is created if missing (mode 0700), and used by one "
        "daemon at a time. Without XDG_CACHE_HOME it is ~/.cache/kvtier.",
        why="The user's directory for files that can be recreated.",
        shown="$XDG_CACHE_HOME/kvtier",
        example="/var/cache/kvtier",
        default_factory=default_cache_directory,
    )
    capacity_bytes: int = setting(
        20 * GIB,
        "Total size of all files, including metadata; a hard limit.",
        why="Fits a workstation; `kvtier plan` computes what pays off on a node.",
        ge=4 * MIB,
    )
    segment_bytes: int = setting(
        256 * MIB,
        "Size of a segment file, which is also the unit of reclaiming.",
        why="Large files keep the drive's garbage collection cheap; small ones evict fewer blocks "
        "at a time.",
        ge=MIB,
        le=16 * GIB,
        multiple_of=PAGE,
    )
    free_space_floor_bytes: int = setting(
        GIB,
        "Free space to leave on the volume; below it nothing is written.",
        why="A full volume would break other programs and their logs.",
        live=True,
        ge=0,
    )
    free_inodes_floor: int = setting(
        1000,
        "Free inodes to leave on the volume. A segment takes one.",
        why="Other programs can still create files until someone has a look.",
        live=True,
        ge=0,
    )
    keep: bool = setting(
        True,
        "Whether blocks outlive the daemon. false: the tier is emptied when the daemon stops or "
        "the tier is detached, and after a crash at the next start.",
        why="Finding the blocks again after a restart is the purpose of the tier.",
    )
    durability: Literal["segment", "batch"] = setting(
        "segment",
        "What a power failure may lose. segment: the blocks since the last full segment; batch: "
        "nothing that was reported as written, at the cost of a sync per batch. A killed process "
        "loses nothing in either mode.",
        why="Lost blocks can be recomputed, but every sync costs time.",
    )
    write: Literal["demote", "second_use", "store"] = setting(
        "demote",
        "When a block is written. demote: when the CPU tier is about to evict it and its predicted "
        "reuse is in the best share (ssd.gate); second_use: when it is requested for the second "
        "time; store: immediately.",
        why="Most blocks are never used again, and every write wears the drive.",
    )
    gate: float = setting(
        0.75,
        "With ssd.write demote: share of the blocks leaving the CPU tier that is written. A write "
        "budget lowers it.",
        why="Saves a fifth of the writes and loses hardly any hits.",
        live=True,
        ge=0.0,
        le=1.0,
    )
    eviction: SsdEvictionName = setting(
        "auto",
        "Which blocks are evicted from the SSD tier first; see policy.eviction. auto: the policy "
        "of the CPU tier if it ranks blocks by predicted reuse, else lru.",
        why="A policy that suits one tier usually suits the other.",
    )
    flush_after_ns: int = setting(
        300 * SECOND,
        "With ssd.write demote: blocks that have been in the CPU tier for this long are written "
        "too, if the gate accepts them, so that a crash does not lose them; 0: never.",
        why="A crash then loses at most five minutes of work.",
        live=True,
        ge=0,
        le=24 * HOUR,
    )
    write_budget_bytes: int = setting(
        0,
        "Bytes per day that may be written to the drive, including relocated blocks and metadata, "
        "as a token bucket of one day; 0: no limit. Set it to the drive's rated endurance divided "
        "by its lifetime in days.",
        why="Only the operator knows the drive; until it is set, ssd.gate limits the writes.",
        live=True,
        ge=0,
    )
    max_age_ns: int = setting(
        0,
        "Blocks older than this are not served and are removed; 0: no limit. For operators who "
        "must limit how long prompts are stored.",
        why="Blocks do not get worse with age.",
        live=True,
        ge=0,
        le=3650 * 24 * HOUR,
    )
    scrub_rate_bytes: int = setting(
        4 * MIB,
        "Bytes per second that are read in the background to find damaged blocks before they are "
        "requested; 0: none.",
        why="That is 337 GiB a day, which no drive notices.",
        live=True,
        ge=0,
    )
    seal: Literal["off", "encrypt"] = setting(
        "off",
        "Whether blocks are encrypted at rest, with AES-256-GCM and the first key of "
        "seal.key_file. Without encryption, prompts can be reconstructed from the blocks.",
        why="Encryption needs keys that someone manages.",
    )
    direct_io: Literal["auto", "on", "off"] = setting(
        "auto",
        "Whether to bypass the page cache. auto: if the file system supports it.",
        why="With the page cache, blocks would be in memory twice.",
    )
    io_threads: int = setting(
        4,
        "Number of concurrent reads and writes.",
        why="A drive needs a few for its full bandwidth; more only lengthen the queue.",
        ge=1,
        le=64,
    )
    deadline_ns: int = setting(
        2 * SECOND,
        "A read or write fails after this time, plus the time to transfer its bytes.",
        why="Recomputing a few thousand tokens takes about as long.",
        live=True,
        ge=10 * MS,
        le=10 * 60 * SECOND,
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that two segments fit: one is written while another is reclaimed."""
        half_bytes = self.capacity_bytes // 2
        return at_most("ssd.segment", self.segment_bytes, "half of ssd.capacity", half_bytes)

    @property
    def is_enabled(self) -> bool:
        """Return ``ssd.enabled``."""
        return self.enabled

    @property
    def place(self) -> str:
        """Return ``ssd.directory``."""
        return str(self.directory)

    @property
    def is_required(self) -> bool:
        """Return ``ssd.required``."""
        return self.required

    @property
    def write_mode(self) -> WriteMode:
        """Return ``ssd.write``."""
        return WriteMode(self.write)

    @property
    def gate_share(self) -> float:
        """Return ``ssd.gate``."""
        return self.gate

    @property
    def seal_mode(self) -> str:
        """Return ``ssd.seal``."""
        return self.seal

    @property
    def scrub_bytes_per_s(self) -> int:
        """Return ``ssd.scrub_rate``."""
        return self.scrub_rate_bytes

    @property
    def reported_bytes(self) -> int:
        """Return ``ssd.capacity``."""
        return self.capacity_bytes

    @property
    def state_directory(self) -> Path | None:
        """Return ``ssd.directory``: what the daemon learned belongs to the blocks."""
        return self.directory

    def eviction_policy(self, cpu_policy: str) -> str:
        """Return ``ssd.eviction``, or what follows from the CPU tier's."""
        return own_order_of(cpu_policy if self.eviction == "auto" else self.eviction)


def ssd_settings(config: "Config") -> SsdConfig:
    """Return the section ``[ssd]`` of a configuration, for tools that work on its files."""
    section = config.tiers[TierName.SSD]
    assert isinstance(section, SsdConfig)
    return section


SETTINGS = SsdConfig
"""The section ``[ssd]``."""
