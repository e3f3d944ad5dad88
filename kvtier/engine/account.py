"""What one request's prompt cost: who supplied each token, and where the time went."""

from dataclasses import dataclass, field

from kvtier.core.plan import PlanOutcome
from kvtier.core.residency import TierName
from kvtier.engine.request import TierTokens

__all__ = ["Stalls", "Timing", "TokenAccount"]

_NOT_YET, _COUNTED = b"\0", b"\1"


class TokenAccount:
    """Who supplied each prompt token first: a tier, or the engine by computing it.

    Supply comes from both ends where a load from the back meets the computing, and comes again
    after a preemption; so each token has a mark of its own, and counts once.
    """

    def __init__(self, num_prompt: int) -> None:
        self.computed = 0
        self.by_tier: dict[TierName, int] = {}
        self._marks = bytearray(num_prompt)

    @property
    def num_counted(self) -> int:
        """Return the prompt tokens that somebody supplied so far."""
        return self.computed + sum(self.by_tier.values())

    def count(self, source: TierName | None, start: int, end: int) -> None:
        """Count the prompt tokens from ``start`` to ``end`` that nobody supplied yet.

        The source None has computed them.
        """
        end = min(end, len(self._marks))
        num_new = self._marks.count(_NOT_YET, start, end)
        if not num_new:
            return
        self._marks[start:end] = _COUNTED * (end - start)
        if source is None:
            self.computed += num_new
        else:
            self.by_tier[source] = self.by_tier.get(source, 0) + num_new

    def is_counted(self, end: int) -> bool:
        """Tell whether every prompt token before ``end`` was supplied."""
        return not self._marks.count(_NOT_YET, 0, min(end, len(self._marks)))

    def tier_tokens(self) -> TierTokens:
        """Return the tokens that were not computed, by tier."""
        return TierTokens(**{tier.value: count for tier, count in self.by_tier.items()})


class Stalls:
    """Time in which there were requests and nothing could be computed, by what they waited for."""

    def __init__(self) -> None:
        self._waited_ns: dict[str, int] = {}
        self._waits_for = ""
        self._since_ns = 0

    def note(self, waits_for: str, now_ns: int) -> None:
        """Note what is waited for from now on; nothing while something is computed."""
        if self._waits_for:
            waited_ns = self._waited_ns.get(self._waits_for, 0) + now_ns - self._since_ns
            self._waited_ns[self._waits_for] = waited_ns
        self._waits_for, self._since_ns = waits_for, now_ns

    def seconds(self) -> dict[str, float]:
        """Return the time so far, up to the last note; from any thread."""
        return {waited: ns / 1e9 for waited, ns in self._waited_ns.copy().items()}


@dataclass(slots=True)
class Timing:
    """Where the time until a request's first token went."""

    arrival_ns: int
    waiting_since_ns: int
    wait_ns: int = 0
    restore_began_ns: int = 0
    restore_ns: int = 0
    compute_s: float = 0.0
    restored: dict[TierName, int] = field(default_factory=dict)
    """Blocks by the tier they came from."""
    is_spoilt: bool = False
    """It lost its blocks once, and what it took in all says nothing of its plan."""

    def begin_waiting(self, now_ns: int) -> None:
        """Note that the request stands in the queue again."""
        self.waiting_since_ns = now_ns

    def end_waiting(self, now_ns: int) -> None:
        """Note that the request left the queue."""
        self.wait_ns += now_ns - self.waiting_since_ns

    def begin_restoring(self, now_ns: int) -> None:
        """Note that its blocks are asked for."""
        self.restore_began_ns = now_ns

    def note_restored(self, tiers: tuple[TierName, ...], now_ns: int) -> None:
        """Note that more blocks are in place."""
        self.restore_ns = now_ns - self.restore_began_ns
        for tier in tiers:
            self.restored[tier] = self.restored.get(tier, 0) + 1

    def outcome(
        self, decision: int, computed_tokens: int, first_token_ns: int
    ) -> PlanOutcome | None:
        """Return what came of a plan, or None where that cannot be told."""
        if not decision or self.is_spoilt:
            return None
        return PlanOutcome(
            decision=decision,
            tiers=tuple(self.restored.items()),
            restore_s=self.restore_ns / 1e9,
            computed_tokens=computed_tokens,
            compute_s=self.compute_s,
            wait_s=self.wait_ns / 1e9,
            ttft_s=(first_token_ns - self.arrival_ns) / 1e9,
        )
