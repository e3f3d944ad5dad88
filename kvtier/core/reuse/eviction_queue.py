"""The order in which blocks leave one tier: the tails of the runs that are worth least.

Theory
------
Runs that are worth the same wait in one *bucket*, the one touched first in front. There are a few
hundred buckets however many runs there are, so that a worth which changes with the statistics is
looked up a bucket and not a run.

Blocks go from the tail of a run, and only those on which no child in the tier hangs. A run that is
blocked by a child in another run is taken out of its bucket, and put back when the child has left;
otherwise each search would pass over all the system prompts again.
"""

from array import array
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, TierName
from kvtier.core.reuse.block import NO_ROW, RememberedBlocks
from kvtier.core.reuse.hazard import NUM_BINS, Hazards
from kvtier.core.reuse.run import NONE, Runs
from kvtier.core.reuse.use import Use
from kvtier.core.slots import slot_bytes

__all__ = ["COLUMN", "Credit", "Density", "EvictionQueue", "EvictionQueues", "Ranking", "Walk"]

_VALUES = 4096
"""Half octaves of value that are told apart: far more than a double's exponent needs."""

_BELOW_SHARE = 1 - 2.0**-40
"""Of a worth: less than that of its equals, and no less than any other."""

_PUTS_MIN = 4096
"""Below, there is nothing to be gained by sweeping."""

Walk = Generator[tuple[float, int], bool | None, None]
"""Yields score and row; may be sent whether the block was taken."""

_Entry = tuple[float, int, int]
"""Score and ticket of a run, and the bucket it comes from."""


class Ranking(Protocol):
    """What a run is worth, in one number; runs in one bucket are worth more the later touched."""

    def bucket(self, runs: Runs, run: int) -> int:
        """Return the bucket a run belongs to now."""

    def score(self, runs: Runs, run: int) -> float:
        """Return what it is worth; comparable across buckets."""

    def floors(self) -> Mapping[int, float]:
        """Return by bucket what no run in it is worth less than; without a look at any of them."""


