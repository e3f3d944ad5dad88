"""Least recently used first, leaves before parents.

Theory
------
A use touches a chain's leading blocks, and stamps them so that each parent is newer than its child.
Any use of a child is a use of its ancestors, so a parent is never older than its child, and plain
order of stamps takes tails before heads: no child is stranded by the loss of its parent.

Finding the oldest is a partial sort over the index, good for thousands of evictions. What has been
used since is recognised by its stamp and passed over, and what was pinned is offered again when it
no longer is, so the order is exactly that of use.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from kvtier.core.index import Index
from kvtier.core.limits import VICTIMS_SCANNED_AT_ONCE
from kvtier.core.residency import Residency, TierName
from kvtier.core.table import Rows

__all__ = ["LeafLru"]


class LeafLru:
    """An ``Eviction``."""

    def __init__(self) -> None:
        self._clock = 1
        self._candidates: list[tuple[int, int]] = []
        """A heap of rows by the stamp they had: all that are evictable up to ``_scanned``."""
        self._scanned = 0

    def touch(self, index: Index, rows: Rows) -> int:
        """Stamp a chain's leading blocks, the root newest."""
        mark = self._clock
        self._clock += len(rows) + 1
        index.stamp[rows] = np.arange(self._clock - 1, mark, -1)
        return mark

    def offer(self, index: Index, row: int) -> None:
        """Take in a row that the last scan had to leave out; a younger one comes with the next."""
        stamp = int(index.stamp[row])
        if stamp <= self._scanned:
            heappush(self._candidates, (stamp, row))

    def victims(self, index: Index, before: int) -> Iterator[int]:
        """Yield the least recently used rows; each is looked at once a call."""
        proposed: list[tuple[int, int]] = []
        last = (0, -1)
        try:
            while (self._candidates or self._scan(index, before)) and (
                self._candidates[0][0] < before
            ):
                stamp, row = candidate = heappop(self._candidates)
                is_repeat, last = candidate == last, candidate
                if is_repeat or not self._is_evictable(index, row, stamp):
                    continue  # used since, gone, or pinned: then it is offered again
                proposed.append(candidate)
                yield row
        finally:
            for stamp, row in proposed:
                if self._is_evictable(index, row, stamp):
                    heappush(self._candidates, (stamp, row))  # it was not taken

    def _scan(self, index: Index, before: int) -> bool:
        """Take in the next rows by age; False if there are no more."""
        rows = index.in_state(TierName.CPU, Residency.READY)
        stamps = index.stamp[rows]
        rows = rows[(index.pins[rows] == 0) & (stamps > self._scanned) & (stamps < before)]
        stamps = index.stamp[rows]
        self._scanned = max(self._scanned, before - 1)
        if len(rows) > VICTIMS_SCANNED_AT_ONCE:
            oldest = np.argpartition(stamps, VICTIMS_SCANNED_AT_ONCE)[:VICTIMS_SCANNED_AT_ONCE]
            rows, stamps = rows[oldest], stamps[oldest]
            self._scanned = int(stamps.max())
        order = np.argsort(stamps)
        # Sorted, and so a heap already.
        self._candidates = list(zip(stamps[order].tolist(), rows[order].tolist(), strict=True))
        return bool(self._candidates)

    @staticmethod
    def _is_evictable(index: Index, row: int, stamp: int) -> bool:
        return bool(
            index.stamp[row] == stamp
            and index.pins[row] == 0
            and index.cell(row, TierName.CPU) == Residency.READY
        )
