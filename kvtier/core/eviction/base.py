"""The seam between the CPU tier and the policy that empties it."""

from collections.abc import Collection, Generator, Iterator
from typing import Protocol

import numpy as np

from kvtier.core.index import BlockIndex
from kvtier.core.slots import SlabAllocator
from kvtier.core.table import Rows

__all__ = ["Eviction", "remaining_by_age", "stamp_chain"]


class Eviction(Protocol):
    """Orders the blocks of the CPU tier by how little is lost without them.

    A policy proposes and never removes: its user skips what is pinned or not ready, and a block
    named in a ``touch`` is not proposed to make room for that very chain. Blocks of each slot size
    have an order of their own, since one cannot take the place of another; the owner of a slot is
    the row of its block.
    """

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Note one use of a chain's leading blocks, given from the root on.

        Returns the mark of this use: ``victims(…, before=mark)`` spares these blocks. Changes the
        ``stamp`` column only.
        """

    def offer(self, index: BlockIndex, row: int) -> None:
        """Note that a row has become ready and unpinned, so that it may be proposed."""

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield rows that are ready and unpinned in slots of ``size``, the least worth first.

        Proposes no block of a use whose mark is ``before`` or later. What was not taken when the
        generator is closed is proposed again.
        """

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Return about ``count`` of the rows that will be proposed next, in about that order."""


def stamp_chain(index: BlockIndex, rows: Rows, clock: int) -> int:
    """Stamp a chain's leading blocks after ``clock``, the root newest; returns the clock then."""
    after = clock + len(rows) + 1
    index.stamp[rows] = np.arange(after - 1, clock, -1)
    return after


def remaining_by_age(
    index: BlockIndex, slots: SlabAllocator, size: int, before: int, proposed: Collection[int]
) -> Iterator[int]:
    """Yield the evictable rows of a size that were used before a mark, least recently used first.

    But for those proposed already.
    """
    rows = slots.owners_of(size)
    rows = rows[index.evictable(rows) & (index.stamp[rows] < before)]
    rows = rows[np.argsort(index.stamp[rows])]
    return (row for row in rows.tolist() if row not in proposed)
