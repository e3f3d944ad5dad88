"""How much of what was found to restore: all, a part, none, or from both ends.

Theory
------
Whatever ends first, as the models of restoring and computing see it, given what waits before
either. The road last taken by requests of this kind is left only for a gain (hysteresis); a road
that is better on average but may turn out far longer is not taken (risk); a tier that lost lately
is left alone (guard).

What is not used is not measured. Where nobody measured a tier for a while, a request now and then
tries a few blocks of it although that does not seem to pay. It waits for them so short a time that
it loses next to nothing; what comes later is measured as well, and the next request has it.

Rules
-----
* No plan is predicted to take 5 % longer than computing everything.
* A decision takes the same time however many blocks there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kvtier.core.cost.engine import EngineCost, EngineCosts
from kvtier.core.cost.evaluation import (
    evaluate,
    planned_blocks,
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
    PlanOutcome,
    PlanReason,
    PlanRequest,
    RestorePlan,
    Source,
    StepSample,
    TransferSample,
)
from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = ["PlanEvaluation", "PlanRequest", "Planner", "PlannerSettings", "Source"]

_MARGIN = 0.03
"""Gain for which the road is changed: predictions scatter by as much."""

_SPLIT_GAIN = 0.08
"""Gain for which the front is computed meanwhile: what a chunk too many costs. From a tier 15 times
slower than computing, where a split gains 6 % at best, splitting lost 8 % in the median."""

_RISK = 2.0
"""The slow twentieth of restores may take so much longer than that of computing: then a request
waits twice as long as without us, seldom, and gains on average."""

_TRIAL_NS = 2_000_000_000
_TRIAL_MAX_NS = 8_000_000_000
"""So old is what is known of a tier when a request tries it; twice as old after each in vain."""

_TRIAL_REST = 4.0
"""Nor is it tried for so many times as long as a request takes: few of them pay for trials."""

_TRIAL_LOSS = 0.04
"""The most that may cost the request, of its time to first token."""

_VERSION = 1


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What the operator says."""

    mode: str = "auto"
    """``auto``, ``always`` or ``never``."""
    is_split_allowed: bool = True
    is_guarded: bool = True
    wait_max_ns: int = 5_000_000_000


