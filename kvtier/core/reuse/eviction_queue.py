"""Orders the blocks of a tier for eviction: the tails of the least valuable runs first.

Theory
------
Runs of equal worth share a *bucket*, least recently touched first. There are a few hundred buckets
however many runs there are, so a worth that changes with the statistics is looked up per bucket,
not per run.

Blocks are evicted from the tail of a run, and only if they have no child in the tier. A run that is
blocked by a child in another run is taken out of its bucket, and put back when the child has left;
otherwise each search would have to skip every system prompt.
"""

from array import array
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from kvtier.core.identity import BlockHash
from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, TierName
from kvtier.core.reuse.block import NO_ROW, RememberedBlocks
from kvtier.core.reuse.hazard import NUM_BINS, Hazards
from kvtier.core.reuse.run import NONE, Runs
from kvtier.core.reuse.use import Use
from kvtier.core.slots import slot_bytes

__all__ = ["COLUMN", "Credit", "Density", "EvictionQueue", "EvictionQueues", "Ranking", "Walk"]

_VALUES = 4096
"""Number of half octaves of value: far more than a double's exponent needs."""

_BELOW_SHARE = 1 - 2.0**-40
"""Factor for runs that a slower tier has: just below runs of equal worth, above all others."""

_PUTS_MIN = 4096
"""Below this, sweeping gains nothing."""

Walk = Generator[tuple[float, int], bool | None, None]
"""Yields (score, row); the caller may send whether the block was evicted."""

_Entry = tuple[float, int, int]
"""Score and ticket of a run, and its bucket."""


class Ranking(Protocol):
    """The worth of a run as a number.

    Within a bucket, it increases with the time of the last touch.
    """

    def bucket(self, runs: Runs, run: int) -> int:
        """Return the bucket of a run."""

    def score(self, runs: Runs, run: int) -> float:
        """Return the worth of a run, comparable across buckets."""

    def floors(self) -> Mapping[int, float]:
        """Return a lower bound of the worth in each bucket, without examining its runs."""


class _Floors(dict[int, float]):
    """The floors of ``Density``, cached until the densities change."""

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

    Of runs with equal worth, those with blocks in a slower tier are evicted first, because they
    are not lost; ``below`` has the number of blocks of each run in the slower tiers.
    """

    def __init__(
        self, hazards: Hazards, values: "array[int]", below: Sequence["array[int]"] = ()
    ) -> None:
        self._hazards = hazards
        self._values = values
        self._below = below
        self._floors = _Floors(hazards.densities)

    def bucket(self, runs: Runs, run: int) -> int:
        """Distinguish groups, ages and values, and whether a slower tier has blocks of the run."""
        place = runs.group[run] * NUM_BINS + runs.bin[run]
        bucket = place * _VALUES + self._values[run] + _VALUES // 2
        return 2 * bucket + self._is_below(run)

    def score(self, runs: Runs, run: int) -> float:
        """Multiply the group's density at this age by the value of a hit."""
        density = self._hazards.densities[runs.group[run] * NUM_BINS + runs.bin[run]]
        worth = float(density * 2.0 ** (self._values[run] / 2))
        return worth * _BELOW_SHARE if self._is_below(run) else worth

    def floors(self) -> Mapping[int, float]:
        """Return the score of the runs of each bucket, which share group, age and value."""
        if self._floors.densities is not self._hazards.densities:
            self._floors = _Floors(self._hazards.densities)
        return self._floors

    def _is_below(self, run: int) -> bool:
        return any(count[run] for count in self._below)


class Credit:
    """LRU in which runs that were seen before count as used later, by a fixed credit."""

    def __init__(self, credit_s: float) -> None:
        self._credit_ns = round(credit_s * 1e9)

    def bucket(self, runs: Runs, run: int) -> int:
        """Distinguish blocks seen once from others."""
        return runs.is_repeat[run]

    def score(self, runs: Runs, run: int) -> float:
        """Return the time of use plus the credit."""
        return runs.touched_ns[run] + self._credit_ns * runs.is_repeat[run]

    def floors(self) -> Mapping[int, float]:
        """Return no bound: there are two buckets, with runs of all times."""
        return {0: -inf, 1: -inf}


