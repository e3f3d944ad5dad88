"""The CPU tier: keeps index, slots and eviction order consistent with each other.

Rules
-----
* A row has a slot exactly when it is not absent from the CPU tier, and a checksum exactly when it
  is ready there, or was until it was condemned.
* A slot is claimed (``CpuAllocator``), its bytes are copied, then it is published or abandoned; it
  is not read in between.
* A pinned block is not evicted.
* An *expelled* block is no longer served, and leaves once its slot is neither read nor filled.
"""

from collections.abc import Sequence

import numpy as np

from kvtier.core.eviction.base import Eviction
from kvtier.core.fate import Fate
from kvtier.core.identity import Selection
from kvtier.core.index import (
    NO_SLOT,
    WAS_DEMOTED,
    WAS_REFUSED,
    WAS_USED,
    BlockIndex,
    Scope,
)
from kvtier.core.limits import INDEX_ROWS_MAX
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows, as_keys
from kvtier.node.state.residency_listener import ResidencyListener
from kvtier.observe.daemon_metrics import EVICTED_BLOCKS
from kvtier.observe.metrics import Metrics

__all__ = ["Cache"]


class Cache:
    """The blocks of the CPU tier and their arena slots."""

    def __init__(
        self,
        slots: SlabAllocator,
        eviction: Eviction,
        metrics: Metrics,
        history: History | None = None,
    ) -> None:
        self.index = BlockIndex()
        self.residency_listener = ResidencyListener(self.index, history)
        self.slots = slots
        self.eviction = eviction
        self.metrics = metrics
        self.num_pins = 0
        """Pins of all rows together; 0 when the node is idle."""
        self.num_claims = 0
        """Slots claimed so far."""
        self.closed: list[Selection] = []
        """Selections being dropped: their blocks are neither served nor accepted."""
        self.expelled: set[int] = set()
        """Rows that leave when they are unpinned, or written."""

    def is_closed(self, scope: Scope) -> bool:
        """Return whether a scope's blocks are being dropped from the CPU tier."""
        return any(each.has(scope.key_space, scope.tenant) for each in self.closed)

    def note_loaded(self, rows: Rows) -> None:
        """Record that blocks were loaded, which proves them worth keeping.

        A store proves nothing: it may be the next part of the request that stored the blocks.
        """
        is_here = self.index.residency(rows, TierName.CPU) == Residency.READY
        self.index.flags[rows[is_here]] |= WAS_USED
        # Blocks used since a slower tier refused them may be admitted now.
        self.index.flags[rows[is_here]] &= ~np.uint8(WAS_DEMOTED | WAS_REFUSED)

    def make_rows(self, count: int) -> int:
        """Return how many more blocks fit into the index, after forgetting some if it is full.

        Forgets blocks that only shared tiers have: an existence query finds them again.
        """
        index = self.index
        if len(index) + count > INDEX_ROWS_MAX:
            rows = index.rows()
            for tier in LOWER_TIERS:
                if not tier.is_shared:
                    rows = rows[index.residency(rows, tier) == Residency.ABSENT]
            for tier in LOWER_TIERS:
                if tier.is_shared:
                    index.move(index.held(rows, tier), tier, Residency.ABSENT)
            index.forget_absent(rows)
        return max(0, INDEX_ROWS_MAX - len(index))

    def publish(self, row: int, checksum: bytes) -> bool:
        """Make one claimed row readable; False if it was expelled meanwhile."""
        return bool(self.publish_all([row], [checksum]))

    def payload_bytes(self, rows: Sequence[int]) -> int:
        """Return the total payload size of rows."""
        return int(self.index.payload_bytes[np.array(rows, np.int64)].sum())

    def publish_all(self, rows: Sequence[int], checksums: Sequence[bytes]) -> list[int]:
        """Make claimed rows readable; returns those that were not expelled meanwhile."""
        index, numbers = self.index, np.array(rows, np.int64)
        assert (index.residency(numbers, TierName.CPU) == Residency.WRITING).all()
        index.checksum[numbers] = as_keys(b"".join(checksums))
        index.move(numbers, TierName.CPU, Residency.READY)
        offsets, pins = index.slot[numbers].tolist(), index.pins[numbers].tolist()
        for row, offset, num_pins in zip(rows, offsets, pins, strict=True):
            if not num_pins:
                self.slots.release(offset)
                self.eviction.offer(index, row)
        expelled = self.expelled.intersection(rows)
        for row in expelled:
            self._expel_ready(row)
        return [row for row in rows if row not in expelled]

    def abandon(self, row: int) -> None:
        """Free a claimed row's slot; the row is forgotten if no other tier has it."""
        assert self.state(row, TierName.CPU) == Residency.WRITING
        self._vacate(row)

    def evict(self, rows: Rows) -> None:
        """Evict ready, unpinned rows; rows that no other tier has are forgotten."""
        index = self.index
        assert (index.residency(rows, TierName.CPU) == Residency.READY).all()
        assert not index.pins[rows].any(), "a pinned block is not evicted"
        for offset in index.slot[rows].tolist():
            self.slots.free(offset)
        self._note_gone(rows)

    def evict_all(self, selection: Selection) -> tuple[int, int]:
        """Evict the ready, unpinned rows of a selection; returns their number and payload bytes."""
        index = self.index
        rows = index.selected(index.in_state(TierName.CPU, Residency.READY), selection)
        rows = rows[index.pins[rows] == 0]
        num_bytes = int(index.payload_bytes[rows].sum())
        with self.residency_listener.leaving(Fate.DROPPED):
            self.evict(rows)
        return len(rows), num_bytes

    def held(self, selection: Selection) -> Rows:
        """Return the rows of a selection that are pinned or being filled."""
        index = self.index
        rows = index.rows()
        state = index.residency(rows, TierName.CPU)
        rows = rows[
            (state != Residency.ABSENT) & ((state != Residency.READY) | (index.pins[rows] > 0))
        ]
        return index.selected(rows, selection)

    def expel(self, rows: Rows) -> None:
        """Stop serving rows; each leaves once it is neither held nor filled."""
        for row in rows.tolist():
            if self.state(row, TierName.CPU) == Residency.READY:
                self._expel_ready(row)
            else:
                self.expelled.add(row)

    def pin(self, row: int) -> None:
        """Protect a row's slot from eviction until the matching ``unpin``."""
        self.index.pins[row] += 1
        self.num_pins += 1
        if self.index.pins[row] == 1 and self.state(row, TierName.CPU) == Residency.READY:
            self.slots.hold(int(self.index.slot[row]))

    def unpin(self, row: int) -> None:
        """Undo one ``pin``; an expelled row leaves with its last pin."""
        assert self.index.pins[row] > 0, "unpin without pin"
        self.index.pins[row] -= 1
        self.num_pins -= 1
        if self.index.pins[row] > 0:
            return
        state = self.state(row, TierName.CPU)
        if state == Residency.EVICTING:
            self._vacate(row)
        elif state == Residency.READY:
            self.slots.release(int(self.index.slot[row]))
            self.eviction.offer(self.index, row)

    def condemn(self, row: int) -> None:
        """Stop serving a ready row whose bytes are not those that were stored."""
        if self.state(row, TierName.CPU) != Residency.READY:
            return
        self.metrics.add(EVICTED_BLOCKS, tier=TierName.CPU, reason="corrupt")
        with self.residency_listener.leaving(Fate.FAILED_CHECK):
            self._expel_ready(row)

    def is_held(self, row: int) -> bool:
        """Return whether a row has a slot that cannot be freed now."""
        state = self.state(row, TierName.CPU)
        return state != Residency.ABSENT and (
            state != Residency.READY or bool(self.index.pins[row] > 0)
        )

    def size_of(self, row: int) -> int:
        """Return the size of the slot that a row has or needs."""
        return slot_bytes(int(self.index.payload_bytes[row]))

    def state(self, row: int, tier: TierName) -> int:
        """Return a row's residency in a tier."""
        return self.index.cell(row, tier)

    def lacks(self, row: int, tier: TierName) -> bool:
        """Return whether a row may have to be written to a tier: absent there, or unverified."""
        return self.state(row, tier) in {Residency.ABSENT, Residency.UNVERIFIED}

    def checksum(self, row: int) -> bytes:
        """Return the checksum of a row that is ready in the CPU tier."""
        return bytes(self.index.checksum[row].tobytes())

    def offsets(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the arena offsets of rows that have slots."""
        offsets: list[int] = self.index.slot[np.array(rows, np.int64)].tolist()
        return tuple(offsets)

    def take_slots(self, rows: Rows, size: int) -> int:
        """Give free slots to leading rows that have none, in state writing; returns how many."""
        offsets = self.slots.allocate_some(size, rows)
        rows, index = rows[: len(offsets)], self.index
        if len(rows):
            self.num_claims += len(rows)
            index.slot[rows] = offsets
            index.flags[rows] = 0
            index.move(rows, TierName.CPU, Residency.WRITING)
        return len(rows)

    def _expel_ready(self, row: int) -> None:
        if self.index.pins[row] == 0:
            self.evict(np.array([row]))
            return
        # Keep the checksum: a queued write needs it to detect damaged bytes.
        self.expelled.add(row)
        self.index.move(row, TierName.CPU, Residency.EVICTING)

    def _vacate(self, row: int) -> None:
        """Free the slot of a row that is being written, or expelled."""
        offset = int(self.index.slot[row])
        self.slots.release(offset)
        self.slots.free(offset)
        self._note_gone(np.array([row]))

    def _note_gone(self, rows: Rows) -> None:
        self.index.checksum[rows] = 0
        self.index.slot[rows] = NO_SLOT
        self.index.move(rows, TierName.CPU, Residency.ABSENT)
        self.expelled.difference_update(rows.tolist())
        self.index.forget_absent(rows)
