"""Closes a tier whose recent restores took longer than computing would have.

Theory
------
The models can be wrong in ways they cannot detect, so the guard only looks at outcomes: what a
request gained or lost against computing, relative to the time of computing. Each outcome counts as
one, however bad. If most recent ones lost, and all together lost, the tier is closed for a while.
Then a single request tries it, which opens it again or closes it for twice as long.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = ["TierGuard"]

_OUTCOMES = 10
"""Number of recent outcomes that count."""

_OUTCOMES_MIN = 5
"""Fewer outcomes are not enough evidence."""

_LOSS = 0.03
"""A tier that costs less than this on average stays open: predictions are no better than that."""

_PAUSE_NS = 5_000_000_000
_PAUSE_MAX_NS = 160_000_000_000
"""The first and the longest pause: a tier that recovers is used again within minutes."""

_TRIAL_NS = 30_000_000_000
"""A trial without an outcome for this long is abandoned, and another one may start."""


@dataclass(slots=True)
class _GuardedTier:
    """The guard's state of one tier."""

    gains: deque[float] = field(default_factory=lambda: deque(maxlen=_OUTCOMES))
    closed_ns: int | None = None
    pause_ns: int = _PAUSE_NS
    trial_ns: int | None = None
    """Start of the current trial."""

    def is_losing(self) -> bool:
        """Return whether restoring lost time over several outcomes, and in most of them."""
        losses = sum(gain < 0 for gain in self.gains)
        is_enough = len(self.gains) >= _OUTCOMES_MIN and 2 * losses > len(self.gains)
        return is_enough and sum(self.gains) < -_LOSS * len(self.gains)


class TierGuard:
    """Tracks which tiers are closed."""

    def __init__(self) -> None:
        self._tiers: Mapping[TierName, _GuardedTier] = {
            tier: _GuardedTier() for tier in LOWER_TIERS
        }

    def closed(self, now_ns: int) -> frozenset[TierName]:
        """Return the tiers that are closed now, except one that may be tried."""
        return frozenset(
            tier for tier, guarded in self._tiers.items() if not _may_use(guarded, now_ns)
        )

    def begin(self, tier: TierName, now_ns: int) -> None:
        """Note that a restore from a tier was decided; for a closed tier this is the trial."""
        guarded = self._tiers[tier]
        if guarded.closed_ns is not None:
            guarded.trial_ns = now_ns

    def note(self, tier: TierName, gain_share: float, now_ns: int) -> None:
        """Note an outcome: seconds gained (or lost, if negative), relative to computing."""
        guarded = self._tiers.get(tier)
        if guarded is None or not -1e9 <= gain_share <= 1e9:
            return
        gain = min(max(gain_share, -1.0), 1.0)
        guarded.gains.append(gain)
        if guarded.closed_ns is None:
            if guarded.is_losing():
                guarded.closed_ns, guarded.trial_ns = now_ns, None
            elif len(guarded.gains) == _OUTCOMES and not any(gain < 0 for gain in guarded.gains):
                guarded.pause_ns = _PAUSE_NS
        elif guarded.trial_ns is not None:  # else decided before the tier closed
            guarded.trial_ns = None
            if gain > -_LOSS:
                guarded.closed_ns = None
                guarded.gains.clear()
            else:
                guarded.closed_ns = now_ns
                guarded.pause_ns = min(2 * guarded.pause_ns, _PAUSE_MAX_NS)


def _may_use(guarded: _GuardedTier, now_ns: int) -> bool:
    if guarded.closed_ns is None:
        return True
    # The clock may have been set back: that must not keep a tier closed.
    if guarded.trial_ns is not None:
        return not 0 <= now_ns - guarded.trial_ns < _TRIAL_NS
    return not 0 <= now_ns - guarded.closed_ns < guarded.pause_ns
