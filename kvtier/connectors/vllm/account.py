"""Where the time until a request's first token went, as far as vLLM's scheduler sees it.

Restoring is the search for blocks and their copy; computing begins with the first step that has a
chunk of the request. What is left was spent in vLLM's queue.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.plan import PlanOutcome
from kvtier.core.residency import TierName

__all__ = ["RequestAccount"]


@dataclass(slots=True)
class RequestAccount:
    """Of one request; all times are on one monotonic clock."""

    arrived_s: float
    num_restored: int = 0
    """Blocks in place, of those that were held."""
    restore_s: float = 0.0
    computing_since_s: float | None = None
    computed_tokens: int = 0
    """Of the prompt."""
    compute_s: float = 0.0
    """Its share of the steps."""

    def note_chunk(self, num_prompt_tokens: int, now_s: float) -> None:
        """Note that a step computes some tokens of the prompt."""
        if self.computing_since_s is None:
            self.computing_since_s = now_s
        self.computed_tokens += num_prompt_tokens

    def outcome(self, decision: int, tiers: Sequence[TierName], now_s: float) -> PlanOutcome | None:
        """Return what came of a plan, once the first token is there; None if it cannot be told.

        ``tiers`` are those of the blocks that were held.
        """
        if not decision or self.computing_since_s is None:
            return None
        ttft_s = now_s - self.arrived_s
        computing_s = now_s - self.computing_since_s
        return PlanOutcome(
            decision=decision,
            tiers=tuple(Counter(tiers[: self.num_restored]).items()),
            restore_s=self.restore_s,
            computed_tokens=self.computed_tokens,
            compute_s=self.compute_s,
            wait_s=max(0.0, ttft_s - self.restore_s - computing_s),
            ttft_s=ttft_s,
        )
