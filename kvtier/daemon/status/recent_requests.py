"""The most recent requests with the result of each decision.

Requests appear by the id of their client; their content is not reported.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvtier.core.plan import PlanReason
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.node.state.decision_log import DecisionLog, LoggedDecision

__all__ = ["recent_requests"]

_SHOWN_MAX = 32
"""More than a terminal shows; each one costs ten microseconds per document."""

_Document = dict[str, Any]
"""JSON values."""


def recent_requests(decision_log: DecisionLog, now_ns: int) -> list[_Document]:
    """Return the most recent requests, newest first."""
    return [_request(each, now_ns) for each in decision_log.latest(_SHOWN_MAX)]


def _request(decision: LoggedDecision, now_ns: int) -> _Document:
    """Return one request; unknown values are None."""
    ask, plan, outcome, evaluation = (
        decision.ask,
        decision.plan,
        decision.outcome,
        decision.evaluation,
    )
    is_compared = plan.reason is not PlanReason.NOTHING and plan.total_s > 0
    saved_s = None
    if evaluation is not None:
        saved_s = sum(evaluation.saved_s.values(), 0.0) - sum(evaluation.lost_s.values())
    return {
        "decision": decision.number,
        "request_id": decision.request_id,
        "engine": decision.engine,
        "age_s": round((now_ns - decision.at_ns) / 1e9, 1),
        "prompt_tokens": ask.num_tokens,
        "gpu_tokens": ask.first_token,
        "found_tokens": _tokens(decision.found, ask.block_tokens),
        "planned_tokens": plan.num_blocks * ask.block_tokens,
        "reason": plan.reason.value,
        "predicted_s": _seconds(plan.total_s if is_compared else None),
        "recompute_s": _seconds(plan.recompute_total_s if is_compared else None),
        "restored_tokens": _tokens(outcome.tiers, ask.block_tokens) if outcome else None,
        "first_token_s": _seconds(outcome.ttft_s if outcome else None),
        "saved_s": _seconds(saved_s),
        "regret_s": _seconds(evaluation.regret_s if evaluation else None),
        "cold_s": _seconds(evaluation.cold_s if evaluation else None),
    }


def _tokens(runs: Iterable[tuple[TierName, int]], block_tokens: int) -> dict[str, int]:
    blocks: Counter[TierName] = Counter()
    for tier, length in runs:
        blocks[tier] += length
    return {tier.value: blocks[tier] * block_tokens for tier in LOWER_TIERS}


def _seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