class EvictionQueue:
    """The runs with blocks in one tier, in slots of one size."""

    def __init__(self, blocks: RememberedBlocks, runs: Runs, tier: int, ranking: Ranking) -> None:
        self._blocks = blocks
        self._runs = runs
        self._ranking = ranking
        self._tier = tier
        self._bit = 1 << tier
        self._buckets: dict[int, list[int]] = {}
        """Heaps of tickets; a ticket is stale if its run names another bucket."""
        self._num_puts = 0
        """Number of calls of ``put`` since the last sweep."""

    def score(self, run: int) -> float:
        """Return a run's current worth."""
        return self._ranking.score(self._runs, run)

    def is_waiting(self, run: int) -> bool:
        """Return whether a run is in its bucket."""
        bucket = self._ranking.bucket(self._runs, run)
        is_there = self._runs.ticket[run] in self._buckets.get(bucket, ())
        return is_there and self._runs.bucket[self._tier][run] == bucket

    def put(self, run: int) -> None:
        """Put a run with blocks in the tier into its bucket, wherever it was before."""
        runs = self._runs
        bucket = self._ranking.bucket(runs, run)
        before = runs.bucket[self._tier][run]
        if bucket != before:
            runs.bucket[self._tier][run] = bucket
            heappush(self._buckets.setdefault(bucket, []), runs.ticket[run])
            if before != NONE:
                self._front(before)  # only the oldest runs leave a bucket by age
            self._num_puts += 1
            if self._num_puts > 2 * len(runs) + _PUTS_MIN:
                self._sweep()

    def walk(self, is_spared: Callable[[int], bool] | None = None) -> Walk:
        """Yield the blocks to evict, least worth first, assuming that each is evicted.

        If the caller sends False, the block stays, and none of its ancestors is proposed. The same
        applies to a row for which ``is_spared`` is true. Changes nothing.
        """
        floors = self._ranking.floors()
        # Buckets are only examined when their turn comes: of hundreds, a few are emptied.
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
        """Yield the blocks of one run from its tail on, up to the first that cannot be evicted."""
        blocks, runs = self._blocks, self._runs
        score, run = entry[0], runs.find(entry[1])
        if run == NONE:
            return
        row, first = runs.last[self._tier][run], runs.first[run]
        while row >= 0 and blocks.run[row] == run and blocks.position[row] >= first:
            parent = int(blocks.parent[row])
            if blocks.tiers[row] & self._bit and row not in proposed:
                if blocks.tier_children[row, self._tier] > gone.get(row, 0):
                    if row == runs.last[self._tier][run]:
                        runs.bucket[self._tier][run] = NONE  # until a child leaves
                    return
                if is_spared is not None and is_spared(row):
                    return
                if (yield score, row) is False:
                    proposed.add(row)  # the run may be visited again
                    return
                if blocks.tiers[row] & self._bit:  # not evicted yet
                    proposed.add(row)
                    gone[parent] = gone.get(parent, 0) + 1
                self._reveal(parent, run, gone, fronts)
            row = parent

    def _reveal(self, row: int, child_run: int, gone: dict[int, int], fronts: list[_Entry]) -> None:
        """Examine the run of a block again if its last child in another run was evicted."""
        if row < 0 or not self._blocks.tiers[row] & self._bit:
            return
        run = int(self._blocks.run[row])
        if run != child_run and self._blocks.tier_children[row, self._tier] <= gone.get(row, 0):
            heappush(fronts, (self.score(run), self._runs.ticket[run], NONE))

    def _sweep(self) -> None:
        """Remove stale tickets: by now there may be as many as runs."""
        self._num_puts = 0
        for bucket, heap in list(self._buckets.items()):
            heap[:] = sorted(ticket for ticket in set(heap) if self._holds(ticket, bucket))
            if not heap:
                del self._buckets[bucket]

    def _take(self, entry: _Entry, fronts: list[_Entry]) -> bool:
        """Remove an entry that is first in its bucket, and queue the bucket's next one."""
        front = self._front(entry[2])
        is_first = front == entry
        if is_first:
            self._pop(entry)
            front = self._front(entry[2])
        if front:
            heappush(fronts, front)
        return is_first

    def _pop(self, entry: _Entry) -> None:
        """Remove an entry from its bucket; it is there twice if its run left and returned."""
        heap = self._buckets[entry[2]]
        while heap and heap[0] == entry[1]:
            heappop(heap)

    def _front(self, bucket: int) -> _Entry | None:
        """Return a bucket's first run, removing stale tickets."""
        heap = self._buckets.get(bucket)
        while heap:
            if self._holds(heap[0], bucket):
                return self.score(self._runs.find(heap[0])), heap[0], bucket
            heappop(heap)
        self._buckets.pop(bucket, None)
        return None

    def _holds(self, ticket: int, bucket: int) -> bool:
        run = self._runs.find(ticket)
        return run != NONE and self._runs.bucket[self._tier][run] == bucket


