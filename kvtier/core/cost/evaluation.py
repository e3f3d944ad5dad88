"""Evaluates what a decision saved or cost, by comparing its outcome with the alternative.

The time of the alternative is never observed. Computing is predicted by the model fitted to the
engine's real steps, restoring by the current models of the tiers. All figures are bounded by the
times that they are derived from, so a wrong report cannot spoil a sum.

Predictions are too high for an engine that was busy while it was measured. So if the same prompt
was computed before, the claim is limited to the difference from its measured time. Nothing is
claimed as saved on the basis of an engine's first few steps alone.

The guard uses predictions, because they take the engine's load into account.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.core.cost.fit import SECONDS_MAX
from kvtier.core.cost.restore_path import RestorePaths
from kvtier.core.plan import PlanEvaluation, PlanOutcome, PlanRequest, RestorePlan
from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = [
    "CostEvaluation",
    "evaluate",
    "restored_blocks",
    "seconds_of",
    "took_s",
]


@dataclass(frozen=True, slots=True)
class CostEvaluation:
    """An evaluation, and the gains for the guard."""

    evaluation: PlanEvaluation
    gains: Mapping[TierName, float]
    """Gain by tier, relative to the time of computing."""


def restored_blocks(outcome: PlanOutcome, plan: RestorePlan) -> dict[TierName, int]:
    """Return the number of blocks restored from each tier, no more than planned."""
    counts: dict[TierName, int] = {}
    left = plan.num_blocks
    for tier, count in outcome.tiers:
        taken = min(count, left) if count > 0 else 0
        if tier in LOWER_TIERS and taken:
            counts[tier] = counts.get(tier, 0) + taken
            left -= taken
    return counts


def seconds_of(value: float) -> float:
    """Return a reported time within the possible bounds; an invalid one is 0."""
    return min(value, SECONDS_MAX) if value > 0 else 0.0


def took_s(outcome: PlanOutcome) -> float:
    """Return the time to first token without the wait in the engine's queue."""
    return max(seconds_of(outcome.ttft_s) - seconds_of(outcome.wait_s), 0.0)


def evaluate(
    request: PlanRequest,
    plan: RestorePlan,
    outcome: PlanOutcome,
    paths: RestorePaths,
    cold_s: float | None = None,
) -> CostEvaluation:
    """Return the time that an outcome saved or cost.

    ``cold_s`` is the measured time to compute the same prompt, if known.
    """
    own_s, computing_s = took_s(outcome), paths.recompute.mean_s
    if not plan.num_blocks:
        other_s = _best_restore_s(request, paths)
        regret_s = min(max(computing_s - other_s, 0.0), own_s)
        return CostEvaluation(PlanEvaluation({}, {}, regret_s, "recompute"), {})
    gain_s = min(max(computing_s - own_s, -own_s), _worth_s(plan, paths))
    restored = restored_blocks(outcome, plan)
    blamed = restored if gain_s >= 0 else _awaited(request, plan, restored, paths)
    # If part of the prompt is on the GPU, the time of computing all of it is only an upper bound.
    measured_s = None if request.first_token else cold_s
    claim_s = gain_s
    if gain_s > 0 and cold_s is not None:
        claim_s = min(gain_s, max(cold_s - own_s, 0.0))
    elif measured_s is not None:
        claim_s = max(gain_s, min(measured_s - own_s, 0.0))
    if measured_s is None and not paths.is_settled:
        claim_s = min(claim_s, 0.0)
    saved_s = _shared(restored, claim_s) if claim_s > 0 else {}
    lost_s = _shared(blamed, -claim_s) if claim_s < 0 else {}
    gains = dict.fromkeys(blamed, gain_s / max(computing_s, 1e-6))
    return CostEvaluation(
        PlanEvaluation(saved_s, lost_s, max(-claim_s, 0.0), "restore", measured_s), gains
    )


def _worth_s(plan: RestorePlan, paths: RestorePaths) -> float:
    """Return the most a plan can save: the time of computing what it restores, without waiting.

    This limits the effect of clients that report wrong prompt lengths or loads.
    """
    worth_s = paths.recompute_of(plan.num_blocks).mean_s - paths.wait_s
    return min(max(worth_s, 0.0), SECONDS_MAX)


def _best_restore_s(request: PlanRequest, paths: RestorePaths) -> float:
    if not request.num_found:
        return paths.recompute.mean_s
    # Splitting is not considered: its prediction would rest on too many guesses.
    return min(path.total.mean_s for path in paths.without_split(request.num_found))


def _awaited(
    request: PlanRequest, plan: RestorePlan, restored: Mapping[TierName, int], paths: RestorePaths
) -> Mapping[TierName, int]:
    """Return the tiers that the request waited for: those that fell short, else the slowest."""
    planned = request.by_tier(plan.num_blocks)
    if not plan.is_split:  # in a split, late blocks are computed instead
        late = {
            tier: count - restored.get(tier, 0)
            for tier, count in planned.items()
            if count > restored.get(tier, 0)
        }
        if late:
            return late
    _, slowest = paths.predicted(planned)
    return {slowest: 1}


def _shared(counts: Mapping[TierName, int], seconds: float) -> dict[TierName, float]:
    total = sum(counts.values())
    return {tier: seconds * count / total for tier, count in counts.items()} if total else {}
