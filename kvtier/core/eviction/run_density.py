"""Least worth first, by what a history has learned: run density, and credit-LRU beside it.

The order is the history's, which knows chains, ages and what came back; here it meets what the CPU
tier must not lose just now: blocks that are pinned, kept, or part of the chain that needs the room.
The history is told by the cache which blocks come and go.
"""

from collections.abc import Generator
from itertools import islice

import numpy as np

from kvtier.core.eviction.base import remaining_by_age, stamp_chain
from kvtier.core.index import IS_KEPT, BlockIndex
from kvtier.core.limits import NEXT_VICTIMS_MAX
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.eviction_queue import Credit
from kvtier.core.reuse.history import History
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows

__all__ = ["CreditLru", "RunDensity"]

_CREDIT_S = 300.0
"""What credit-LRU gives a block that was seen before: two returns of the median user."""


class RunDensity:
    """An ``Eviction``: tails of the runs that earn least by being held."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._clock = 1

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Stamp a chain's leading blocks; what the use says of their worth the history was told."""
        mark = self._clock
        self._clock = stamp_chain(index, rows, mark)
        return mark

    def offer(self, index: BlockIndex, row: int) -> None:
        """Do nothing: what is pinned is passed over, and keeps its place."""

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield rows in the history's order; then, if no leaf is left, others by age."""
        limit = self._clock if before is None else before
        proposed: set[int] = set()

        def is_spared(row: int) -> bool:
            return not (
                index.stamp[row] < limit
                and index.pins[row] == 0
                and not index.past[row] & IS_KEPT
                and index.cell(row, TierName.CPU) == Residency.READY
                and slot_bytes(int(index.payload_bytes[row])) == size
            )

        for row in self._history.orders.next_out(TierName.CPU, size, is_spared):
            proposed.add(row)
            yield row
        yield from remaining_by_age(index, slots, size, limit, proposed)

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Return what ``victims`` would yield next; a bounded number, since each costs 3 us."""
        victims = self.victims(index, slots, size)
        rows = np.array(list(islice(victims, min(count, NEXT_VICTIMS_MAX))), np.int64)
        victims.close()
        return rows


class CreditLru(RunDensity):
    """An ``Eviction``: least recently used, with some minutes of credit for what came back once."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        history.orders.rank(TierName.CPU, Credit(_CREDIT_S))
