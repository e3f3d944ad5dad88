"""Least recently used first, leaves before parents.

Theory
------
A use touches a chain's leading blocks, and stamps them so that each parent is newer than its child.
Any use of a child is a use of its ancestors, so a parent is never older than its child, and plain
order of stamps takes tails before heads: no child is stranded by the loss of its parent.

Finding the oldest is a partial sort over the index, good for thousands of evictions; blocks touched
since are recognised by their stamp and skipped, so the order stays exactly that of use.
"""

from collections.abc import Iterator

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
        """Rows with the stamp they had, the oldest last."""

    def touch(self, index: Index, rows: Rows) -> int:
        """Stamp a chain's leading blocks, the root newest."""
        mark = self._clock
        self._clock += len(rows) + 1
        index.stamp[rows] = np.arange(self._clock - 1, mark, -1)
        return mark

    def victims(self, index: Index, before: int) -> Iterator[int]:
        """Yield the least recently used rows; each is looked at once a call."""
        skipped: list[tuple[int, int]] = []
        is_fresh = False
        try:
            while True:
                if not self._candidates:
                    if is_fresh or not self._scan(index, before):
                        return
                    is_fresh = True
                stamp, row = self._candidates.pop()
                if index.stamp[row] != stamp or index.slot[row] < 0:
                    continue
                if stamp >= before:
                    skipped.append((stamp, row))
                    return
                if self._is_evictable(index, row):
                    yield row
                if index.slot[row] >= 0 and index.stamp[row] == stamp:
                    skipped.append((stamp, row))  # pinned, or not taken: still a candidate
        finally:
            self._candidates.extend(reversed(skipped))

    def _scan(self, index: Index, before: int) -> bool:
        rows = index.in_state(TierName.CPU, Residency.READY)
        rows = rows[(index.pins[rows] == 0) & (index.stamp[rows] < before)]
        stamps = index.stamp[rows]
        if len(rows) > VICTIMS_SCANNED_AT_ONCE:
            oldest = np.argpartition(stamps, VICTIMS_SCANNED_AT_ONCE)[:VICTIMS_SCANNED_AT_ONCE]
            rows, stamps = rows[oldest], stamps[oldest]
        order = np.argsort(stamps)[::-1]
        self._candidates = list(zip(stamps[order].tolist(), rows[order].tolist(), strict=True))
        return bool(self._candidates)

    @staticmethod
    def _is_evictable(index: Index, row: int) -> bool:
        return bool(
            index.pins[row] == 0
            and index.residency(np.array([row]), TierName.CPU)[0] == Residency.READY
        )
