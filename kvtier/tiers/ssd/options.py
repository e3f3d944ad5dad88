"""Options of an SSD tier and their limits."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import StartError
from kvtier.tiers.seal import Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO, StepHook, no_hook
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.store_limits import Clock, wall_clock_s
from kvtier.tiers.ssd.victim import ValuePerByte

__all__ = ["Durability", "SsdOptions", "check_sizes"]

_SEGMENTS_MIN = 2
"""One to append to and one to keep: with fewer, each new segment would empty the tier."""

_SEGMENT_BYTES_MIN = 4 * PAGE_BYTES
"""A header page, one record of two pages, a footer."""


class Durability(StrEnum):
    """When written blocks become safe against a power loss."""

    BATCH = "batch"
    """Before ``write`` returns."""
    SEGMENT = "segment"
    """When a segment is full, and on ``close``."""


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """Options of an ``SsdTier``."""

    direct_io: DirectIO = DirectIO.AUTO
    durability: Durability = Durability.SEGMENT
    free_space_floor_bytes: int = 0
    """Free space of the volume left to others."""
    free_inodes_floor: int = 0
    """Free inodes of the volume left to others."""
    write_budget_bytes: int = 0
    """Maximum bytes written per day, including metadata; 0: no limit."""
    max_age_s: int = 0
    """Blocks written longer ago are not served; 0: no limit."""
    is_persistent: bool = True
    """Blocks survive the tier; if False, it is emptied when opened and when closed."""
    seal: Seal = field(default_factory=lambda: Seal(SealMode.OFF, None, "ssd"))
    """How blocks are protected at rest."""
    num_workers: int = 4
    """Reads that may run at once; each has a staging buffer."""
    value_per_byte: ValuePerByte | None = None
    """Returns the value of keeping a byte of each block; None: recently read blocks are kept.
    Called on writing threads, for about a thousand blocks or those of one segment.
    """
    now_s: Clock = wall_clock_s
    hook: StepHook = no_hook


def check_sizes(capacity_bytes: int, segment_bytes: int) -> None:
    """Raise StartError for sizes that no store can have."""
    if segment_bytes % PAGE_BYTES or segment_bytes < _SEGMENT_BYTES_MIN:
        raise StartError(
            "ssd.segment",
            f"{segment_bytes} bytes are below {_SEGMENT_BYTES_MIN} or no multiple of {PAGE_BYTES}",
            "set a size such as 256MiB",
        )
    if capacity_bytes < _SEGMENTS_MIN * segment_bytes + METADATA_BYTES:
        raise StartError(
            "ssd.capacity",
            f"{capacity_bytes} bytes do not hold {_SEGMENTS_MIN} segments of {segment_bytes}",
            "raise ssd.capacity or lower ssd.segment",
        )
