"""The interface of eviction policies, and functions that several of them use."""

from collections.abc import Collection, Generator, Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from kvtier.core.index import BlockIndex
from kvtier.core.limits import NEXT_VICTIMS_MAX
from kvtier.core.slots import SlabAllocator
from kvtier.core.table import Rows

__all__ = ["Eviction", "first_victims", "remaining_by_age", "stamp_chain"]


def first_victims(victims: Generator[int, None, None], count: int) -> Rows:
    """Return the first victims, a bounded number, since each may take some 3 us."""
    rows = np.array(list(islice(victims, min(count, NEXT_VICTIMS_MAX))), np.int64)
    victims.close()
    return rows


class Eviction(Protocol):
    """Orders the blocks of the CPU tier by how little their loss costs.

    A policy proposes and never removes: the caller skips blocks that are pinned or not ready, and a
    block named in a ``touch`` is not proposed to make room for that very chain. Each slot size has
    its own order, because blocks of different sizes cannot replace each other; the owner of a slot
    is the row of its block.
    """

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Note one use of a chain's leading blocks, in order from the root.

        Returns the mark of this use: ``victims(…, before=mark)`` spares these blocks. Only changes
        the ``stamp`` column.
        """

    def offer(self, index: BlockIndex, row: int) -> None:
        """Note that a row has become ready and unpinned, and may be proposed."""

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield rows that are ready and unpinned in slots of ``size``, in order of eviction.

        Omits blocks of a use with mark ``before`` or later. Rows that were not taken when the
        generator is closed are proposed again.
        """

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Return about ``count`` rows that will be proposed next, in approximate order."""


def stamp_chain(index: BlockIndex, rows: Rows, clock: int) -> int:
    """Stamp a chain's leading blocks after ``clock``, the root newest; returns the new clock."""
    after = clock + len(rows) + 1
    index.stamp[rows] = np.arange(after - 1, clock, -1)
    return after


def remaining_by_age(
    index: BlockIndex, slots: SlabAllocator, size: int, before: int, proposed: Collection[int]
) -> Iterator[int]:
    """Yield evictable rows that were not proposed yet, least recently used first.

    The last resort of policies that only evict leaves: the parent of a pinned child is not a leaf,
    and a policy may not know a block. Without it, an arena full of pins above and below such blocks
    could not accept anything.
    """
    rows = slots.owners_of(size)
    rows = rows[index.evictable(rows) & (index.stamp[rows] < before)]
    rows = rows[np.argsort(index.stamp[rows])]
    return (row for row in rows.tolist() if row not in proposed)
