"""What is decided about a request, and what came of it."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.core.cost.sample import Estimate
from kvtier.core.residency import TierName

__all__ = ["Outcome", "Plan", "PlanReason"]


class PlanReason(StrEnum):
    """Why so much is restored and no more."""

    ALL = "all"
    """Restoring whatever is there ends first."""
    PART = "part"
    """Restoring the rest too would end later."""
    SPLIT = "split"
    """The rest is computed meanwhile."""
    COST = "cost"
    """Recomputing ends first."""
    RISK = "risk"
    """Recomputing ends later on average, but restoring might take far longer."""
    GUARD = "guard"
    """The tier did not pay lately."""
    LIMIT = "limit"
    """The request wants no more."""
    NOTHING = "nothing"
    """No block that it lacks is there."""
    ALWAYS = "always"
    NEVER = "never"
    """By configuration."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of what was found to restore: the first ``num_blocks`` of it, 0: nothing."""

    decision: int
    """Its number; outcomes refer to it."""
    num_blocks: int
    reason: PlanReason
    is_split: bool = False
    """Load from the back, and compute from the front meanwhile, until they meet."""
    wait_ns: int = 0
    """How long to wait for it; then what is there is used, and the rest computed."""
    restore: Estimate = field(default_factory=lambda: Estimate(0.0, 0.0))
    """Of the time until all of ``num_blocks`` are there."""
    recompute: Estimate = field(default_factory=lambda: Estimate(0.0, 0.0))
    """Of the time to compute the same tokens instead, the wait for the engine included."""
    total_s: float = 0.0
    """Predicted time to first token with this plan."""
    recompute_total_s: float = 0.0
    """Predicted time to first token without any restoring."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a plan, as its engine measured it."""

    decision: int
    tiers: tuple[tuple[TierName, int], ...]
    """Blocks restored, by the tier they came from."""
    restore_s: float
    """From asking for them until the last one that was used was in place."""
    computed_tokens: int
    """Of the prompt."""
    compute_s: float
    """The steps that computed them, as far as they were this request's share."""
    wait_s: float
    """In the engine's queue."""
    ttft_s: float
    """From the request's arrival to its first token."""
