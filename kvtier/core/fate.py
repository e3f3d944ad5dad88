"""What became of a block that is not there: the closed set of answers to "why a miss?"."""

from enum import StrEnum

__all__ = ["Fate"]


class Fate(StrEnum):
    """Why a block could not be served. Each is a label of ``kvtier_missed_blocks_total``."""

    NEVER_STORED = "never_stored"
    """It was not seen before, or too long ago to be remembered."""
    NOT_OFFERED = "not_offered"
    """It was asked for before, and no engine offered it since."""
    REFUSED_WORTH = "refused_worth"
    """It was offered, and worth less than what it would have pushed out."""
    REFUSED_DEPTH = "refused_depth"
    """It lies beyond ``max_offload_tokens``."""
    REFUSED_BUDGET = "refused_budget"
    """It left the CPU tier, and was not in the share that is written to the SSD."""
    REFUSED_FULL = "refused_full"
    """There was no room, or the way there was full."""
    EVICTED = "evicted"
    DROPPED = "dropped"
    """By an operator."""
    EXPIRED = "expired"
    FAILED_CHECK = "failed_check"
    """Its bytes were not those that were stored."""
    IDENTITY = "identity"
    """Something else goes by its name: another length, parent or position."""
    SALT = "salt"
    """Another tenant, or another model, has these tokens."""
    TOO_SHORT = "too_short"
    """The tokens fill no block."""
    COST = "cost"
    """It was there, and computing it was decided to be faster."""
    DEADLINE = "deadline"
    """It did not come in time."""
    TIER_DOWN = "tier_down"
    """The tier that has it does not answer."""
    DETACHED = "detached"
    """It was in a tier that an operator took off."""
