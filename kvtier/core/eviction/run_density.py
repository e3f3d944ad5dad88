"""Eviction by learned reuse: run density, and credit LRU.

The history, which knows chains, ages and reuse, provides the order. This module skips the blocks
that the CPU tier must not lose now: blocks that are pinned, kept, or part of the chain that needs
the room. The cache notifies the history of blocks that come and go.
"""

from collections.abc import Generator

from kvtier.core.eviction.base import first_victims, remaining_by_age, stamp_chain
from kvtier.core.index import BlockIndex
from kvtier.core.residency import TierName
from kvtier.core.reuse.eviction_queue import Credit
from kvtier.core.reuse.history import History
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows

__all__ = ["CreditLru", "RunDensity"]

_CREDIT_S = 300.0
"""The credit of a block that was seen before: twice the median time between a user's turns."""


class RunDensity:
    """Evicts the tails of the runs that gain least from being kept."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._clock = 1

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Stamp a chain's leading blocks; the history learns their worth from the use itself."""
        mark = self._clock
        self._clock = stamp_chain(index, rows, mark)
        return mark

    def offer(self, index: BlockIndex, row: int) -> None:
        """Do nothing: pinned blocks are skipped and keep their place."""

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield rows in the history's order, then the remaining ones by age."""
        limit = self._clock if before is None else before
        proposed: set[int] = set()

        def is_spared(row: int) -> bool:
            return not (
                index.stamp[row] < limit
                and index.is_evictable(row)
                and slot_bytes(int(index.payload_bytes[row])) == size
            )

        for row in self._history.queues.next_out(TierName.CPU, size, is_spared):
            proposed.add(row)
            yield row
        yield from remaining_by_age(index, slots, size, limit, proposed)

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Return what ``victims`` would yield next, a bounded number."""
        return first_victims(self.victims(index, slots, size), count)


class CreditLru(RunDensity):
    """LRU in which blocks that were used before get some minutes of credit."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        history.queues.rank(TierName.CPU, Credit(_CREDIT_S))
