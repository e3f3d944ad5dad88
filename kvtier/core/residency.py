"""The tiers, and the state of a block in a tier."""

from enum import IntEnum

from kvtier.core.tier_registry import LOWER_TIERS, SLOW_TIERS, TierName

__all__ = ["LOWER_TIERS", "SLOW_TIERS", "Residency", "TierName"]


class Residency(IntEnum):
    """A block's state in one tier; only ``READY`` blocks are ever served."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    EVICTING = 3
    UNVERIFIED = 4
    """The tier had the block but may have lost it. It is served again once the tier confirms it."""
