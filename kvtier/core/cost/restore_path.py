"""Predicts the duration of every restore path: each way from a request to its first token.

Theory
------
Restoring the first ``m`` blocks and computing the rest takes ``max(wait, restore(m)) +
compute(rest)``: while a request waits for its engine, restoring is free. Within the blocks of one
tier, each further block costs the same to restore and saves the same to compute, or more where
attention is long. So only a few ``m`` can be optimal: the ends of the tiers' runs, the point where
the restore takes as long as the wait, and the point where the rest is one step at its floor. Only
these are tried, however many blocks there are.

The alternative is a split: computing from the front while the same blocks are loaded from the back
takes ``max(wait + compute(f), restore(m - f)) + compute(rest)``, and is fastest where both meet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier.core.cost.engine import EngineCost
from kvtier.core.cost.route import RouteCosts, RouteSpeed
from kvtier.core.plan import Estimate, PlanReason, PlanRequest, RestorePlan
from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = ["RestorePath", "RestorePaths"]

_RUNS_MAX = 12
"""Runs that are distinguished: tiers do not alternate more often in a real chain."""

_SPLIT_ROUNDS = 12
"""Secant and bisection steps to find the split point."""

_SPLIT_TOLERANCE = 0.01
"""Accepted difference of front and back, relative to their duration."""

_CPU = LOWER_TIERS.index(TierName.CPU)


@dataclass(frozen=True, slots=True)
class RestorePath:
    """Restore the first ``num_blocks``; if split, from the back while the front is computed."""

    num_blocks: int
    is_split: bool
    restore: Estimate
    total: Estimate
    """Time to first token."""
    slowest: TierName
    """The tier that determines the duration."""
    part_blocks: int = 0
    """Blocks per transfer if smaller than usual, else 0."""


@dataclass(frozen=True, slots=True)
class _TailLoad:
    """Blocks loaded from the back, in smaller transfers than usual."""

    num_blocks: int
    speeds: Sequence[RouteSpeed]


class RestorePaths:
    """All paths of one request, predicted at one moment."""

    def __init__(self, request: PlanRequest, restores: RouteCosts, engine: EngineCost) -> None:
        self._request = request
        self._runs = _runs(request)
        self._speeds = [restores.route(tier).speed(request.block_bytes) for tier in LOWER_TIERS]
        self._queued_s = self._queues()
        self._speed = engine.speed(request.load)
        self.is_settled = engine.is_settled
        """Whether the predicted compute time rests on more than the engine's first steps."""
        self.wait_s = engine.wait_s(request.load, self._speed)
        """Expected time until the engine starts the request."""
        self._first = request.first_token
        known = request.first_token + request.num_found * request.block_tokens
        self._end = max(request.num_tokens, known + 1)  # the last token is always computed
        self.recompute = self._recompute(self._end)
        """Time to first token without a restore."""

    def _queues(self) -> list[float]:
        """Return how long the queued transfers delay each tier."""
        queued = [0.0] * len(LOWER_TIERS)
        for source in self._request.sources:
            place = LOWER_TIERS.index(source.tier)
            blocks = max(source.queued_bytes, 0) / max(self._request.block_bytes, 1)
            queued[place] = max(queued[place], self._speeds[place].queue_s(blocks))
        return queued

    # Durations

    def restore_path(self, num_blocks: int) -> RestorePath:
        """Return the path that restores the first blocks, and then computes the rest."""
        mean_s, p95_s, slowest = self._arrival(self._counts(0, num_blocks))
        rest_s = self._speed.compute_s(self._token(num_blocks), self._end)
        total_s = max(self.wait_s, mean_s) + rest_s
        slow_s = max(self.wait_s * self._speed.tail_of(self.wait_s), p95_s)
        total_p95_s = slow_s + rest_s * self._speed.tail_of(rest_s)
        total = Estimate(total_s, total_p95_s)
        return RestorePath(num_blocks, False, Estimate(mean_s, p95_s), total, LOWER_TIERS[slowest])

    def split_path(self, num_blocks: int, wait_max_s: float) -> RestorePath:
        """Return the same path, but with the front computed during the restore.

        What has not arrived from the back after ``wait_max_s`` is computed, too.
        """
        plain = self.restore_path(num_blocks)
        if plain.restore.mean_s <= self.wait_s:
            return plain  # all is in place before the engine starts
        tail = _TailLoad(num_blocks, [speed.in_parts(num_blocks) for speed in self._speeds])
        front = self._split_point(tail)
        if self._tail_s(front, tail) > wait_max_s:
            front = self._front_by(wait_max_s, front, tail)
        mean_s, _, slowest = self._arrival(self._counts(front, num_blocks), tail.speeds)
        met_s = max(self._front_s(front), mean_s)
        total_s = met_s + self._speed.compute_s(self._token(num_blocks), self._end)
        # However slow the restore, computing continues: computing everything is the worst case.
        total_p95_s = max(min(plain.total.p95_s, self.recompute.p95_s), total_s)
        restore = Estimate(met_s, max(plain.restore.p95_s, met_s))
        total = Estimate(total_s, total_p95_s)
        part_blocks = tail.speeds[slowest].part_blocks if slowest != _CPU else 0
        return RestorePath(num_blocks, True, restore, total, LOWER_TIERS[slowest], part_blocks)

    def recompute_of(self, num_blocks: int) -> Estimate:
        """Predict computing the first blocks, including the wait for the engine."""
        return self._recompute(self._token(num_blocks))

    def predicted(self, tiers: Mapping[TierName, int]) -> tuple[float, TierName]:
        """Predict restoring this many blocks of each tier; also returns the slowest tier."""
        mean_s, _, slowest = self._arrival([tiers.get(tier, 0) for tier in LOWER_TIERS])
        return mean_s, LOWER_TIERS[slowest]

    def lag_of(self, tier: TierName) -> float:
        """Return the lag that a tier's predictions include."""
        return self._speeds[LOWER_TIERS.index(tier)].lag

    @property
    def engine_lag(self) -> float:
        """Return the lag that the predictions of computing include."""
        return self._speed.lag

    def plan(
        self, path: RestorePath, decision: int, reason: PlanReason, wait_ns: int
    ) -> RestorePlan:
        """Return the plan that takes a path."""
        return RestorePlan(
            decision=decision,
            num_blocks=path.num_blocks,
            reason=reason,
            is_split=path.is_split,
            part_blocks=path.part_blocks,
            wait_ns=wait_ns,
            restore=path.restore,
            recompute=self.recompute_of(path.num_blocks),
            total_s=path.total.mean_s,
            recompute_total_s=self.recompute.mean_s,
        )

    def no_restore(
        self, num_blocks: int, decision: int, reason: PlanReason, best: RestorePath | None = None
    ) -> RestorePlan:
        """Return the plan that restores nothing, although ``num_blocks`` could be restored."""
        best = best or self.restore_path(num_blocks)
        return RestorePlan(
            decision=decision,
            num_blocks=0,
            reason=reason,
            restore=best.restore,
            recompute=self.recompute_of(num_blocks),
            total_s=self.recompute.mean_s,
            recompute_total_s=self.recompute.mean_s,
        )

    # Candidates

    def without_split(self, most: int) -> list[RestorePath]:
        """Return all paths without a split that can be optimal, with at most ``most`` blocks."""
        numbers = sorted({number for number in self._candidates(most) if number > 0})
        return [self.restore_path(number) for number in numbers]

    def blocks_within(self, seconds: float, most: int) -> int:
        """Return how many leading blocks, at most ``most``, are restored in this time."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            # Try all first, which usually suffices.
            middle = most if (low, high) == (0, most) else middle
            if self._arrival(self._counts(0, middle))[0] <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _candidates(self, most: int) -> Iterator[int]:
        yield most
        for _, end, _ in self._runs:
            yield min(end, most)
        if self.wait_s > 0:
            yield self.blocks_within(self.wait_s, most)
        # Remainders of one step: the smallest one that pays off, and a full step.
        tokens = max(self._request.block_tokens, 1)
        for rest in (self._speed.knee_tokens, float(self._speed.chunk)):
            yield min(int((self._end - self._first - rest) // tokens), most)

    def _split_point(self, tail: _TailLoad) -> int:
        """Return how many front blocks are computed when the others have arrived."""
        low, high = 0, tail.num_blocks
        low_s = self._ahead_s(low, tail)  # negative: the front waits for the back
        high_s = self._ahead_s(high, tail)
        enough_s = _SPLIT_TOLERANCE * max(high_s, -low_s)
        for turn in range(_SPLIT_ROUNDS):
            if high - low <= 1:
                break
            # A secant is exact where both are linear; bisect in between in case it crawls.
            share = 0.5 if turn % 3 == 2 else low_s / (low_s - high_s)
            middle = min(max(low + round((high - low) * share), low + 1), high - 1)
            middle_s = self._ahead_s(middle, tail)
            if abs(middle_s) <= enough_s:
                return middle
            if middle_s < 0:
                low, low_s = middle, middle_s
            else:
                high, high_s = middle, middle_s
        return high

    def _front_by(self, seconds: float, low: int, tail: _TailLoad) -> int:
        """Return how many front blocks remain after loading from the back for this long."""
        high = tail.num_blocks
        while low < high:
            middle = (low + high) // 2
            if self._tail_s(middle, tail) <= seconds:
                high = middle
            else:
                low = middle + 1
        return high

    def _ahead_s(self, front: int, tail: _TailLoad) -> float:
        """Return how much longer computing the front takes than loading the rest."""
        return self._front_s(front) - self._tail_s(front, tail)

    def _tail_s(self, front: int, tail: _TailLoad) -> float:
        return self._arrival(self._counts(front, tail.num_blocks), tail.speeds)[0]

    # Parts

    def _token(self, num_blocks: int) -> int:
        return self._first + num_blocks * self._request.block_tokens

    def _front_s(self, num_blocks: int) -> float:
        computed_s = self._speed.compute_s(self._first, self._token(num_blocks))
        return self.wait_s + computed_s + self._claims_s(num_blocks)

    def _claims_s(self, num_blocks: int) -> float:
        """Return the extra cost of computing a front in small steps at its start and end.

        The engine claims one block, then doubles its claims, and claims less again towards the
        split point (see ``engine.split``). Each step takes the floor, however small.
        """
        speed, block_tokens = self._speed, max(self._request.block_tokens, 1)
        seconds, size, left = 0.0, 1, num_blocks
        while left > 0 and size * block_tokens < speed.knee_tokens:
            seconds += speed.floor_s - speed.base_s - size * block_tokens * speed.token_s
            left -= 2 * size
            size *= 2
        return 2 * seconds

    def _recompute(self, end: int) -> Estimate:
        mean_s = self.wait_s + self._speed.compute_s(self._first, end)
        return Estimate(mean_s, mean_s * self._speed.tail_of(mean_s))

    def _counts(self, first: int, end: int) -> list[int]:
        """Return how many of the blocks from ``first`` to ``end`` each lower tier serves."""
        counts = [0] * len(LOWER_TIERS)
        for run_first, run_end, place in self._runs:
            if run_first >= end:
                break
            if run_end > first:
                counts[place] += min(run_end, end) - max(run_first, first)
        return counts

    def _arrival(
        self, counts: list[int], speeds: Sequence[RouteSpeed] | None = None
    ) -> tuple[float, float, int]:
        """Predict when the last of these blocks is in the engine: mean, P95, and the slowest tier.

        Blocks are copied while others are read; those of the last transfer, once it has ended.
        """
        arena = self._speeds[_CPU]
        total = sum(counts)
        if not total:
            return 0.0, 0.0, _CPU
        mean_s = arena.start_s + total * arena.block_s
        doubt_s, slowest = mean_s * (arena.tail_of(total) - 1.0), _CPU
        for place, count in enumerate(counts):
            if not count or place == _CPU:
                continue
            speed = (speeds or self._speeds)[place]
            read_s = self._queued_s[place] + speed.seconds(count)
            copy_s = arena.start_s + min(count, speed.part_blocks) * arena.block_s
            if read_s + copy_s > mean_s:
                mean_s, slowest = read_s + copy_s, place
                doubt_s = read_s * (speed.tail_of(count) - 1.0) + copy_s * (arena.tail - 1.0)
        return mean_s, mean_s + doubt_s, slowest


def _runs(request: PlanRequest) -> list[tuple[int, int, int]]:
    """Return runs as first block, end, and index of the tier.

    Beyond the maximum, the remaining runs are merged into one of their slowest tier.
    """
    runs: list[tuple[int, int, int]] = []
    first = 0
    for source in request.sources:
        if source.num_blocks <= 0:
            continue
        end, place = first + source.num_blocks, LOWER_TIERS.index(source.tier)
        if len(runs) < _RUNS_MAX:
            runs.append((first, end, place))
        else:
            runs[-1] = (runs[-1][0], end, max(runs[-1][2], place))
        first = end
    return runs
