"""Creates the policy, cost and worth sections of the status document."""

from collections.abc import Mapping
from typing import Any

from kvtier.core.residency import LOWER_TIERS
from kvtier.daemon.policies import Policies
from kvtier.daemon.status.counter_history import Samples
from kvtier.node.node import Node
from kvtier.observe.daemon_metrics import (
    ACTUAL_SECONDS,
    DECISIONS,
    LOST_SECONDS,
    MISSED_BLOCKS,
    PREDICTED_SECONDS,
    REFUSED_BLOCKS,
    REGRET_SECONDS,
    SAVED_MEASURED_SECONDS,
    SAVED_SECONDS,
    route_of,
)
from kvtier.observe.metrics import Metric

__all__ = ["ROUTES", "BenefitAccount"]

ROUTES: Mapping[str, str] = {
    f"{tier}_{'read' if is_read else 'write'}": route_of(tier, is_read=is_read)
    for tier in LOWER_TIERS
    for is_read in (True, False)
}
"""Routes by their names in the cost model: engines read the CPU tier, the node reads the others."""

_Document = dict[str, Any]
"""A section, of JSON values."""


class BenefitAccount:
    """Creates these sections for ``node`` and its policies; for the loop's thread."""

    def __init__(self, node: Node, policies: Policies) -> None:
        self._node = node
        self._policies = policies

    def policy(self) -> _Document:
        """Return the eviction policy, the gates, and the offload depth per class."""
        return {
            "eviction": self._policies.rule,
            "remembered_blocks": self._policies.history.num_remembered,
            "retained_bytes": self._node.retention.retained_bytes(),
            "gates": {
                tier.value: {
                    "share": round(gate.share, 4),
                    "threshold": round(gate.threshold, 6),
                    "offered_blocks": gate.num_offered,
                    "taken_blocks": gate.num_taken,
                }
                for tier, gate in self._policies.admission.gates.items()
            },
            "classes": self._policies.depth.classes(),
        }

    def cost(self, now_ns: int) -> _Document:
        """Return the cost model's predictions for each measured route and engine."""
        planner = self._policies.planner
        learned = planner.document()
        routes = {ROUTES[name]: _route(route) for name, route in learned["restore"].items()}
        return {
            "routes": routes,
            "engines": {name: _engine(each) for name, each in learned["recompute"].items()},
            "guarded": sorted(tier.value for tier in planner.guarded(now_ns)),
        }

    def worth(self, samples: Samples) -> _Document:
        """Return the results of decisions: predicted, actual, saved and lost time, and misses."""
        saved = {tier: samples.sum(SAVED_SECONDS, tier=tier) for tier in LOWER_TIERS}
        lost = {tier: samples.sum(LOST_SECONDS, tier=tier) for tier in LOWER_TIERS}
        return {
            "saved_s": _seconds(sum(saved.values())),
            "saved_measured_s": _seconds(samples.sum(SAVED_MEASURED_SECONDS)),
            "lost_s": _seconds(sum(lost.values())),
            "regret_s": _seconds(samples.sum(REGRET_SECONDS)),
            "regret_by_road_s": _by_label(samples, REGRET_SECONDS),
            "tiers": {
                tier.value: {"saved_s": _seconds(saved[tier]), "lost_s": _seconds(lost[tier])}
                for tier in LOWER_TIERS
            },
            "decisions": samples.counts(DECISIONS),
            "predicted_s": _by_label(samples, PREDICTED_SECONDS),
            "actual_s": _by_label(samples, ACTUAL_SECONDS),
            "missed_blocks": samples.counts(MISSED_BLOCKS),
            "refused_blocks": {
                tier.value: samples.counts(REFUSED_BLOCKS, tier=tier) for tier in LOWER_TIERS
            },
        }


def _route(learned: Mapping[str, Any]) -> _Document:
    start_s, block_s = learned["rates"][:2]
    return {
        "start_s": start_s,
        "per_block_s": block_s,
        "bytes_per_s": round(learned["bytes_per_s"]),
        "p95_over_mean": round(learned["tail"], 2),
        "samples": learned["num_noted"],
    }


def _engine(learned: Mapping[str, Any]) -> _Document:
    base_s, token_s, attended_s = learned["prefill"]["rates"]
    return {
        "tokens_per_s": round(learned["tokens_per_s"], 1),
        "floor_s": learned["floor_s"],
        "step_s": base_s,
        "per_token_s": token_s,
        "per_attended_s": attended_s,
        "p95_over_mean": round(learned["prefill"]["tail"], 2),
        "samples": learned["prefill"]["num_noted"],
    }


def _by_label(samples: Samples, metric: Metric) -> dict[str, float]:
    ((label, values),) = metric.labels
    return {value: _seconds(samples.sum(metric, **{label: value})) for value in values}


def _seconds(seconds: float) -> float:
    return round(seconds, 3)
