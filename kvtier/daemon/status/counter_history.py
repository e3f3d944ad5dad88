"""Keeps snapshots of the counters of the last five minutes, for rates and curves.

Snapshots are taken even if nobody is watching, so that the first view has rates.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier.core.residency import LOWER_TIERS
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
from kvtier.observe.metrics import Metric

__all__ = ["SNAPSHOT_PERIOD_S", "CounterHistory", "CounterSnapshot", "Samples", "grown"]

SNAPSHOT_PERIOD_S = 5.0
_NUM_STEPS_MAX = 60
"""Five minutes: the time that an operator who was just paged wants to see."""

_Counters = Mapping[str, Any]
"""Numbers that only grow, and groups of such numbers."""


class Samples:
    """All series of a registry at one time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in registry.collect():
            for sample in family.samples:
                self._series[sample.name].append((sample.labels, sample.value))

    def sum(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Return the sum of a metric's series with these labels."""
        series = self._series.get(metric.name + suffix, ())
        return sum(value for given, value in series if labels.items() <= given.items())

    def count(self, metric: Metric, suffix: str = "", **labels: str) -> int:
        """Return the sum as an integer."""
        return int(self.sum(metric, suffix, **labels))

    def counts(self, metric: Metric, **fixed: str) -> dict[str, int]:
        """Return the nonzero counts of a metric by its last label."""
        label, values = metric.labels[-1]
        counts = {value: self.count(metric, **fixed, **{label: value}) for value in values}
        return {value: count for value, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """All counters at one time; ``seconds``, the uptime, is one of them."""

    counters: _Counters
    engines: Mapping[str, _Counters]
    """Counters by session token. Tokens are credentials, and are not reported."""

    @classmethod
    def of(
        cls, uptime_s: float, samples: Samples, sessions: Collection[Session]
    ) -> "CounterSnapshot":
        """Read all counters, on the loop's thread."""
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
    """Snapshots of the last five minutes, oldest first."""

    def __init__(self) -> None:
        self._snapshots: deque[CounterSnapshot] = deque(maxlen=_NUM_STEPS_MAX + 1)

    def note(self, now: CounterSnapshot) -> None:
        """Add a snapshot; the oldest is removed."""
        self._snapshots.append(now)

    def before(self, now: CounterSnapshot, seconds: float) -> CounterSnapshot:
        """Return the latest snapshot that is at least ``seconds`` old, or the oldest one."""
        since_s = now.counters["seconds"] - seconds
        older = [each for each in self._snapshots if each.counters["seconds"] <= since_s]
        return older[-1] if older else next(iter(self._snapshots), now)

    def steps(self) -> list[_Counters]:
        """Return the growth from each snapshot to the next, without groups."""
        return [
            grown(before.counters, _numbers(now.counters))
            for before, now in pairwise(self._snapshots)
        ]


def grown(before: _Counters, now: _Counters) -> dict[str, Any]:
    """Return the growth of counters; missing ones were 0.

    A sum over engines falls when an engine detaches; that counts as no growth.
    """
    return {
        name: grown(before.get(name, {}), each)
        if isinstance(each, Mapping)
        else round(max(0, each - before.get(name, 0)), 6)
        for name, each in now.items()
    }


def _numbers(counters: _Counters) -> _Counters:
    return {name: each for name, each in counters.items() if not isinstance(each, Mapping)}
