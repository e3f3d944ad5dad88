"""Creates the document of ``kvtier explain``: which blocks are cached, what was decided, and why.

It answers "why did this request not hit?" from the index (what is cached now), the history (what
happened to missing blocks) and the decision log (decisions and their results). It contains neither
text nor tokens.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.api.rpc.operator_service import ExplainQuestion
from kvtier.core.fate import Fate
from kvtier.core.identity import HASH_BYTES, NO_TENANT, BlockHash
from kvtier.core.index import Scope
from kvtier.core.limits import EXPLAINED_RUNS_MAX
from kvtier.core.plan import PlanOutcome, PlanReason, RestorePlan
from kvtier.core.planner import PlanEvaluation
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.table import as_keys
from kvtier.daemon.persistence.key_spaces import KeySpaces
from kvtier.node.node import Node
from kvtier.node.state.block_run import BlockRun, PromptChain, find_own
from kvtier.node.state.decision_log import LoggedDecision

__all__ = ["FATE_SENTENCES", "PLAN_SENTENCES", "Explainer"]

FATE_SENTENCES: Mapping[Fate, str] = {
    Fate.NEVER_STORED: "not seen before, or too long ago to be remembered",
    Fate.NOT_OFFERED: "requested before, but no engine has stored it since",
    Fate.REFUSED_WORTH: "offered, but worth less than the blocks it would have evicted",
    Fate.REFUSED_DEPTH: "beyond max_offload_tokens",
    Fate.REFUSED_BUDGET: "evicted from the CPU tier, and not in the share written to slower tiers",
    Fate.REFUSED_FULL: "offered, but the tier or its write queue was full",
    Fate.EVICTED: "evicted to make room for others",
    Fate.DROPPED: "dropped by an operator",
    Fate.EXPIRED: "expired",
    Fate.FAILED_CHECK: "damaged: its bytes were not those that were stored",
    Fate.IDENTITY: "another block has its hash: the length, parent or position differs",
    Fate.SALT: "cached for another tenant or model only, which is not shared",
    Fate.TOO_SHORT: "the prompt does not fill a block, and only full blocks are cached",
    Fate.COST: "cached, but computing it was predicted to be faster",
    Fate.DEADLINE: "the tier did not answer in time",
    Fate.TIER_DOWN: "the tier that has it is out",
    Fate.DETACHED: "in a tier that an operator has detached",
}
"""Why a block is not served; docs/operations/explain.md lists the same sentences."""

PLAN_SENTENCES: Mapping[PlanReason, str] = {
    PlanReason.ALL: "restoring all cached blocks is fastest",
    PlanReason.PART: "restoring this part is fastest; the rest is computed sooner",
    PlanReason.SPLIT: "the end is restored while the beginning is computed, until they meet",
    PlanReason.COST: "computing is faster",
    PlanReason.RISK: "computing is slower on average, but restoring might take far longer",
    PlanReason.GUARD: "the tier is skipped for now, because its recent restores did not pay off",
    PlanReason.LIMIT: "limited by the request",
    PlanReason.NOTHING: "none of the missing blocks is cached",
    PlanReason.ALWAYS: "cost.restore is always",
    PlanReason.NEVER: "cost.restore is never",
}
"""Why this number of blocks was restored."""

_Document = dict[str, Any]
"""Part of the document, of JSON values."""


class Explainer:
    """Creates the document from a node, on the loop's thread. Changes nothing."""

    def __init__(
        self,
        node: Node,
        spaces: KeySpaces,
        block_tokens: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``block_tokens`` is used for key spaces whose engines are unknown."""
        self._node = node
        self._spaces = spaces
        self._block_tokens = block_tokens
        self._clock_ns = clock_ns

    def document(self, question: ExplainQuestion) -> _Document | None:
        """Return the document, or None if the question only names a request, and it is unknown."""
        now_ns = self._clock_ns()
        decision = None
        if question.request_id:
            decision = self._node.decision_log.find_request(question.request_id)
        if decision is not None and not question.key_space:
            question = _about(decision)
        if not question.key_space:
            return None
        return {
            "request_id": question.request_id,
            "chain": self._chain(question, now_ns),
            "decision": self._decision(decision, now_ns) if decision else None,
        }

    def _chain(self, question: ExplainQuestion, now_ns: int) -> _Document:
        """Return where the blocks of a chain are, and why the first missing one is missing."""
        scope = Scope(question.key_space, question.tenant)
        chain = PromptChain.of(scope, question.hashes, self._payload_bytes(question))
        rows, own_end = find_own(self._node.cache.index, chain)
        run = self._node.find(chain, 0, now_ns)
        num_blocks, block_tokens = len(rows), self._tokens_of(question.key_space)
        is_whole = 0 < num_blocks == len(run)
        return {
            "key_space": question.key_space.hex(),
            "tenant": "" if question.tenant == NO_TENANT else question.tenant.hex(),
            "block_tokens": block_tokens,
            "blocks": num_blocks,
            "tokens": num_blocks * block_tokens,
            "prompt_tokens": question.num_tokens or num_blocks * block_tokens,
            "tiers": {tier.value: self._held(rows[:own_end], tier) for tier in LOWER_TIERS},
            "served": {
                "blocks": len(run),
                "tokens": len(run) * block_tokens,
                "runs": [{"tier": tier.value, "blocks": count} for tier, count in run.by_tier()],
                "reason": run.reason,
            },
            "missing": None if is_whole else self._missing(question, chain, run, now_ns),
        }

    def _missing(
        self, question: ExplainQuestion, chain: PromptChain, run: BlockRun, now_ns: int
    ) -> _Document:
        """Return why the first block that is not served is missing."""
        gap = len(run)
        upto = PromptChain.of(
            chain.scope, question.hashes[: (gap + 1) * HASH_BYTES], chain.payload_bytes
        )
        num_known = gap + self._was_seen(question.hashes, gap)
        fates = self._node.miss_fates.of_lookup(
            upto, gap, run, num_known, is_late=False, now_ns=now_ns
        )
        fate = next(iter(fates), Fate.NEVER_STORED)
        is_unknown = fate in {Fate.NEVER_STORED, Fate.NOT_OFFERED}
        if is_unknown and self._is_somewhere(question.unsalted, gap):
            fate = Fate.SALT
        return {
            "block": gap,
            "first_token": gap * self._tokens_of(question.key_space),
            "fate": fate.value,
            "sentence": FATE_SENTENCES[fate],
        }

    def _was_seen(self, hashes: bytes, place: int) -> bool:
        """Return whether a block was requested or offered before."""
        key = BlockHash(hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES])
        history = self._node.history
        return history is not None and history.times_seen(key) > 0

    def _is_somewhere(self, hashes: bytes, place: int) -> bool:
        """Return whether any tier has a block, in any key space."""
        key = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
        if not key:
            return False
        index = self._node.cache.index
        rows = index.find(as_keys(key))
        return rows[0] >= 0 and any(
            index.cell(int(rows[0]), tier) == Residency.READY for tier in LOWER_TIERS
        )

    def _held(self, rows: npt.NDArray[np.int64], tier: TierName) -> _Document:
        """Return which blocks a tier has, as runs (first, count)."""
        state = self._node.cache.index.residency(rows, tier)
        is_there = (rows >= 0) & (state == Residency.READY)
        edges = np.flatnonzero(np.diff(is_there, prepend=False, append=False))
        runs = [[int(a), int(b - a)] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return {
            "blocks": int(is_there.sum()),
            "runs": runs[:EXPLAINED_RUNS_MAX],
            "more_runs": max(0, len(runs) - EXPLAINED_RUNS_MAX),
        }

    def _payload_bytes(self, question: ExplainQuestion) -> int:
        """Return the size of a chain's blocks: from an engine, else from its first known block."""
        for session in self._node.sessions.values():
            if session.key_space == question.key_space:
                return session.layout.block_bytes
        rows = self._node.cache.index.find(as_keys(question.hashes))
        known = rows[rows >= 0]
        return int(self._node.cache.index.payload_bytes[known[0]]) if len(known) else 0

    def _tokens_of(self, key_space: bytes) -> int:
        named = self._spaces.get(key_space)
        return named.block_tokens if named else self._block_tokens

    def _decision(self, decision: LoggedDecision, now_ns: int) -> _Document:
        """Return what was found for a request, what was decided, and the outcome."""
        ask, plan = decision.ask, decision.plan
        return {
            "number": decision.number,
            "engine": decision.engine,
            "age_s": _number((now_ns - decision.at_ns) / 1e9),
            "reason": plan.reason.value,
            "sentence": PLAN_SENTENCES[plan.reason],
            "inputs": {
                "prompt_tokens": ask.num_tokens,
                "first_token": ask.first_token,
                "block_tokens": ask.block_tokens,
                "block_bytes": ask.block_bytes,
                "found": _runs(decision.found),
                "found_reason": decision.reason,
                "sources": [
                    {
                        "tier": source.tier.value,
                        "blocks": source.num_blocks,
                        "queued_bytes": source.queued_bytes,
                    }
                    for source in ask.sources
                ],
                "limit_blocks": ask.limit_blocks,
                "can_split": ask.can_split,
                "waiting_tokens": ask.load.waiting_tokens,
                "running": ask.load.num_running,
            },
            "plan": _plan(plan),
            "missed": [
                {"fate": fate.value, "blocks": count, "sentence": FATE_SENTENCES[fate]}
                for fate, count in decision.missed.items()
            ],
            "outcome": _outcome(decision.outcome) if decision.outcome else None,
            "judgement": _evaluation(decision.evaluation) if decision.evaluation else None,
            "model": self._node.planner.document() if self._node.planner else None,
        }


def _about(decision: LoggedDecision) -> ExplainQuestion:
    """Return a question about the chain of a request."""
    return ExplainQuestion(
        decision.request_id,
        decision.ask.key_space,
        decision.tenant,
        decision.hashes,
        decision.ask.num_tokens,
    )


def _plan(plan: RestorePlan) -> _Document:
    """Return a plan; without cached blocks there is no prediction."""

    def predicted(seconds: float) -> float | None:
        return None if plan.reason is PlanReason.NOTHING else _number(seconds)

    return {
        "blocks": plan.num_blocks,
        "split": plan.is_split,
        "wait_s": _number(plan.wait_ns / 1e9),
        "restore_s": {
            "mean": predicted(plan.restore.mean_s),
            "p95": predicted(plan.restore.p95_s),
        },
        "recompute_s": {
            "mean": predicted(plan.recompute.mean_s),
            "p95": predicted(plan.recompute.p95_s),
        },
        "first_token_s": predicted(plan.total_s),
        "first_token_by_recompute_s": predicted(plan.recompute_total_s),
    }


def _outcome(outcome: PlanOutcome) -> _Document:
    return {
        "restored": _runs(outcome.tiers),
        "restore_s": _number(outcome.restore_s),
        "computed_tokens": outcome.computed_tokens,
        "compute_s": _number(outcome.compute_s),
        "wait_s": _number(outcome.wait_s),
        "first_token_s": _number(outcome.ttft_s),
    }


def _evaluation(evaluation: PlanEvaluation) -> _Document:
    return {
        "taken": evaluation.taken,
        "saved_s": {tier.value: _number(seconds) for tier, seconds in evaluation.saved_s.items()},
        "lost_s": {tier.value: _number(seconds) for tier, seconds in evaluation.lost_s.items()},
        "regret_s": _number(evaluation.regret_s),
        "cold_s": None if evaluation.cold_s is None else _number(evaluation.cold_s),
    }


def _runs(runs: Iterable[Sequence[Any]]) -> list[_Document]:
    return [{"tier": tier.value, "blocks": count} for tier, count in runs]


def _number(seconds: float) -> float | None:
    """Return seconds to the microsecond; None if not finite, because JSON has no such numbers."""
    return round(seconds, 6) if math.isfinite(seconds) else None
