"""The CPU tier as the node sees it: index, slots and eviction, kept consistent with each other.

Rules
-----
* A row has a slot exactly when it is not absent from the CPU tier, and a checksum exactly when it
  is ready there, or was until it was condemned.
* ``claim``, then bytes are copied by somebody, then ``publish`` or ``abandon``; in between nobody
  reads the slot.
* A block that is pinned, or named in the call that makes room, is not evicted.
"""

from collections.abc import Sequence

import numpy as np

from kvtier.core.eviction import Eviction
from kvtier.core.identity import BlockHeader, Selection
from kvtier.core.index import NO_SLOT, Index
from kvtier.core.limits import INDEX_ROWS_MAX
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows, as_keys
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import EVICTED_BLOCKS

__all__ = ["Cache"]


class Cache:
    """Which blocks are where, and which arena slots they have."""

    def __init__(self, slots: SlabAllocator, eviction: Eviction, metrics: Metrics) -> None:
        self.index = Index()
        self.slots = slots
        self._eviction = eviction
        self.metrics = metrics
        self.num_pins = 0
        """Pins of all rows together; 0 when the node is idle."""

    def touch(self, rows: Rows) -> int:
        """Note one use of a chain's known leading blocks; returns its mark for ``claim``."""
        return self._eviction.touch(self.index, rows)

    def make_rows(self, count: int) -> int:
        """Return for how many more blocks the index has room, forgetting some where it lacks it.

        Those known to be only in the remote tier are forgotten: a probe finds them again.
        """
        index = self.index
        if len(index) + count > INDEX_ROWS_MAX:
            rows = index.rows()
            here = index.residency(rows, TierName.CPU) != Residency.ABSENT
            here |= index.residency(rows, TierName.SSD) != Residency.ABSENT
            is_ready = index.residency(rows, TierName.REMOTE) == Residency.READY
            forgettable = rows[~here & is_ready]
            index.move(forgettable, TierName.REMOTE, Residency.ABSENT)
            index.forget_absent(forgettable)
        return max(0, INDEX_ROWS_MAX - len(index))

    def claim(self, row: int, mark: int) -> bool:
        """Give a row that is absent from the CPU tier a slot to be written, evicting if need be.

        Spares blocks touched at ``mark`` or later. False: no room; nothing has changed for the
        row, though others may have been evicted.
        """
        assert self.index.slot[row] == NO_SLOT
        size = slot_bytes(int(self.index.payload_bytes[row]))
        offset = self.slots.take(size)
        if offset is None:
            offset = self._make_room(size, mark)
        if offset is None:
            return False
        self.index.slot[row] = offset
        self.index.move(row, TierName.CPU, Residency.WRITING)
        return True

    def publish(self, row: int, checksum: bytes) -> None:
        """Make a claimed row readable."""
        assert self.state(row, TierName.CPU) == Residency.WRITING
        self.index.checksum[row] = as_keys(checksum)[0]
        self.index.move(row, TierName.CPU, Residency.READY)
        if self.index.pins[row] == 0:
            self._eviction.offer(self.index, row)

    def abandon(self, row: int) -> None:
        """Take a claimed row's slot back; the row is forgotten if it is nowhere else."""
        assert self.state(row, TierName.CPU) == Residency.WRITING
        self._vacate(row)

    def evict(self, row: int) -> None:
        """Drop a ready, unpinned row from the CPU tier; forgotten if it is nowhere else."""
        assert self.state(row, TierName.CPU) == Residency.READY
        assert self.index.pins[row] == 0, "a pinned block is not evicted"
        self._vacate(row)

    def evict_all(self, selection: Selection) -> tuple[int, int]:
        """Drop the ready, unpinned rows of a selection; returns blocks and bytes."""
        index = self.index
        rows = index.selected(index.in_state(TierName.CPU, Residency.READY), selection)
        rows = rows[index.pins[rows] == 0]
        num_bytes = sum(self.slots.size_at(int(offset)) for offset in index.slot[rows])
        for row in rows.tolist():
            self.evict(row)
        return len(rows), num_bytes

    def pin(self, row: int) -> None:
        """Keep a row's slot from being evicted until the matching ``unpin``."""
        self.index.pins[row] += 1
        self.num_pins += 1

    def unpin(self, row: int) -> None:
        """End one ``pin``; the last one of a condemned row lets it go."""
        assert self.index.pins[row] > 0, "every unpin has its pin"
        self.index.pins[row] -= 1
        self.num_pins -= 1
        if self.index.pins[row] > 0:
            return
        state = self.state(row, TierName.CPU)
        if state == Residency.EVICTING:
            self._vacate(row)
        elif state == Residency.READY:
            self._eviction.offer(self.index, row)

    def condemn(self, row: int) -> None:
        """Serve a ready row no more, because its bytes are not those that were stored."""
        if self.state(row, TierName.CPU) != Residency.READY:
            return
        self.metrics.add(EVICTED_BLOCKS, tier=TierName.CPU, reason="corrupt")
        if self.index.pins[row] == 0:
            self.evict(row)
            return
        # The checksum stays: a write that waits needs it, to find that these bytes fail it.
        self.index.move(row, TierName.CPU, Residency.EVICTING)

    def state(self, row: int, tier: TierName) -> int:
        """Return a row's residency in a tier."""
        return self.index.cell(row, tier)

    def checksum(self, row: int) -> bytes:
        """Return the checksum of a row that is ready in the CPU tier."""
        return bytes(self.index.checksum[row].tobytes())

    def header(self, row: int) -> BlockHeader:
        """Return the complete header of a row that is ready in the CPU tier."""
        return self.index.header_of(row)

    def offsets(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the arena offsets of rows that have slots."""
        return tuple(int(self.index.slot[row]) for row in rows)

    def _vacate(self, row: int) -> None:
        offset = int(self.index.slot[row])
        self.slots.give(offset)
        self.index.checksum[row] = 0
        self.index.slot[row] = NO_SLOT
        self.index.move(row, TierName.CPU, Residency.ABSENT)
        self.index.forget_absent(np.array([row]))

    def _make_room(self, size: int, mark: int) -> int | None:
        for row in self._eviction.victims(self.index, mark):
            offset = int(self.index.slot[row])
            if self.slots.size_at(offset) == size:
                self.evict(row)
                self.metrics.add(EVICTED_BLOCKS, tier=TierName.CPU, reason="capacity")
            else:
                self._evict_slab(offset, mark)
            freed = self.slots.take(size)
            if freed is not None:
                return freed
        return None

    def _evict_slab(self, offset: int, mark: int) -> None:
        """Empty the slab around ``offset``, so that another size may use it, if all of it can go.

        Evicting by age alone would empty nearly the whole arena before one slab came free.
        """
        index = self.index
        start, end = self.slots.slab_range(offset)
        rows = index.in_state(TierName.CPU, Residency.READY)
        inside = (index.slot[rows] >= start) & (index.slot[rows] < end)
        rows = rows[inside & (index.pins[rows] == 0) & (index.stamp[rows] < mark)]
        if len(rows) < self.slots.num_taken_at(offset):
            return
        for row in rows.tolist():
            self.evict(row)
        self.metrics.add(EVICTED_BLOCKS, len(rows), tier=TierName.CPU, reason="capacity")
