"""Checks that an eviction policy proposes no block while one of its children could be evicted."""

from collections.abc import Generator

from kvtier.core.eviction.base import Eviction
from kvtier.core.index import BlockIndex
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows

__all__ = ["CheckedEviction"]


class CheckedEviction:
    """An ``Eviction`` that delegates to another and raises AssertionError if it is wrong.

    A child that is pinned, retained, being written, protected or of another size cannot be evicted,
    so its parent may be.
    """

    def __init__(self, inner: Eviction) -> None:
        self._inner = inner

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Delegate."""
        return self._inner.touch(index, rows)

    def offer(self, index: BlockIndex, row: int) -> None:
        """Delegate."""
        self._inner.offer(index, row)

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield the victims of the other policy and check each."""
        proposed: set[int] = set()
        inner = self._inner.victims(index, slots, size, before)
        try:
            for row in inner:
                proposed.add(row)
                stay = _free_children(index, row, size, before)
                assert proposed.issuperset(stay), "a block would be evicted before its child"
                yield row
        finally:
            inner.close()

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Delegate; the result may be out of date by the time the blocks are evicted."""
        return self._inner.next_victims(index, slots, size, count)


def _free_children(index: BlockIndex, row: int, size: int, before: int | None) -> list[int]:
    """Return the children of a block that could be evicted now."""
    rows = index.in_state(TierName.CPU, Residency.READY)
    rows = rows[index.evictable(rows) & (index.parent_rows(rows) == row)]
    if before is not None:
        rows = rows[index.stamp[rows] < before]
    return [child for child in rows.tolist() if slot_bytes(int(index.payload_bytes[child])) == size]