class Planner:
    """Predicts both roads from what they took so far, and takes the shorter."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._restores = RouteCosts()
        self._engines = EngineCosts()
        self._guard = TierGuard()
        self._is_restoring: dict[tuple[TierName, int], bool] = {}
        """The road last taken, by the tier that is waited for and the magnitude of tokens."""
        self._trials: dict[TierName, tuple[int | None, int]] = {}
        """When a tier was tried, and how long it is not tried again."""
        self._now_ns = 0

    def adopt(self, settings: PlannerSettings) -> None:
        """Go by other settings from now on; what was learned stays."""
        self._settings = settings

    # Deciding

    def plan(self, request: PlanRequest, decision: int, now_ns: int) -> RestorePlan:
        """Decide about one request."""
        self._now_ns = now_ns
        found = request.num_found
        if found <= 0:
            return RestorePlan(decision, 0, PlanReason.NOTHING)
        limit = found if request.limit_blocks is None else max(request.limit_blocks, 0)
        most = min(found, limit)
        paths = self._paths(request)
        if self._settings.mode == "never":
            return self._nothing(paths, paths.restore_path(found), decision, PlanReason.NEVER)
        if not most:
            return self._nothing(paths, paths.restore_path(found), decision, PlanReason.LIMIT)
        if self._settings.mode == "always":
            reason = PlanReason.ALWAYS if most == found else PlanReason.LIMIT
            path = paths.restore_path(most)
            return self._plan(paths, path, decision, reason, self._settings.wait_max_ns)
        open_blocks = self._open_blocks(request, now_ns)
        if not open_blocks:
            return self._nothing(paths, paths.restore_path(most), decision, PlanReason.GUARD)
        full = PlanReason.ALL
        if min(open_blocks, most) < found:
            full = PlanReason.GUARD if open_blocks < most else PlanReason.LIMIT
        return self._cheapest(request, paths, min(open_blocks, most), decision, full)

    def _cheapest(
        self, request: PlanRequest, paths: RestorePaths, most: int, decision: int, full: PlanReason
    ) -> RestorePlan:
        """Take the shortest road with at most so many blocks; ``full`` is why not more."""
        options = self._options(request, paths, most)
        best = _shortest(options)
        key = (best.slowest, (most * request.block_tokens).bit_length())
        chosen, refusal = self._chosen(options, paths, self._is_restoring.get(key))
        self._is_restoring[key] = chosen is not None
        trial = self._trial(request, paths, chosen, most)
        if trial is not None:
            path, wait_s = trial
            return self._plan(paths, path, decision, PlanReason.PART, round(wait_s * 1e9))
        if chosen is None:
            return self._nothing(paths, best, decision, refusal)
        for tier in _tiers_of(request, chosen.num_blocks):
            self._guard.begin(tier, self._now_ns)
            self._trials.pop(tier, None)
        reason = full if chosen.num_blocks == most else PlanReason.PART
        if chosen.is_split:
            reason = PlanReason.SPLIT
        # Once computing them would have been done, waiting no longer pays.
        wait_s = max(paths.recompute_of(chosen.num_blocks).mean_s, chosen.restore.mean_s)
        return self._plan(paths, chosen, decision, reason, round(wait_s * 1e9))

    def _options(self, request: PlanRequest, paths: RestorePaths, most: int) -> list[RestorePath]:
        wait_max_s = self._settings.wait_max_ns / 1e9
        options = paths.plain(max(paths.within(wait_max_s, most), 1))
        if request.can_split and self._settings.is_split_allowed:
            numbers = {most, _shortest(options).num_blocks}
            splits = [paths.split_path(number, wait_max_s) for number in numbers]
            options += [path for path in splits if path.is_split]
        return options

    def _chosen(
        self, options: Sequence[RestorePath], paths: RestorePaths, was_restoring: bool | None
    ) -> tuple[RestorePath | None, PlanReason]:
        """Return the road to take, or None and why nothing is restored."""
        # The wait for the engine is the same on every road, however long it is.
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
        """Return a road with a few blocks more, of a tier of which too little is known.

        With it comes how long to wait for them.
        """
        taken = chosen.num_blocks if chosen is not None else 0
        if taken >= most or (chosen is not None and chosen.is_split):
            return None
        tier = _tier_at(request, taken)
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
        # Those that pay have their time, and then these a moment.
        ready_s = min(before.restore.p95_s, paths.recompute_of(taken).mean_s)
        return replace(path, total=total), max(paths.wait_s, ready_s + loss_s)

    def _open_blocks(self, request: PlanRequest, now_ns: int) -> int:
        """Return how many leading blocks come from tiers that are not left alone."""
        closed = self.guarded(now_ns)
        usable = takewhile(lambda source: source.tier not in closed, request.sources)
        return sum(source.num_blocks for source in usable)

    def _paths(self, request: PlanRequest) -> RestorePaths:
        engine = self._engines.find(request.key_space, request.session)
        return RestorePaths(request, self._restores, engine or EngineCost())

    def _plan(
        self,
        paths: RestorePaths,
        path: RestorePath,
        decision: int,
        reason: PlanReason,
        wait_ns: int,
    ) -> RestorePlan:
        return RestorePlan(
            decision=decision,
            num_blocks=path.num_blocks,
            reason=reason,
            is_split=path.is_split,
            part_blocks=path.part_blocks,
            wait_ns=min(max(wait_ns, 1), self._settings.wait_max_ns),
            restore=path.restore,
            recompute=paths.recompute_of(path.num_blocks),
            total_s=path.total.mean_s,
            recompute_total_s=paths.recompute.mean_s,
        )

    def _nothing(
        self, paths: RestorePaths, path: RestorePath, decision: int, reason: PlanReason
    ) -> RestorePlan:
        """Restore nothing; ``path`` is the best there was."""
        return RestorePlan(
            decision=decision,
            num_blocks=0,
            reason=reason,
            restore=path.restore,
            recompute=paths.recompute_of(path.num_blocks),
            total_s=paths.recompute.mean_s,
            recompute_total_s=paths.recompute.mean_s,
        )

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
        """Learn from a transfer that took at least so long and may not have ended.

        That says something only where a whole one is not expected to be slower.
        """
        if tier in LOWER_TIERS and self._restores.route(tier, is_read=is_read).is_slow(sample):
            self.note_transfer(tier, is_read, sample, now_ns)

    def note_flops(self, key_space: bytes, flops: ModelFlops, session: str = "") -> None:
        """Take what a model should take, for as long as no step was measured."""
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

        ``cold_s`` is the measured time of computing the same prompt, if there is one.
        """
        self._now_ns = now_ns
        paths = self._paths(request)
        evaluation = evaluate(request, plan, outcome, paths, cold_s)
        if plan.total_s <= plan.recompute_total_s:  # else it was not expected to pay
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
        counts = restored if is_whole else planned_blocks(request, plan)
        predicted_s, slowest = paths.predicted(counts)
        # What was cut short took at least so long; of what came by then nothing follows, because
        # it is always the fast part.
        if not seconds or not (is_whole or seconds > predicted_s):
            return
        route = self._restores.route(slowest)
        if slowest is not TierName.CPU:
            route.note_whole(predicted_s / paths.lag_of(slowest), seconds, self._now_ns)
        elif is_whole or set(counts) == {TierName.CPU}:
            # It waited for the way into the engine, wherever the blocks came from.
            self._note_copied(request, sum(counts.values()), seconds)

    def _note_split(
        self, request: PlanRequest, plan: RestorePlan, outcome: PlanOutcome, paths: RestorePaths
    ) -> None:
        """Learn that the way into the engine is no slower than a load from the back was.

        How far the load got shows only after each chunk that is computed, so it may be faster.
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
        # A request that had to wait for others says little about its own compute time.
        is_alone = request.load.waiting_tokens <= 0 and request.num_tokens > request.first_token
        if engine is not None and engine.is_measured and is_alone:
            predicted_s = paths.recompute.mean_s / paths.engine_lag
            engine.note_whole(predicted_s, took_s(outcome), self._now_ns)

    # What others ask

    def num_paying(self, request: PlanRequest, now_ns: int) -> int:
        """Return how many leading blocks are worth bringing closer for a request that waits.

        Those of the shortest road as it looks now; nothing is decided, and nothing tried.
        """
        if self._settings.mode == "never":
            return 0
        limit = request.num_found if request.limit_blocks is None else max(request.limit_blocks, 0)
        most = min(request.num_found, limit)
        if self._settings.mode == "auto":
            most = min(most, self._open_blocks(request, now_ns))
        if self._settings.mode == "always" or not most:
            return most
        paths = self._paths(request)
        path = _shortest(paths.plain(most))
        return path.num_blocks if path.total.mean_s <= paths.recompute.mean_s else 0

    def saved_s(self, end_tokens: int, num_tokens: int, key_space: bytes | None = None) -> float:
        """Return the seconds that not computing ``num_tokens`` up to ``end_tokens`` saves.

        Without a key space, for the engine that reported last.
        """
        engine = self._engines.latest(key_space) or EngineCost()
        return engine.saved_s(end_tokens, num_tokens)

    def restore_s(self, tier: TierName, num_bytes: int) -> float:
        """Return the seconds that one restore of so many bytes takes on average."""
        return self._restores.route(tier).speed(max(num_bytes, 1)).seconds(1)

    def is_measured(self, tier: TierName) -> bool:
        """Tell whether reads of a tier were measured, now or in an earlier run."""
        return self._restores.route(tier).is_known

    def guarded(self, now_ns: int) -> frozenset[TierName]:
        """Return the tiers that are left alone."""
        is_on = self._settings.is_guarded and self._settings.mode == "auto"
        return self._guard.closed(now_ns) if is_on else frozenset()

    # Across restarts

    def document(self) -> dict[str, Any]:
        """Return what was learned, for people and to be kept; JSON has all of it."""
        return {
            "version": _VERSION,
            "restore": self._restores.document(),
            "recompute": self._engines.document(),
            "guarded": sorted(self.guarded(self._now_ns)),
        }

    def recall(self, document: Mapping[str, Any]) -> str:
        """Begin with what an earlier run learned, all or nothing; returns why not, or ``""``."""
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
    """Return the road that ends first; splitting has to be worth it, and of equals the longer."""
    return min(paths, key=lambda path: (_weighed_s(path), -path.num_blocks))


def _weighed_s(path: RestorePath) -> float:
    """Return how long a road takes, for comparing: a split counts as longer than it is."""
    return path.total.mean_s / (1.0 - _SPLIT_GAIN if path.is_split else 1.0)


def _tiers_of(request: PlanRequest, num_blocks: int) -> set[TierName]:
    """Return the tiers that would serve the first blocks."""
    tiers = set()
    for source in request.sources:
        if num_blocks <= 0:
            break
        tiers.add(source.tier)
        num_blocks -= source.num_blocks
    return tiers


def _tier_at(request: PlanRequest, place: int) -> TierName:
    """Return the tier that would serve one block."""
    for source in request.sources:
        if place < source.num_blocks:
            return source.tier
        place -= source.num_blocks
    raise AssertionError("the place is among the blocks found")
