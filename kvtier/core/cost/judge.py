"""What a decision saved or cost: its outcome compared with the alternative that was not chosen.

The time of the alternative is never observed. Computing is predicted by the model that was fitted
to the engine's real steps, restoring by what is known of the tiers by now. All figures are bounded
by the times that they are derived from, so that a wrong report cannot spoil a sum.

Predictions for an engine that was busy while it was measured are too high. So if the same prompt
was computed before, no more is claimed than the difference from its measured time. And nothing is
claimed as saved on the basis of an engine's first few steps alone.

The guard uses predictions, because they take the engine's load into account.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.core.cost.fit import SECONDS_MAX
from kvtier.core.cost.roads import Roads
from kvtier.core.plan import Ask, Judgement, PlanOutcome, RestorePlan
from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = ["CostVerdict", "judge", "planned_blocks", "restored_blocks", "seconds_of", "took_s"]


@dataclass(frozen=True, slots=True)
class CostVerdict:
    """A judgement, and what the guard is told."""

    judgement: Judgement
    gains: Mapping[TierName, float]
    """Gain by tier, over what computing takes."""


def restored_blocks(outcome: PlanOutcome, plan: RestorePlan) -> dict[TierName, int]:
    """Return what was restored by tier; no more than was planned."""
    counts: dict[TierName, int] = {}
    left = plan.num_blocks
    for tier, count in outcome.tiers:
        taken = min(count, left) if count > 0 else 0
        if tier in LOWER_TIERS and taken:
            counts[tier] = counts.get(tier, 0) + taken
            left -= taken
    return counts


def planned_blocks(ask: Ask, plan: RestorePlan) -> dict[TierName, int]:
    """Return what was to be restored by tier."""
    counts: dict[TierName, int] = {}
    left = plan.num_blocks
    for source in ask.sources:
        taken = min(max(source.num_blocks, 0), left)
        if taken:
            counts[source.tier] = counts.get(source.tier, 0) + taken
        left -= taken
    return counts


def seconds_of(value: float) -> float:
    """Return a reported time, brought to what is possible; one that is none is no time."""
    return min(value, SECONDS_MAX) if value > 0 else 0.0


def took_s(outcome: PlanOutcome) -> float:
    """Return the time to the first token without the wait in the engine's queue."""
    return max(seconds_of(outcome.ttft_s) - seconds_of(outcome.wait_s), 0.0)


def judge(
    ask: Ask, plan: RestorePlan, outcome: PlanOutcome, roads: Roads, cold_s: float | None = None
) -> CostVerdict:
    """Return what an outcome saved or cost.

    ``cold_s`` is the measured time of computing the same prompt, if there is one.
    """
    own_s, computing_s = took_s(outcome), roads.recompute.mean_s
    if not plan.num_blocks:
        other_s = _best_restore_s(ask, roads)
        regret_s = min(max(computing_s - other_s, 0.0), own_s)
        return CostVerdict(Judgement({}, {}, regret_s, "recompute"), {})
    gain_s = min(max(computing_s - own_s, -own_s), _worth_s(plan, roads))
    restored = restored_blocks(outcome, plan)
    blamed = restored if gain_s >= 0 else _awaited(ask, plan, restored, roads)
    # If part of the prompt is on the GPU, the time of computing all of it is only an upper bound.
    measured_s = None if ask.first_token else cold_s
    claim_s = gain_s
    if gain_s > 0 and cold_s is not None:
        claim_s = min(gain_s, max(cold_s - own_s, 0.0))
    elif measured_s is not None:
        claim_s = max(gain_s, min(measured_s - own_s, 0.0))
    if measured_s is None and not roads.is_settled:
        claim_s = min(claim_s, 0.0)
    saved_s = _shared(restored, claim_s) if claim_s > 0 else {}
    lost_s = _shared(blamed, -claim_s) if claim_s < 0 else {}
    gains = dict.fromkeys(blamed, gain_s / max(computing_s, 1e-6))
    return CostVerdict(Judgement(saved_s, lost_s, max(-claim_s, 0.0), "restore", measured_s), gains)


def _worth_s(plan: RestorePlan, roads: Roads) -> float:
    """Return the most a plan can save: the time of computing what it restores, without waiting.

    This limits the effect of clients that report wrong prompt lengths or loads.
    """
    worth_s = roads.recompute_of(plan.num_blocks).mean_s - roads.wait_s
    return min(max(worth_s, 0.0), SECONDS_MAX)


def _best_restore_s(ask: Ask, roads: Roads) -> float:
    if not ask.num_found:
        return roads.recompute.mean_s
    # Splitting is not considered: its prediction would rest on too many guesses.
    return min(road.total.mean_s for road in roads.plain(ask.num_found))


def _awaited(
    ask: Ask, plan: RestorePlan, restored: Mapping[TierName, int], roads: Roads
) -> Mapping[TierName, int]:
    """Return on whom the request waited: those that did not bring all, else the slowest."""
    planned = planned_blocks(ask, plan)
    if not plan.is_split:  # else what did not come was computed meanwhile
        late = {
            tier: count - restored.get(tier, 0)
            for tier, count in planned.items()
            if count > restored.get(tier, 0)
        }
        if late:
            return late
    _, slowest = roads.predicted(planned)
    return {slowest: 1}


def _shared(counts: Mapping[TierName, int], seconds: float) -> dict[TierName, float]:
    total = sum(counts.values())
    return {tier: seconds * count / total for tier, count in counts.items()} if total else {}
