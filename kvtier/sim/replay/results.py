"""Results of a replay: per request, and in total."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.core.residency import TierName
from kvtier.core.tier_registry import STORE_TIER
from kvtier.observe.daemon_metrics import EVICTED_BLOCKS
from kvtier.sim.replay.node_adapter import NodeAdapter
from kvtier.sim.replay.setup import ReplaySetup

__all__ = ["Distribution", "ReplayRun", "RequestResult", "TraceSummary"]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Result of one request."""

    at_ns: int
    num_tokens: int
    hit_tokens: Mapping[TierName, int]
    """Restored tokens by tier."""
    ttft_s: float
    cold_s: float
    """Its time to first token without any cache."""
    reason: str = ""
    """Reason of the plan."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Distribution":
        """Summarize durations."""
        if not len(seconds):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
        return cls(float(np.mean(seconds)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Sums over part of a trace, such as its second half."""

    num_requests: int
    num_tokens: int
    hit_tokens: Mapping[TierName, int]
    ttft: Distribution
    cold: Distribution
    saved_s: float
    """Seconds of TTFT saved, summed over all requests; negative if it got slower."""
    cold_s: float

    @classmethod
    def of(cls, records: Sequence[RequestResult]) -> "TraceSummary":
        """Sum up the results of requests."""
        hits = {tier: sum(r.hit_tokens.get(tier, 0) for r in records) for tier in _TIERS}
        ttft, cold = [r.ttft_s for r in records], [r.cold_s for r in records]
        return cls(
            num_requests=len(records),
            num_tokens=sum(r.num_tokens for r in records),
            hit_tokens=hits,
            ttft=Distribution.of(ttft),
            cold=Distribution.of(cold),
            saved_s=sum(cold) - sum(ttft),
            cold_s=sum(cold),
        )

    def ratio(self, tiers: Iterable[TierName] | None = None) -> float:
        """Return the share of prompt tokens that came from these tiers, or from any."""
        named = _TIERS if tiers is None else tiers
        return sum(self.hit_tokens[tier] for tier in named) / max(1, self.num_tokens)

    @property
    def saved_share(self) -> float:
        """Return the share of seconds saved."""
        return self.saved_s / self.cold_s if self.cold_s else 0.0

    def document(self) -> dict[str, Any]:
        """Return the summary for JSON."""
        return {
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "hit_tokens": {str(tier): count for tier, count in self.hit_tokens.items()},
            "hit_ratio": round(self.ratio(), 5),
            "ttft_s": _document(self.ttft),
            "ttft_without_s": _document(self.cold),
            "saved_s": round(self.saved_s, 3),
            "saved_share": round(self.saved_share, 5),
        }


_TIERS = (TierName.CPU, STORE_TIER)


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """Results of a replay, as plain values that can come from another process."""

    policy: str
    cpu_blocks: int
    ssd_blocks: int
    whole: TraceSummary
    second_half: TraceSummary
    """The second half of the time, not of the requests."""
    written_blocks: int
    read_blocks: int
    gate_shares: tuple[float, float]
    """Share of blocks leaving the CPU tier that were written, in each half of the time."""
    evicted_blocks: Mapping[str, int]
    decision: Distribution
    """Real seconds that the node takes per lookup."""
    decision_p999_s: float
    node_s: float
    """Mean real seconds that the node takes per request, in all."""
    reasons: Mapping[str, int]
    ttft_curve: Sequence[float]
    """The percentiles of TTFT, from 0 to 100."""
    cold_curve: Sequence[float]

    @classmethod
    def of(
        cls,
        setup: ReplaySetup,
        records: Sequence[RequestResult],
        adapter: NodeAdapter,
        half: tuple[int, int],
    ) -> "ReplayRun":
        """Summarize the results; ``half`` are the gate's counts at half time."""
        half_ns = records[-1].at_ns / 2
        decisions = adapter.decisions_s or [0.0]
        reasons: dict[str, int] = {}
        for record in records:
            if record.reason:
                reasons[record.reason] = reasons.get(record.reason, 0) + 1
        return cls(
            policy=setup.policy,
            cpu_blocks=setup.cpu_blocks,
            ssd_blocks=setup.ssd_blocks,
            whole=TraceSummary.of(records),
            second_half=TraceSummary.of([r for r in records if r.at_ns >= half_ns]),
            written_blocks=adapter.ssd.num_written,
            read_blocks=adapter.ssd.num_read,
            gate_shares=_shares(half, adapter.gate_counts()),
            evicted_blocks=_evictions(adapter),
            decision=Distribution.of(decisions),
            decision_p999_s=float(np.quantile(decisions, 0.999)),
            node_s=adapter.busy_s / len(records),
            reasons=dict(sorted(reasons.items())),
            ttft_curve=_curve([r.ttft_s for r in records]),
            cold_curve=_curve([r.cold_s for r in records]),
        )

    @property
    def written_per_read(self) -> float | None:
        """Return the blocks written per block read back; None if none was read."""
        return self.written_blocks / self.read_blocks if self.read_blocks else None

    def document(self) -> dict[str, Any]:
        """Return the run for JSON; only ``decision_s`` and ``node_s`` vary between runs."""
        ratio = self.written_per_read
        return {
            "policy": self.policy,
            "cpu_blocks": self.cpu_blocks,
            "ssd_blocks": self.ssd_blocks,
            "whole": self.whole.document(),
            "second_half": self.second_half.document(),
            "written_blocks": self.written_blocks,
            "read_blocks": self.read_blocks,
            "written_per_read": None if ratio is None else round(ratio, 4),
            "gate_shares": [round(share, 4) for share in self.gate_shares],
            "evicted_blocks": dict(self.evicted_blocks),
            "reasons": dict(self.reasons),
            "decision_s": _document(self.decision) | {"p999": round(self.decision_p999_s, 6)},
            "node_s": round(self.node_s, 6),
        }


def _document(times: Distribution) -> dict[str, float]:
    return {
        "mean": round(times.mean_s, 6),
        "p50": round(times.p50_s, 6),
        "p90": round(times.p90_s, 6),
        "p99": round(times.p99_s, 6),
    }


def _curve(seconds: Sequence[float]) -> list[float]:
    points = np.linspace(0, 1, 101)
    return [round(each, 6) for each in np.quantile(seconds, points).tolist()]


def _shares(half: tuple[int, int], whole: tuple[int, int]) -> tuple[float, float]:
    late = (whole[0] - half[0], whole[1] - half[1])
    first, second = (taken / max(1, offered) for offered, taken in (half, late))
    return first, second


def _evictions(adapter: NodeAdapter) -> dict[str, int]:
    """Return how many blocks each tier has evicted for space."""
    found: dict[str, int] = {}
    for tier in _TIERS:
        labels = {"tier": str(tier), "reason": "capacity"}
        value = adapter.metrics.registry.get_sample_value(EVICTED_BLOCKS.name, labels)
        found[str(tier)] = int(value or 0)
    return found
