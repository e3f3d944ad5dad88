"""Where a block is, and in which state it is there."""

from enum import IntEnum, StrEnum

__all__ = ["LOWER_TIERS", "SLOW_TIERS", "Residency", "TierName"]


class TierName(StrEnum):
    """The four tiers, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    SSD = "ssd"
    REMOTE = "remote"


LOWER_TIERS = (TierName.CPU, TierName.SSD, TierName.REMOTE)
"""The tiers that the daemon owns, in the order in which a load prefers them."""

SLOW_TIERS = (TierName.SSD, TierName.REMOTE)
"""Those that block, and that operators take off and put on while it runs."""


class Residency(IntEnum):
    """A block's state in one tier; only ``READY`` blocks are ever served."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    EVICTING = 3
    UNVERIFIED = 4
    """The tier had the block but may have lost it; it is not served until the tier confirms it."""