COLUMN: Mapping[TierName, int] = {tier: column for column, tier in enumerate(LOWER_TIERS)}
"""Index of each tier in arrays by tier."""


class EvictionQueues:
    """The queues of all tiers and slot sizes, created on first use. They change no block."""

    def __init__(
        self,
        blocks: RememberedBlocks,
        runs: Runs,
        hazards: Hazards,
        by_tokens: Collection[TierName],
    ) -> None:
        """Create no queue yet; in the tiers ``by_tokens`` all tokens have equal value."""
        self._blocks = blocks
        self._runs = runs
        self._hazards = hazards
        self._by_tokens = {COLUMN[tier] for tier in by_tokens}
        self._rankings: dict[int, Ranking] = {}
        self._queues: dict[tuple[int, int], EvictionQueue] = {}
        """Queues by column of the tier and slot size."""

    def rank(self, tier: TierName, ranking: Ranking) -> None:
        """Use another ranking than density for a tier."""
        assert not self._queues, "rankings are set before the first use"
        self._rankings[COLUMN[tier]] = ranking

    def queue(self, column: int, size: int) -> EvictionQueue:
        """Return the queue of a tier, given by its column, for slots of a size."""
        queue = self._queues.get((column, size))
        if queue is None:
            ranking = self._rankings.get(column) or self._density(column)
            queue = self._queues[column, size] = EvictionQueue(
                self._blocks, self._runs, column, ranking
            )
        return queue

    def scores(self, keys: Sequence[BlockHash], tier: TierName = SLOW_TIERS[0]) -> list[float]:
        """Return the expected value of each block in a tier, per byte and second.

        Larger is better; 0.0 if the block is not remembered.
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
        is_spared: Callable[[BlockHash], bool] | None = None,
    ) -> Generator[BlockHash, None, None]:
        """Yield the next blocks of a tier to evict, tails first, none with a child in the tier.

        For slots that fit a payload of this size. Call ``leave`` for a block before asking for the
        next: a block that is still there stays, with all its ancestors.
        """
        blocks, column = self._blocks, COLUMN[tier]

        def is_kept(row: int) -> bool:
            return is_spared is not None and is_spared(blocks.key(row))

        walk = self.queue(column, slot_bytes(payload_bytes)).walk(is_kept)
        try:
            _, row = next(walk)
            while True:
                yield blocks.key(row)
                _, row = walk.send(not blocks.tiers[row] & (1 << column))
        except StopIteration:
            return
        finally:
            walk.close()

    def next_out(
        self, tier: TierName, size: int, is_spared: Callable[[int], bool]
    ) -> Generator[int, None, None]:
        """Yield the index rows of the next victims for slots of a size, assuming each is evicted.

        Rows for which ``is_spared`` is true stay.
        """
        index_row = self._blocks.index_row
        walk = self.queue(COLUMN[tier], size).walk(lambda row: is_spared(int(index_row[row])))
        for _, row in walk:
            yield int(index_row[row])

    def would_stay(self, use: Use, num_blocks: int, tier: TierName) -> int:
        """Return how many of a chain's next blocks are worth more than their victims.

        Of the blocks that the tier lacks, the first ``num_blocks`` from the root on are considered;
        each would evict one.
        """
        blocks, column = self._blocks, COLUMN[tier]
        queue = self.queue(column, slot_bytes(use.payload_bytes))
        rows = blocks.find(use.keys).tolist()
        own = set(rows)
        lacking = (row for row in rows if row == NO_ROW or not blocks.tiers[row] & (1 << column))
        victims = queue.walk(own.__contains__)
        num_staying = 0
        for row, (score, _) in zip(lacking, victims, strict=False):
            if num_staying == num_blocks:
                break
            if row != NO_ROW and queue.score(int(blocks.run[row])) <= score:
                break
            num_staying += 1
        else:
            num_staying = num_blocks  # nothing is left to evict
        victims.close()
        return num_staying

    def _density(self, column: int) -> Density:
        """Return the default ranking of a tier."""
        is_plain = column in self._by_tokens
        values = self._runs.plain_value if is_plain else self._runs.value
        return Density(self._hazards, values, self._runs.count[column + 1 :])
