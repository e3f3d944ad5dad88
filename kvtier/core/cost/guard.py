"""Closes a tier whose recent restores took longer than computing would have.

Theory
------
The models can be wrong in ways that they cannot see, so the guard only looks at outcomes: what a
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
"""Fewer are no evidence."""

_LOSS = 0.03
"""A tier that costs less than this on average stays open: predictions are no better than that."""

_PAUSE_NS = 5_000_000_000
_PAUSE_MAX_NS = 160_000_000_000
"""The first and the longest pause: a tier that recovers is used again within minutes."""

_TRIAL_NS = 30_000_000_000
"""A trial without an outcome for this long is abandoned, and another one may start."""


@dataclass(slots=True)
class _Watch:
    """The guard's state of one tier."""

    gains: deque[float] = field(default_factory=lambda: deque(maxlen=_OUTCOMES))
    closed_ns: int | None = None
    pause_ns: int = _PAUSE_NS
    trial_ns: int | None = None
    """Start of the current trial."""

    def is_losing(self) -> bool:
        """Tell whether restoring lost time over several outcomes, and in most of them."""
        losses = sum(gain < 0 for gain in self.gains)
        is_enough = len(self.gains) >= _OUTCOMES_MIN and 2 * losses > len(self.gains)
        return is_enough and sum(self.gains) < -_LOSS * len(self.gains)


class TierGuard:
    """Tracks which tiers are closed."""

    def __init__(self) -> None:
        self._watches: Mapping[TierName, _Watch] = {tier: _Watch() for tier in LOWER_TIERS}

    def closed(self, now_ns: int) -> frozenset[TierName]:
        """Return the tiers that are closed now, except one that may be tried."""
        return frozenset(
            tier for tier, watch in self._watches.items() if not _may_use(watch, now_ns)
        )

    def begin(self, tier: TierName, now_ns: int) -> None:
        """Note that a restore from a tier was decided; for a closed tier this is the trial."""
        watch = self._watches[tier]
        if watch.closed_ns is not None:
            watch.trial_ns = now_ns

    def note(self, tier: TierName, gain_share: float, now_ns: int) -> None:
        """Note an outcome: seconds gained (or lost, if negative), relative to computing."""
        watch = self._watches.get(tier)
        if watch is None or not -1e9 <= gain_share <= 1e9:
            return
        gain = min(max(gain_share, -1.0), 1.0)
        watch.gains.append(gain)
        if watch.closed_ns is None:
            if watch.is_losing():
                watch.closed_ns, watch.trial_ns = now_ns, None
            elif len(watch.gains) == _OUTCOMES and not any(gain < 0 for gain in watch.gains):
                watch.pause_ns = _PAUSE_NS
        elif watch.trial_ns is not None:  # otherwise decided before it closed
            watch.trial_ns = None
            if gain > -_LOSS:
                watch.closed_ns = None
                watch.gains.clear()
            else:
                watch.closed_ns = now_ns
                watch.pause_ns = min(2 * watch.pause_ns, _PAUSE_MAX_NS)


def _may_use(watch: _Watch, now_ns: int) -> bool:
    if watch.closed_ns is None:
        return True
    # The clock may have been set back: that must not keep a tier closed.
    if watch.trial_ns is not None:
        return not 0 <= now_ns - watch.trial_ns < _TRIAL_NS
    return not 0 <= now_ns - watch.closed_ns < watch.pause_ns