class _Floors(dict[int, float]):
    """By bucket what ``Density`` says of it, until the densities are new ones."""

    def __init__(self, densities: Sequence[float]) -> None:
        super().__init__()
        self.densities = densities

    def __missing__(self, bucket: int) -> float:
        place, value = divmod(bucket >> 1, _VALUES)
        worth = float(self.densities[place] * 2.0 ** ((value - _VALUES // 2) / 2))
        floor = self[bucket] = worth * _BELOW_SHARE if bucket & 1 else worth
        return floor


class Density:
    """Expected value of hits per second held; ``values`` are those of the runs, in half octaves.

    Of runs that are worth the same, those go first of which a tier ``below`` has blocks, given by
    its count of them: they are not lost.
    """

    def __init__(
        self, hazards: Hazards, values: "array[int]", below: Sequence["array[int]"] = ()
    ) -> None:
        self._hazards = hazards
        self._values = values
        self._below = below
        self._floors = _Floors(hazards.densities)

    def bucket(self, runs: Runs, run: int) -> int:
        """Tell groups, ages and values apart, and what is below from what is not."""
        place = runs.group[run] * NUM_BINS + runs.bin[run]
        bucket = place * _VALUES + self._values[run] + _VALUES // 2
        return 2 * bucket + self._is_below(run)

    def score(self, runs: Runs, run: int) -> float:
        """Multiply the group's density at this age by the value of a hit."""
        density = self._hazards.densities[runs.group[run] * NUM_BINS + runs.bin[run]]
        worth = float(density * 2.0 ** (self._values[run] / 2))
        return worth * _BELOW_SHARE if self._is_below(run) else worth

    def floors(self) -> Mapping[int, float]:
        """Return the score of each run in a bucket: they have group, age and value in common."""
        if self._floors.densities is not self._hazards.densities:
            self._floors = _Floors(self._hazards.densities)
        return self._floors

    def _is_below(self, run: int) -> bool:
        return any(count[run] for count in self._below)


class Credit:
    """Least recently used, where what was ever seen before counts as used so much later."""

    def __init__(self, credit_s: float) -> None:
        self._credit_ns = round(credit_s * 1e9)

    def bucket(self, runs: Runs, run: int) -> int:
        """Tell blocks seen once from others."""
        return runs.is_repeat[run]

    def score(self, runs: Runs, run: int) -> float:
        """Return when it was used, on the credit's time."""
        return runs.touched_ns[run] + self._credit_ns * runs.is_repeat[run]

    def floors(self) -> Mapping[int, float]:
        """Return nothing known: there are two buckets, and runs in each of all times."""
        return {0: -inf, 1: -inf}


class EvictionQueue:
    """The runs that have blocks in one tier, in slots of one size."""

    def __init__(self, blocks: RememberedBlocks, runs: Runs, tier: int, ranking: Ranking) -> None:
        self._blocks = blocks
        self._runs = runs
        self._ranking = ranking
        self._tier = tier
        self._bit = 1 << tier
        self._buckets: dict[int, list[int]] = {}
        """Heaps of tickets; one holds as long as its run says it is in there."""
        self._num_puts = 0
        """Since the last sweep."""

    def score(self, run: int) -> float:
        """Return what a run is worth now."""
        return self._ranking.score(self._runs, run)

    def is_waiting(self, run: int) -> bool:
        """Tell whether a run is in the bucket it belongs to, and will be found there."""
        bucket = self._ranking.bucket(self._runs, run)
        is_there = self._runs.ticket[run] in self._buckets.get(bucket, ())
        return is_there and self._runs.bucket[self._tier][run] == bucket

    def put(self, run: int) -> None:
        """Let a run that has blocks here wait in its bucket, wherever it was before."""
        runs = self._runs
        bucket = self._ranking.bucket(runs, run)
        before = runs.bucket[self._tier][run]
        if bucket != before:
            runs.bucket[self._tier][run] = bucket
            heappush(self._buckets.setdefault(bucket, []), runs.ticket[run])
            if before != NONE:
                self._front(before)  # which only the oldest leave, by age
            self._num_puts += 1
            if self._num_puts > 2 * len(runs) + _PUTS_MIN:
                self._sweep()

    def walk(self, is_spared: Callable[[int], bool] | None = None) -> Walk:
        """Yield the blocks to go, the least worth first, each as if those before it were gone.

        Where False is sent the block is not gone, and nothing it hangs on is proposed. A row that
        ``is_spared`` stays likewise. Changes nothing.
        """
        floors = self._ranking.floors()
        # Not looked at before their turn comes: of hundreds of buckets a few are emptied.
        fronts = [(floors[bucket], heap[0], bucket) for bucket, heap in self._buckets.items()]
        heapify(fronts)
        walked: list[_Entry] = []
        gone: dict[int, int] = {}
        proposed: set[int] = set()
        try:
            while fronts:
                entry = heappop(fronts)
                if entry[2] != NONE:
                    if not self._take(entry, fronts):
                        continue
                    walked.append(entry)
                yield from self._tails(entry, gone, proposed, is_spared, fronts)
        finally:
            for _, ticket, bucket in walked:
                if self._holds(ticket, bucket):
                    heappush(self._buckets.setdefault(bucket, []), ticket)

    def _tails(
        self,
        entry: _Entry,
        gone: dict[int, int],
        proposed: set[int],
        is_spared: Callable[[int], bool] | None,
        fronts: list[_Entry],
    ) -> Walk:
        """Yield the blocks of one run from its tail on, until one cannot go."""
        blocks, runs = self._blocks, self._runs
        score, run = entry[0], runs.of(entry[1])
        if run == NONE:
            return
        row, first = runs.last[self._tier][run], runs.first[run]
        while row >= 0 and blocks.run[row] == run and blocks.place[row] >= first:
            parent = int(blocks.parent[row])
            if blocks.where[row] & self._bit and row not in proposed:
                if blocks.kids[row, self._tier] > gone.get(row, 0):
                    if row == runs.last[self._tier][run]:
                        runs.bucket[self._tier][run] = NONE  # until a child leaves
                    return
                if is_spared is not None and is_spared(row):
                    return
                if (yield score, row) is False:
                    proposed.add(row)  # the run may be visited again
                    return
                if blocks.where[row] & self._bit:  # not gone yet, only to be
                    proposed.add(row)
                    gone[parent] = gone.get(parent, 0) + 1
                self._reveal(parent, run, gone, fronts)
            row = parent

    def _reveal(self, row: int, child_run: int, gone: dict[int, int], fronts: list[_Entry]) -> None:
        """Let the run of a block be looked at again if its last child elsewhere has gone."""
        if row < 0 or not self._blocks.where[row] & self._bit:
            return
        run = int(self._blocks.run[row])
        if run != child_run and self._blocks.kids[row, self._tier] <= gone.get(row, 0):
            heappush(fronts, (self.score(run), self._runs.ticket[run], NONE))

    def _sweep(self) -> None:
        """Drop the entries that do not hold: as many as there were runs may have come by now."""
        self._num_puts = 0
        for bucket, heap in list(self._buckets.items()):
            heap[:] = sorted(ticket for ticket in set(heap) if self._holds(ticket, bucket))
            if not heap:
                del self._buckets[bucket]

    def _take(self, entry: _Entry, fronts: list[_Entry]) -> bool:
        """Take an entry out of its bucket if it is the first there, and let the next one follow."""
        front = self._front(entry[2])
        is_first = front == entry
        if is_first:
            self._pop(entry)
            front = self._front(entry[2])
        if front:
            heappush(fronts, front)
        return is_first

    def _pop(self, entry: _Entry) -> None:
        """Take an entry out of its bucket; it is in there twice if its run had left and come."""
        heap = self._buckets[entry[2]]
        while heap and heap[0] == entry[1]:
            heappop(heap)

    def _front(self, bucket: int) -> _Entry | None:
        """Return a bucket's first run, dropping what is not in it any more."""
        heap = self._buckets.get(bucket)
        while heap:
            if self._holds(heap[0], bucket):
                return self.score(self._runs.of(heap[0])), heap[0], bucket
            heappop(heap)
        self._buckets.pop(bucket, None)
        return None

    def _holds(self, ticket: int, bucket: int) -> bool:
        run = self._runs.of(ticket)
        return run != NONE and self._runs.bucket[self._tier][run] == bucket


COLUMN: Mapping[TierName, int] = {tier: column for column, tier in enumerate(LOWER_TIERS)}
"""Where what is known by tier has a tier's part."""


class EvictionQueues:
    """One for each tier and slot size, made when it is first asked for; they change nothing."""

    def __init__(
        self,
        blocks: RememberedBlocks,
        runs: Runs,
        hazards: Hazards,
        by_tokens: Collection[TierName],
    ) -> None:
        """In the tiers ``by_tokens`` all tokens are worth the same."""
        self._blocks = blocks
        self._runs = runs
        self._hazards = hazards
        self._by_tokens = {COLUMN[tier] for tier in by_tokens}
        self._rankings: dict[int, Ranking] = {}
        self._orders: dict[tuple[int, int], EvictionQueue] = {}
        """By tier and slot size."""

    def rank(self, tier: TierName, ranking: Ranking) -> None:
        """Have the blocks of a tier leave by another order than that of density."""
        assert not self._orders, "before anything is there"
        self._rankings[COLUMN[tier]] = ranking

    def of(self, column: int, size: int) -> EvictionQueue:
        """Return the order in which blocks in slots of a size leave a tier, given by its column."""
        order = self._orders.get((column, size))
        if order is None:
            ranking = self._rankings.get(column) or self._density(column)
            order = self._orders[column, size] = EvictionQueue(
                self._blocks, self._runs, column, ranking
            )
        return order

    def scores(self, keys: Sequence[bytes], tier: TierName = SLOW_TIERS[0]) -> list[float]:
        """Return what each block earns in a tier: expected value per byte and second.

        The larger the better; 0.0 where it is not remembered.
        """
        blocks, runs, density = self._blocks, self._runs, self._density(COLUMN[tier])
        runs_of = (
            int(blocks.run[row]) if row != NO_ROW else NONE for row in blocks.find(keys).tolist()
        )
        return [density.score(runs, run) if run != NONE else 0.0 for run in runs_of]

    def victims(
        self,
        tier: TierName,
        payload_bytes: int,
        is_spared: Callable[[bytes], bool] | None = None,
    ) -> Generator[bytes, None, None]:
        """Yield the next blocks of a tier to go, tails first, none with a child in the tier.

        For slots that take a payload of that size. Let a block ``leave`` before asking for the
        next: one that is still there then stays, with all it hangs on.
        """
        blocks, column = self._blocks, COLUMN[tier]

        def is_kept(row: int) -> bool:
            return is_spared is not None and is_spared(blocks.key(row))

        walk = self.of(column, slot_bytes(payload_bytes)).walk(is_kept)
        try:
            _, row = next(walk)
            while True:
                yield blocks.key(row)
                _, row = walk.send(not blocks.where[row] & (1 << column))
        except StopIteration:
            return
        finally:
            walk.close()

    def next_out(
        self, tier: TierName, size: int, is_spared: Callable[[int], bool]
    ) -> Generator[int, None, None]:
        """Yield the same for slots of a size, by their numbers, as if all yielded before had gone.

        Those for whose number ``is_spared`` holds stay.
        """
        number = self._blocks.number
        walk = self.of(COLUMN[tier], size).walk(lambda row: is_spared(int(number[row])))
        for _, row in walk:
            yield int(number[row])

    def would_stay(self, use: Use, num_blocks: int, tier: TierName) -> int:
        """Return how many of a chain's next ``num_blocks`` blocks are worth what they push out.

        Those that the tier lacks, from the root on, each of which would push one out.
        """
        blocks, column = self._blocks, COLUMN[tier]
        order = self.of(column, slot_bytes(use.payload_bytes))
        rows = blocks.find(use.keys).tolist()
        own = set(rows)
        lacking = (row for row in rows if row == NO_ROW or not blocks.where[row] & (1 << column))
        victims = order.walk(own.__contains__)
        num_staying = 0
        for row, (score, _) in zip(lacking, victims, strict=False):
            if num_staying == num_blocks:
                break
            if row != NO_ROW and order.score(int(blocks.run[row])) <= score:
                break
            num_staying += 1
        else:
            num_staying = num_blocks  # nothing is left to be pushed out
        victims.close()
        return num_staying

    def _density(self, column: int) -> Density:
        """Return the ranking of a tier that was given no other."""
        is_plain = column in self._by_tokens
        values = self._runs.plain_value if is_plain else self._runs.value
        return Density(self._hazards, values, self._runs.count[column + 1 :])
