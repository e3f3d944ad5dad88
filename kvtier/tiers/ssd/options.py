"""What a store may be told, and what of it cannot be."""

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
"""One to append to and one to keep: with less, each new segment would empty the tier."""

_SEGMENT_BYTES_MIN = 4 * PAGE_BYTES
"""A header, one record of two pages, a footer."""


class Durability(StrEnum):
    """When written blocks are made to survive a power loss."""

    BATCH = "batch"
    """Before ``write`` returns."""
    SEGMENT = "segment"
    """When a segment is full, and on ``close``."""


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """What has a good default."""

    direct_io: DirectIO = DirectIO.AUTO
    durability: Durability = Durability.SEGMENT
    free_space_floor_bytes: int = 0
    """Space of the volume that is left to others."""
    free_inodes_floor: int = 0
    """Inodes of the volume that are left to others."""
    write_budget_bytes: int = 0
    """What may be written in a day, all told; 0: no limit."""
    max_age_s: int = 0
    """Blocks written longer ago are not served; 0: no limit."""
    is_kept: bool = True
    """Whether blocks outlive the tier: else it is emptied when it is opened, and when closed."""
    seal: Seal = field(default_factory=lambda: Seal(SealMode.OFF, None, "ssd"))
    """How blocks are protected at rest."""
    num_workers: int = 4
    """Calls that may read at once; each has a staging buffer."""
    worth: ValuePerByte | None = None
    """What a byte of each block is worth keeping; None: what was read lately is. Asked on the
    threads of writes, for about a thousand blocks or those of one segment."""
    now_s: Clock = wall_clock_s
    hook: StepHook = no_hook


def check_sizes(capacity_bytes: int, segment_bytes: int) -> None:
    """Refuse sizes that no store can have; raises StartError."""
    if segment_bytes % PAGE_BYTES or segment_bytes < _SEGMENT_BYTES_MIN:
        raise StartError(
            "ssd.segment",
            f"{segment_bytes} bytes are no multiple of {PAGE_BYTES} from {_SEGMENT_BYTES_MIN} up",
            "set a size such as 256MiB",
        )
    if capacity_bytes < _SEGMENTS_MIN * segment_bytes + METADATA_BYTES:
        raise StartError(
            "ssd.capacity",
            f"{capacity_bytes} bytes have no room for {_SEGMENTS_MIN} segments of {segment_bytes}",
            "raise ssd.capacity or lower ssd.segment",
        )
