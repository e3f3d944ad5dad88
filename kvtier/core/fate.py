"""Why a requested block could not be served."""

from enum import StrEnum

__all__ = ["Fate"]


class Fate(StrEnum):
    """The reason for a miss: each is a label value of ``kvtier_missed_blocks_total``."""

    NEVER_STORED = "never_stored"
    """It was not requested before, as far as the history remembers."""
    NOT_OFFERED = "not_offered"
    """It was requested before, but no engine has offered it since."""
    REFUSED_WORTH = "refused_worth"
    """It was offered, but is worth less than the blocks it would have evicted."""
    REFUSED_DEPTH = "refused_depth"
    """It lies beyond ``max_offload_tokens``."""
    REFUSED_BUDGET = "refused_budget"
    """It left the CPU tier and was outside the share that is written to the SSD."""
    REFUSED_FULL = "refused_full"
    """The tier, or the queue to it, was full."""
    EVICTED = "evicted"
    DROPPED = "dropped"
    """An operator dropped it."""
    EXPIRED = "expired"
    FAILED_CHECK = "failed_check"
    """Its bytes differed from those that were stored."""
    IDENTITY = "identity"
    """A block with this hash has another length, parent or position."""
    SALT = "salt"
    """Another tenant or model has these tokens."""
    TOO_SHORT = "too_short"
    """The tokens do not fill a block."""
    COST = "cost"
    """It was found, but recomputing was predicted to be faster."""
    DEADLINE = "deadline"
    """It did not arrive in time."""
    TIER_DOWN = "tier_down"
    """The tier that holds it does not answer."""
    DETACHED = "detached"
    """It was in a tier that an operator detached."""
