"""What an order of its own does not reach: the last resort of policies that take leaves only.

Where a child is pinned its parent is no leaf; where a policy was never told of a block it does not
know it. If nothing else can go, these can, or an arena full of pins above and below them would take
nothing in any more.
"""

from collections.abc import Collection, Iterator

import numpy as np

from kvtier.core.index import BlockIndex
from kvtier.core.slots import SlabAllocator
from kvtier.core.table import Rows

__all__ = ["rest_by_age", "stamp_chain"]


def stamp_chain(index: BlockIndex, rows: Rows, clock: int) -> int:
    """Stamp a chain's leading blocks after ``clock``, the root newest; returns the clock then."""
    after = clock + len(rows) + 1
    index.stamp[rows] = np.arange(after - 1, clock, -1)
    return after


def rest_by_age(
    index: BlockIndex, slots: SlabAllocator, size: int, before: int, proposed: Collection[int]
) -> Iterator[int]:
    """Yield the evictable rows of a size that were used before a mark, least recently used first.

    But for those proposed already.
    """
    rows = slots.owners_of(size)
    rows = rows[index.evictable(rows) & (index.stamp[rows] < before)]
    rows = rows[np.argsort(index.stamp[rows])]
    return (row for row in rows.tolist() if row not in proposed)
