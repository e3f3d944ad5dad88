"""Decides how many of the found blocks to restore, and whether to compute the front meanwhile.

Theory
------
The planner predicts every restore path and recomputing, including the queues before both, and takes
the fastest. Three rules qualify that. The kind of path last taken by similar requests is only
changed for a gain (hysteresis); a path that is faster on average but may be far slower is not taken
(risk); a tier whose recent restores lost time is left alone (guard).

A tier that is not used is not measured. If a tier has not been measured for a while, a request
occasionally tries a few of its blocks even though that does not seem to pay. Its wait for them is
so short that it loses next to nothing; late blocks are measured too, for the requests that follow.

Rules
-----
* No plan is predicted to take more than 5 % longer than computing everything.
* The time of a decision does not depend on the number of blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from kvtier.core.cost.engine import EngineCost, EngineCosts
from kvtier.core.cost.evaluation import (
    evaluate,
    restored_blocks,
    seconds_of,
    took_s,
)
from kvtier.core.cost.fit import number, table
from kvtier.core.cost.guard import TierGuard
from kvtier.core.cost.restore_path import RestorePath, RestorePaths
from kvtier.core.cost.route import RouteCosts, transfer_blocks
from kvtier.core.plan import (
    Estimate,
    ModelFlops,
    PlanEvaluation,
    PlannerSettings,
    PlanOutcome,
    PlanReason,
    PlanRequest,
    RestorePlan,
    Source,
    StepSample,
    TransferSample,
)
from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = ["PlanEvaluation", "PlanRequest", "Planner", "Source"]

_MARGIN = 0.03
"""Gain needed to change between restoring and computing: predictions scatter by as much."""

_SPLIT_GAIN = 0.08
"""Gain needed to split: the cost of one superfluous chunk. From a tier 15 times slower than
computing, where a split gains 6 % at best, splitting lost 8 % in the median."""

_RISK = 2.0
"""How much longer the slowest 5 % of restores may take than those of computing: a request then
rarely waits twice as long as without kvtier, and gains on average."""

_TRIAL_NS = 2_000_000_000
_TRIAL_MAX_NS = 8_000_000_000
"""Age of the last measurement at which a request tries a tier; doubled by each failed trial."""

_TRIAL_REST = 4.0
"""Minimum pause between trials, in durations of a request: few requests pay for them."""

_TRIAL_LOSS = 0.04
"""The most a trial may cost, as a share of the time to first token."""

_VERSION = 1


class Planner:
    """Predicts restoring and computing from past measurements, and takes the faster."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._restores = RouteCosts()
        self._engines = EngineCosts()
        self._guard = TierGuard()
        self._is_restoring: dict[tuple[TierName, int], bool] = {}
        """Last choice, by the tier waited for and the magnitude of the token count."""
        self._trials: dict[TierName, tuple[int | None, int]] = {}
        """By tier, when it was last tried and how long it is not tried again."""
        self._now_ns = 0

    def adopt(self, settings: PlannerSettings) -> None:
        """Replace the settings; keeps the learned state."""
        self._settings = settings

    # Deciding

    def plan(self, request: PlanRequest, decision: int, now_ns: int) -> RestorePlan:
        """Return the plan for a request."""
        self._now_ns = now_ns
        found = request.num_found
        if found <= 0:
            return RestorePlan(decision, 0, PlanReason.NOTHING)
        most = request.num_wanted
        paths = self._paths(request)
        if self._settings.mode == "never":
            return paths.no_restore(found, decision, PlanReason.NEVER)
        if not most:
            return paths.no_restore(found, decision, PlanReason.LIMIT)
        if self._settings.mode == "always":
            reason = PlanReason.ALWAYS if most == found else PlanReason.LIMIT
            path = paths.restore_path(most)
            return paths.plan(path, decision, reason, self._settings.wait_max_ns)
        open_blocks = self._open_blocks(request, now_ns)
        if not open_blocks:
            return paths.no_restore(most, decision, PlanReason.GUARD)
        full = PlanReason.ALL
        if min(open_blocks, most) < found:
            full = PlanReason.GUARD if open_blocks < most else PlanReason.LIMIT
        return self._cheapest(request, paths, min(open_blocks, most), decision, full)

    def _cheapest(
        self, request: PlanRequest, paths: RestorePaths, most: int, decision: int, full: PlanReason
    ) -> RestorePlan:
        """Take the fastest path with at most ``most`` blocks.

        ``full`` is the reason to give if it restores that many.
        """
        options = self._options(request, paths, most)
        best = _shortest(options)
        key = (best.slowest, (most * request.block_tokens).bit_length())
        chosen, refusal = self._chosen(options, paths, self._is_restoring.get(key))
        self._is_restoring[key] = chosen is not None
        trial = self._trial(request, paths, chosen, most)
        if trial is not None:
            path, wait_s = trial
            return paths.plan(path, decision, PlanReason.PART, self._wait_ns(wait_s))
        if chosen is None:
            return paths.no_restore(best.num_blocks, decision, refusal, best)
        for tier in request.by_tier(chosen.num_blocks):
            self._guard.begin(tier, self._now_ns)
            self._trials.pop(tier, None)
        reason = full if chosen.num_blocks == most else PlanReason.PART
        if chosen.is_split:
            reason = PlanReason.SPLIT
        # Waiting for blocks longer than it takes to compute them does not pay.
        wait_s = max(paths.recompute_of(chosen.num_blocks).mean_s, chosen.restore.mean_s)
        return paths.plan(chosen, decision, reason, self._wait_ns(wait_s))

    def _options(self, request: PlanRequest, paths: RestorePaths, most: int) -> list[RestorePath]:
        wait_max_s = self._settings.wait_max_ns / 1e9
        options = paths.without_split(max(paths.blocks_within(wait_max_s, most), 1))
        if request.can_split and self._settings.is_split_allowed:
            numbers = {most, _shortest(options).num_blocks}
            splits = [paths.split_path(number, wait_max_s) for number in numbers]
            options += [path for path in splits if path.is_split]
        return options

    def _chosen(
        self, options: Sequence[RestorePath], paths: RestorePaths, was_restoring: bool | None
    ) -> tuple[RestorePath | None, PlanReason]:
        """Return the path to take, or None and the reason why nothing is restored."""
        # The wait for the engine is the same on every path.
        margin = {None: 0.0, True: _MARGIN, False: -_MARGIN}[was_restoring]
        most_s = paths.recompute.mean_s + margin * (paths.recompute.mean_s - paths.wait_s)
        paying = [path for path in options if _weighed_s(path) <= most_s]
        if not paying:
            return None, PlanReason.COST
        longest_s = paths.recompute.p95_s * _RISK
        safe = [path for path in paying if path.total.p95_s <= longest_s]
        return (_shortest(safe), PlanReason.ALL) if safe else (None, PlanReason.RISK)

    def _trial(
        self, request: PlanRequest, paths: RestorePaths, chosen: RestorePath | None, most: int
    ) -> tuple[RestorePath, float] | None:
        """Return a path with a few more blocks from a tier that is due for a trial.

        Also returns how long to wait for them.
        """
        taken = chosen.num_blocks if chosen is not None else 0
        if taken >= most or (chosen is not None and chosen.is_split):
            return None
        tier = request.tier_at(taken)
        route = self._restores.route(tier)
        before = chosen or RestorePath(0, False, Estimate(0.0, 0.0), paths.recompute, tier)
        tried_ns, pause_ns = self._trials.get(tier, (None, _TRIAL_NS))
        rest_ns = max(pause_ns, round(_TRIAL_REST * before.total.mean_s * 1e9))
        is_tried = tried_ns is not None and abs(self._now_ns - tried_ns) < rest_ns
        is_fresh = is_tried or not route.is_stale(self._now_ns, pause_ns)
        if is_fresh and not route.looks_faster:
            return None
        self._trials[tier] = (self._now_ns, min(2 * pause_ns, _TRIAL_MAX_NS))
        path = paths.restore_path(min(taken + transfer_blocks(request.block_bytes), most))
        loss_s = _TRIAL_LOSS * before.total.mean_s
        total = replace(path.total, mean_s=min(path.total.mean_s, before.total.mean_s + loss_s))
        # Wait for the blocks that pay off, then a moment longer for the others.
        ready_s = min(before.restore.p95_s, paths.recompute_of(taken).mean_s)
        return replace(path, total=total), max(paths.wait_s, ready_s + loss_s)

    def _wait_ns(self, seconds: float) -> int:
        return min(max(round(seconds * 1e9), 1), self._settings.wait_max_ns)

    def _open_blocks(self, request: PlanRequest, now_ns: int) -> int:
        """Return how many leading blocks come from tiers that the guard has not closed."""
        closed = self.guarded(now_ns)
        usable = takewhile(lambda source: source.tier not in closed, request.sources)
        return sum(source.num_blocks for source in usable)

    def _paths(self, request: PlanRequest) -> RestorePaths:
        engine = self._engines.find(request.key_space, request.session)
        return RestorePaths(request, self._restores, engine or EngineCost())

    # Learning

    def note_transfer(
        self, tier: TierName, is_read: bool, sample: TransferSample, now_ns: int
    ) -> None:
        """Learn from a transfer between the arena and a tier."""
        self._now_ns = now_ns
        if tier in LOWER_TIERS:
            self._restores.route(tier, is_read=is_read).note(sample, now_ns)

    def note_unfinished(
        self, tier: TierName, is_read: bool, sample: TransferSample, now_ns: int
    ) -> None:
        """Learn from a transfer that took at least this long and may not have ended.

        Ignored if the expected duration is longer anyway.
        """
        if tier in LOWER_TIERS and self._restores.route(tier, is_read=is_read).is_slow(sample):
            self.note_transfer(tier, is_read, sample, now_ns)

    def note_flops(self, key_space: bytes, flops: ModelFlops, session: str = "") -> None:
        """Take the model's operations as a first guess, until a step is measured."""
        self._engines.reporting(key_space, session).note_flops(flops)

    def note_steps(
        self, key_space: bytes, steps: Sequence[StepSample], now_ns: int, session: str = ""
    ) -> None:
        """Learn from an engine's steps."""
        self._now_ns = now_ns
        engine = self._engines.reporting(key_space, session)
        for step in steps:
            engine.note(step, now_ns)

    def note_outcome(
        self,
        request: PlanRequest,
        plan: RestorePlan,
        outcome: PlanOutcome,
        now_ns: int,
        *,
        cold_s: float | None = None,
    ) -> PlanEvaluation:
        """Learn from a plan's outcome, and return what the plan saved or cost.

        ``cold_s`` is the measured time to compute the same prompt, if known.
        """
        self._now_ns = now_ns
        paths = self._paths(request)
        evaluation = evaluate(request, plan, outcome, paths, cold_s)
        if plan.total_s <= plan.recompute_total_s:  # otherwise it was not expected to pay
            for tier, gain in evaluation.gains.items():
                self._guard.note(tier, gain, now_ns)
        if not plan.num_blocks:
            self._note_computed(request, outcome, paths)
        elif plan.is_split:
            self._note_split(request, plan, outcome, paths)
        else:
            self._note_restored(request, plan, outcome, paths)
        return evaluation.evaluation

    def _note_restored(
        self, request: PlanRequest, plan: RestorePlan, outcome: PlanOutcome, paths: RestorePaths
    ) -> None:
        restored, seconds = restored_blocks(outcome, plan), seconds_of(outcome.restore_s)
        is_whole = sum(restored.values()) == plan.num_blocks
        counts = restored if is_whole else request.by_tier(plan.num_blocks)
        predicted_s, slowest = paths.predicted(counts)
        # A restore that was cut short took at least this long. Its time says nothing if it is below
        # the prediction: the fast part always comes first.
        if not seconds or not (is_whole or seconds > predicted_s):
            return
        route = self._restores.route(slowest)
        if slowest is not TierName.CPU:
            route.note_whole(predicted_s / paths.lag_of(slowest), seconds, self._now_ns)
        elif is_whole or set(counts) == {TierName.CPU}:
            # The copy into the engine was the bottleneck, regardless of the tiers.
            self._note_copied(request, sum(counts.values()), seconds)

    def _note_split(
        self, request: PlanRequest, plan: RestorePlan, outcome: PlanOutcome, paths: RestorePaths
    ) -> None:
        """Learn that the copy into the engine is at least as fast as this load from the back.

        Progress of the load is only noticed after each computed chunk, so it may be faster.
        """
        restored, seconds = restored_blocks(outcome, plan), seconds_of(outcome.restore_s)
        predicted_s, slowest = paths.predicted(restored)
        if slowest is TierName.CPU and 0 < seconds < predicted_s:
            self._note_copied(request, sum(restored.values()), seconds)

    def _note_copied(self, request: PlanRequest, num_blocks: int, seconds: float) -> None:
        sample = TransferSample(num_blocks, num_blocks * request.block_bytes, 1, seconds)
        self._restores.route(TierName.CPU).note(sample, self._now_ns)

    def _note_computed(
        self, request: PlanRequest, outcome: PlanOutcome, paths: RestorePaths
    ) -> None:
        engine = self._engines.find(request.key_space, request.session)
        # A request that waited for others says little about its own compute time.
        is_alone = request.load.waiting_tokens <= 0 and request.num_tokens > request.first_token
        if engine is not None and engine.is_measured and is_alone:
            predicted_s = paths.recompute.mean_s / paths.engine_lag
            engine.note_whole(predicted_s, took_s(outcome), self._now_ns)

    # Queries

    def num_paying(self, request: PlanRequest, now_ns: int) -> int:
        """Return how many leading blocks are worth promoting for a waiting request.

        These are the blocks of the fastest path at present. Records no decision, starts no trial.
        """
        if self._settings.mode == "never":
            return 0
        most = request.num_wanted
        if self._settings.mode == "auto":
            most = min(most, self._open_blocks(request, now_ns))
        if self._settings.mode == "always" or not most:
            return most
        paths = self._paths(request)
        path = _shortest(paths.without_split(most))
        return path.num_blocks if path.total.mean_s <= paths.recompute.mean_s else 0

    def saved_s(self, end_tokens: int, num_tokens: int, key_space: bytes | None = None) -> float:
        """Return the seconds saved by not computing the ``num_tokens`` before ``end_tokens``.

        Without a key space, for the engine that reported last.
        """
        engine = self._engines.latest(key_space) or EngineCost()
        return engine.saved_s(end_tokens, num_tokens)

    def restore_s(self, tier: TierName, num_bytes: int) -> float:
        """Return the average seconds of one restore of this many bytes."""
        return self._restores.route(tier).speed(max(num_bytes, 1)).seconds(1)

    def is_measured(self, tier: TierName) -> bool:
        """Return whether reads of a tier were measured, in this run or an earlier one."""
        return self._restores.route(tier).is_known

    def guarded(self, now_ns: int) -> frozenset[TierName]:
        """Return the tiers that the guard has closed."""
        is_on = self._settings.is_guarded and self._settings.mode == "auto"
        return self._guard.closed(now_ns) if is_on else frozenset()

    # Saved state

    def document(self) -> dict[str, Any]:
        """Return the learned state, in a form for JSON."""
        return {
            "version": _VERSION,
            "restore": self._restores.document(),
            "recompute": self._engines.document(),
            "guarded": sorted(self.guarded(self._now_ns)),
        }

    def recall(self, document: Mapping[str, Any]) -> str:
        """Restore an earlier run's learned state, all or nothing; returns the problem or ``""``."""
        restores, engines = RouteCosts(), EngineCosts()
        try:
            number(document.get("version"), _VERSION, _VERSION)
            restores.recall(table(document, "restore"))
            engines.recall(table(document, "recompute"))
        except (ValueError, TypeError, AttributeError) as fault:
            return str(fault)
        self._restores, self._engines = restores, engines
        return ""


def _shortest(paths: Sequence[RestorePath]) -> RestorePath:
    """Return the fastest path; a split must gain enough, and of equal paths the longer one wins."""
    return min(paths, key=lambda path: (_weighed_s(path), -path.num_blocks))


def _weighed_s(path: RestorePath) -> float:
    """Return a path's duration for comparisons, which penalizes splits."""
    return path.total.mean_s / (1.0 - _SPLIT_GAIN if path.is_split else 1.0)
