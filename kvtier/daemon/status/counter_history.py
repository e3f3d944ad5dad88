"""What counters were in the last five minutes: how fast they grow, for whoever watches.

They are noted whether anybody watches or not, so that the first look has rates and a curve.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from kvtier.core.residency import LOWER_TIERS
from kvtier.daemon.status.samples import Samples
from kvtier.node.state.session import Session
from kvtier.observe.daemon_metrics import (
    ACTUAL_SECONDS,
    ASKED_TOKENS,
    DECISIONS,
    FOUND_TOKENS,
    LOADED_TOKENS,
    LOST_SECONDS,
    MISSED_BLOCKS,
    SAVED_SECONDS,
    TRANSFER_BYTES,
    TRANSFER_ROUTES,
    TransferRoute,
)

__all__ = ["NOTED_EVERY_S", "CounterHistory", "CounterSnapshot", "grown"]

NOTED_EVERY_S = 5.0
_NUM_STEPS_MAX = 60
"""Five minutes: what somebody who has just been paged wants to see at once."""

_Counters = Mapping[str, Any]
"""Numbers that only grow, and groups of them."""


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """The counters at one moment; the time is one of them."""

    counters: _Counters
    engines: Mapping[str, _Counters]
    """By session: who knows its token may speak for it, so it is told nobody."""

    @classmethod
    def of(
        cls, uptime_s: float, samples: Samples, sessions: Collection[Session]
    ) -> "CounterSnapshot":
        """Read them, on the loop's thread."""
        engines = {session.token: asdict(session.counters) for session in sessions}
        all_counters = [session.counters for session in sessions if session.is_of_first_rank]
        loaded = {tier.value: samples.count(LOADED_TOKENS, tier=tier) for tier in LOWER_TIERS}
        moved = {
            route: samples.count(TRANSFER_BYTES, route=route, outcome="complete")
            for route in TRANSFER_ROUTES
        }
        counters = {
            "seconds": uptime_s,
            "saved_s": samples.sum(SAVED_SECONDS),
            "lost_s": samples.sum(LOST_SECONDS),
            "actual_s": samples.sum(ACTUAL_SECONDS, of="first_token"),
            "asked_tokens": samples.count(ASKED_TOKENS),
            "found_tokens": samples.count(FOUND_TOKENS),
            "first_tokens": sum(counters.first_tokens for counters in all_counters),
            "first_token_s": sum(counters.first_token_s for counters in all_counters),
            "restored_bytes": moved[TransferRoute.CPU_TO_GPU.value],
            "served_tokens": {"gpu": sum(each.report.hit_tokens for each in sessions), **loaded},
            "moved_bytes": moved,
            "decisions": samples.counts(DECISIONS),
            "missed_blocks": samples.counts(MISSED_BLOCKS),
        }
        return cls(counters, engines)


class CounterHistory:
    """What was noted, oldest first."""

    def __init__(self) -> None:
        self._noted: deque[CounterSnapshot] = deque(maxlen=_NUM_STEPS_MAX + 1)

    def note(self, now: CounterSnapshot) -> None:
        """Keep it; the oldest goes."""
        self._noted.append(now)

    def before(self, now: CounterSnapshot, seconds: float) -> CounterSnapshot:
        """Return what was noted so long ago, or a step before; at the start, what was first."""
        since_s = now.counters["seconds"] - seconds
        older = [each for each in self._noted if each.counters["seconds"] <= since_s]
        return older[-1] if older else next(iter(self._noted), now)

    def steps(self) -> list[_Counters]:
        """Return by how much counters grew from each note to the next, without the groups."""
        return [
            grown(before.counters, _numbers(now.counters)) for before, now in pairwise(self._noted)
        ]


def grown(before: _Counters, now: _Counters) -> dict[str, Any]:
    """Return by how much counters grew; one that was not there before was 0.

    A sum over engines falls when one of them leaves: then it did not grow.
    """
    return {
        name: grown(before.get(name, {}), each)
        if isinstance(each, Mapping)
        else round(max(0, each - before.get(name, 0)), 6)
        for name, each in now.items()
    }


def _numbers(counters: _Counters) -> _Counters:
    return {name: each for name, each in counters.items() if not isinstance(each, Mapping)}
