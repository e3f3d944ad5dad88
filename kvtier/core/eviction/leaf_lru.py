"""LRU eviction, leaves before parents.

Theory
------
A use stamps a chain's leading blocks so that each parent is newer than its child. A use of a child
is a use of its ancestors, so a parent is never older than its child, and the plain order of stamps
evicts leaves first: no child is stranded by the loss of its parent.

The oldest blocks are found by a partial sort over one slot size, which is good for thousands of
evictions. A block that was used since then is recognized by its stamp and skipped, and a pinned one
is offered again when it is unpinned, so the order is exactly that of use.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge, nsmallest
from itertools import islice

import numpy as np

from kvtier.core.eviction.base import stamp_chain
from kvtier.core.index import BlockIndex
from kvtier.core.limits import VICTIMS_SCANNED_AT_ONCE
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows

__all__ = ["LeafLru"]


@dataclass(slots=True)
class _Queue:
    """The next victims of one slot size."""

    oldest: deque[tuple[int, int]] = field(default_factory=deque)
    """(stamp, row) in order: the rows that were evictable up to ``scanned``."""
    returned: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (stamp, row) that became evictable later."""
    scanned: int = 0

    def __bool__(self) -> bool:
        return bool(self.oldest or self.returned)

    def first(self) -> tuple[int, int]:
        """Return the oldest candidate."""
        return min(each[0] for each in (self.oldest, self.returned) if each)

    def pop(self) -> tuple[int, int]:
        """Remove the oldest candidate."""
        if self.returned and self.first() == self.returned[0]:
            return heappop(self.returned)
        return self.oldest.popleft()

    def front(self, count: int) -> list[tuple[int, int]]:
        """Return the oldest ``count`` candidates, in order."""
        again = nsmallest(count, self.returned)
        return list(islice(merge(self.oldest, again), count))


class LeafLru:
    """LRU that evicts leaves before parents."""

    def __init__(self, _history: object = None) -> None:
        """Create the policy. Every policy is given the history; this one does not need it."""
        self._clock = 1
        self._queues: dict[int, _Queue] = {}
        """Queues by slot size."""

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Stamp a chain's leading blocks, the root newest."""
        mark = self._clock
        self._clock = stamp_chain(index, rows, mark)
        return mark

    def offer(self, index: BlockIndex, row: int) -> None:
        """Add a row that the last scan skipped; younger rows come with the next scan."""
        queue = self._queues.get(slot_bytes(int(index.payload_bytes[row])))
        if queue is not None and (stamp := int(index.stamp[row])) <= queue.scanned:
            heappush(queue.returned, (stamp, row))

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield the least recently used rows of a size; each is examined once per call."""
        queue = self._queues.setdefault(size, _Queue())
        before = self._clock if before is None else before
        proposed: list[tuple[int, int]] = []
        last = (0, -1)
        try:
            while (
                queue or self._scan(index, slots.owners_of(size), queue, before)
            ) and queue.first()[0] < before:
                stamp, row = candidate = queue.pop()
                is_repeat, last = candidate == last, candidate
                if is_repeat or index.stamp[row] != stamp or not index.is_evictable(row):
                    continue  # used since, gone, or pinned, and then offered again
                proposed.append(candidate)
                yield row
        finally:
            for stamp, row in proposed:
                if index.stamp[row] == stamp and index.is_evictable(row):
                    heappush(queue.returned, (stamp, row))  # the caller did not take it

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Return the oldest rows that are still evictable."""
        queue = self._queues.setdefault(size, _Queue())
        if len(queue.oldest) < count:
            self._scan(index, slots.owners_of(size), queue, self._clock)
        front = np.array(queue.front(count), np.int64).reshape(-1, 2)
        rows: Rows = front[index.stamp[front[:, 1]] == front[:, 0], 1]
        evictable: Rows = rows[index.evictable(rows)]
        return evictable

    @staticmethod
    def _scan(index: BlockIndex, rows: Rows, queue: _Queue, before: int) -> bool:
        """Add the next rows by age; returns False if there are no more."""
        while True:
            stamps = index.stamp[rows]
            is_next = (stamps > queue.scanned) & (stamps < before)
            rows, stamps = rows[is_next], stamps[is_next]
            queue.scanned = max(queue.scanned, before - 1)
            is_last = len(rows) <= VICTIMS_SCANNED_AT_ONCE
            taken, taken_stamps = rows, stamps
            if not is_last:
                oldest = np.argpartition(stamps, VICTIMS_SCANNED_AT_ONCE)[:VICTIMS_SCANNED_AT_ONCE]
                taken, taken_stamps = rows[oldest], stamps[oldest]
                queue.scanned = int(taken_stamps.max())
            # Check only these: reading another column of a million rows takes as long as the sort.
            is_free = index.evictable(taken)
            taken, taken_stamps = taken[is_free], taken_stamps[is_free]
            order = np.argsort(taken_stamps)
            # All are younger than those scanned before, so they belong behind them.
            queue.oldest.extend(
                zip(taken_stamps[order].tolist(), taken[order].tolist(), strict=True)
            )
            if is_last or queue.oldest:
                return bool(queue.oldest)
