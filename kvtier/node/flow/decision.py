"""Decides how many of the found blocks to restore, and handles the reported outcomes.

The planner decides. This module builds its input: which tier would serve which blocks, what is
queued before them, and how busy the engine is. Decisions go to the decision log, and engines'
measurements go back to the planner.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import groupby

import numpy as np

from kvtier.core.fate import Fate
from kvtier.core.identity import HASH_BYTES
from kvtier.core.limits import OUTCOME_LATE_NS, SAMPLE_MAX_S
from kvtier.core.plan import EngineLoad, PlanEvaluation, PlanOutcome, PlanReason, RestorePlan
from kvtier.core.planner import Planner, PlanRequest, Source
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import Use
from kvtier.node.messages.actions import LookupResult
from kvtier.node.messages.events import Load, Lookup
from kvtier.node.state.block_run import BlockRun
from kvtier.node.state.decision_log import DecisionLog, LoggedDecision
from kvtier.node.state.session import Session
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import (
    ACTUAL_SECONDS,
    DECISIONS,
    LOST_SECONDS,
    PREDICTED_SECONDS,
    REGRET_SECONDS,
    SAVED_MEASURED_SECONDS,
    SAVED_SECONDS,
)
from kvtier.observe.log import Log
from kvtier.observe.metrics import Metrics

__all__ = ["Decisions"]

_log = Log("kvtier.node")

_COMPUTED = frozenset({PlanReason.PART, PlanReason.COST, PlanReason.RISK, PlanReason.GUARD})
"""Reasons why computing cached blocks is faster."""


class Decisions:
    """All decisions of a node. Without a planner none are made, and everything is restored."""

    def __init__(
        self,
        transfers: TierTransfers,
        planner: Planner | None,
        decision_log: DecisionLog,
        metrics: Metrics,
    ) -> None:
        self.decision_log = decision_log
        self._transfers = transfers
        self._planner = planner
        self._metrics = metrics

    def decide(
        self,
        event: Lookup,
        session: Session,
        run: BlockRun,
        missed: Counter[Fate],
        max_offload_tokens: int | None,
        *,
        now_ns: int,
    ) -> LookupResult:
        """Answer a lookup; blocks that are found but not restored are added to ``missed``."""
        runs = run.by_tier()
        if self._planner is None:
            return LookupResult(runs, run.reason, max_offload_tokens=max_offload_tokens)
        number = self.decision_log.next_number()
        num_tokens = len(event.hashes) // HASH_BYTES * session.layout.block_tokens
        ask = self._ask(session, run, event.first, num_tokens, event.traits)
        ask = replace(ask, load=event.load)
        session.counters.count_lookup(ask)
        plan = RestorePlan(number, 0, PlanReason.NOTHING)
        if len(run):
            plan = self._planner.plan(ask, number, now_ns)
            assert 0 <= plan.num_blocks <= len(run), "no more can be restored than was found"
            self._metrics.add(DECISIONS, int(session.is_of_first_rank), reason=plan.reason)
        _log.debug(
            "restore decision",
            request=event.traits.request_id,
            decision=number,
            engine=session.engine,
            found_blocks=len(run),
            restored_blocks=plan.num_blocks,
            reason=plan.reason,
            predicted_s=plan.total_s,
        )
        if plan.reason in _COMPUTED:
            missed[Fate.COST] += len(run) - plan.num_blocks
        self.decision_log.add(
            LoggedDecision(
                number=number,
                request_id=event.traits.request_id,
                session=session.token,
                engine=session.engine,
                at_ns=now_ns,
                ask=ask,
                plan=plan,
                found=runs,
                reason=run.reason,
                missed=dict(missed),
                tenant=event.tenant,
                hashes=event.hashes,
            )
        )
        return LookupResult(runs, run.reason, plan, max_offload_tokens)

    def plan_of(self, event: Load, session: Session) -> RestorePlan | None:
        """Return the plan that a load carries out, if it was made for the same session."""
        decision = self.decision_log.find(event.decision) if event.decision else None
        return decision.plan if decision and decision.session == session.token else None

    def conclude(self, session: Session, outcome: PlanOutcome, now_ns: int) -> None:
        """Record the outcome of a decision, once, and only from the engine it was made for."""
        decision = self.decision_log.open(outcome.decision, session.token, now_ns)
        if self._planner is None or decision is None or not _is_sane(outcome, decision):
            return
        evaluation = self._planner.note_outcome(
            decision.ask, decision.plan, outcome, now_ns, cold_s=self.decision_log.cold_s(decision)
        )
        self.decision_log.close(outcome.decision, outcome, evaluation)
        session.counters.count_outcome(decision.ask, outcome, evaluation)
        _log.debug(
            "first token",
            request=decision.request_id,
            decision=decision.number,
            restore_s=outcome.restore_s,
            ttft_s=outcome.ttft_s,
        )
        if session.is_of_first_rank:
            self._count(decision.plan, outcome, evaluation)

    def _count(self, plan: RestorePlan, outcome: PlanOutcome, evaluation: PlanEvaluation) -> None:
        for tier, seconds in evaluation.saved_s.items():
            self._metrics.add(SAVED_SECONDS, seconds, tier=tier)
            if evaluation.cold_s is not None:
                self._metrics.add(SAVED_MEASURED_SECONDS, seconds, tier=tier)
        for tier, seconds in evaluation.lost_s.items():
            self._metrics.add(LOST_SECONDS, seconds, tier=tier)
        self._metrics.add(REGRET_SECONDS, evaluation.regret_s, taken=evaluation.taken)
        if not plan.total_s:  # nothing was predicted
            return
        predicted_s = min(plan.total_s, SAMPLE_MAX_S)
        self._metrics.add(PREDICTED_SECONDS, predicted_s, of="first_token")
        self._metrics.add(ACTUAL_SECONDS, outcome.ttft_s, of="first_token")
        if outcome.tiers:
            self._metrics.add(PREDICTED_SECONDS, plan.restore.mean_s, of="restore")
            self._metrics.add(ACTUAL_SECONDS, outcome.restore_s, of="restore")

    def num_paying(
        self, session: Session, use: Use, run: BlockRun, first: int, *, now_ns: int
    ) -> int:
        """Return how many leading blocks of a run are worth prefetching for a waiting request."""
        if self._planner is None:
            return len(run)
        num_tokens = len(use.keys) * use.block_tokens
        ask = self._ask(session, run, first, num_tokens, use.traits)
        return self._planner.num_paying(replace(ask, load=session.load), now_ns)

    def _ask(
        self, session: Session, run: BlockRun, first: int, num_tokens: int, traits: RequestTraits
    ) -> PlanRequest:
        block_tokens, limit = session.layout.block_tokens, traits.max_load_tokens
        return PlanRequest(
            key_space=session.key_space,
            sources=self._sources(run),
            first_token=first * block_tokens,
            num_tokens=max(traits.num_tokens, num_tokens),
            block_tokens=block_tokens,
            block_bytes=session.layout.block_bytes,
            limit_blocks=None if limit is None else limit // block_tokens,
            load=EngineLoad(),
            can_split=session.can_split,
            session=session.token,
        )

    def _sources(self, run: BlockRun) -> tuple[Source, ...]:
        """Return the tiers that would serve a run; a block being read counts for its source."""
        queued = {name: lane.read_bytes for name, lane in self._transfers.lanes.items()}
        if not run.is_writing.any():
            return tuple(
                Source(tier, length, queued.get(tier, 0)) for tier, length in run.by_tier()
            )
        tiers = [tier for tier, length in run.by_tier() for _ in range(length)]
        for place in np.flatnonzero(run.is_writing).tolist():
            tier = self._transfers.reading(int(run.rows[place]))
            if tier is not None:
                tiers[place] = tier
                queued[tier] -= min(queued[tier], run.payload_bytes)
        pieces = ((tier, len(list(same))) for tier, same in groupby(tiers))
        return tuple(Source(tier, length, queued.get(tier, 0)) for tier, length in pieces)


def _is_sane(outcome: PlanOutcome, decision: LoggedDecision) -> bool:
    """Return whether an outcome is plausible; one that is not would spoil every sum."""
    times = (outcome.restore_s, outcome.compute_s, outcome.wait_s, outcome.ttft_s)
    if not all(math.isfinite(seconds) and 0 <= seconds <= SAMPLE_MAX_S for seconds in times):
        return False
    if outcome.ttft_s - outcome.wait_s > OUTCOME_LATE_NS / 1e9:  # too late to be reported
        return False
    num_found = sum(length for _, length in decision.found)
    num_blocks = sum(length for _, length in outcome.tiers)
    is_counted = all(length >= 0 and tier is not TierName.GPU for tier, length in outcome.tiers)
    return is_counted and outcome.computed_tokens >= 0 and num_blocks <= num_found
