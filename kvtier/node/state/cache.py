"""The CPU tier as the node sees it: index, slots and eviction, kept consistent with each other.

Rules
-----
* A row has a slot exactly when it is not absent from the CPU tier, and a checksum exactly when it
  is ready there, or was until it was condemned.
* ``claim``, then bytes are copied by somebody, then ``publish`` or ``abandon``; in between nobody
  reads the slot.
* A block that is pinned, or named in the call that makes room, is not evicted.
* A block that is *expelled* is served no more, and leaves once nobody reads or fills its slot.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from kvtier.core.eviction import Eviction
from kvtier.core.fate import Fate
from kvtier.core.identity import Selection, split_hashes
from kvtier.core.index import (
    IS_KEPT,
    NO_SLOT,
    WAS_DEMOTED,
    WAS_REFUSED,
    WAS_USED,
    BlockIndex,
    Scope,
)
from kvtier.core.limits import (
    DRAINS_MAX,
    INDEX_ROWS_MAX,
    SIZE_KEPT_NS,
    SLAB_VICTIMS_MAX,
    VICTIMS_TAKEN_AT_ONCE,
)
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.slots import SlabAllocator, donors, slot_bytes
from kvtier.core.table import Rows, as_keys
from kvtier.node.state.residency_listener import ResidencyListener
from kvtier.observe.daemon_metrics import EVICTED_BLOCKS
from kvtier.observe.metrics import Metrics

__all__ = ["Cache"]


class Cache:
    """Which blocks are where, and which arena slots they have."""

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
        """Slots given out so far."""
        self.closed: list[Selection] = []
        """Whose blocks are being dropped: none is served, and none comes in."""
        self.expelled: set[int] = set()
        """Rows that leave once they are unpinned, or written."""
        self._used_ns: dict[int, int] = {}
        """By slot size, when a block of it was last used."""
        self.before_eviction: Callable[[Rows], object] = len
        """Told the rows that are evicted to make room, while they are still there."""
        self.hold_back: Callable[[Rows, int], Rows] = lambda rows, _now_ns: rows
        """Asked which of the next rows to go may go just now: others are to be written first."""
        self.is_kept: Callable[[bytes], bool] = lambda _key: False
        """Whether a block is passed over by eviction as long as another can go."""
        self.give_way: Callable[[int], bool] = lambda _size: False
        """Asked to let a kept block in a slot of that size go; False: there is none."""
        self._now_ns = 0

    def is_closed(self, scope: Scope) -> bool:
        """Tell whether a scope's blocks are being dropped from the CPU tier."""
        return any(each.has(scope.key_space, scope.tenant) for each in self.closed)

    def touch(self, rows: Rows, payload_bytes: int, now_ns: int) -> int:
        """Note one use of a chain's known leading blocks; returns its mark for ``claim``."""
        self._used_ns[slot_bytes(payload_bytes)] = self._now_ns = now_ns
        self.residency_listener.tell()
        return self.eviction.touch(self.index, rows)

    def note_loaded(self, rows: Rows) -> None:
        """Note that blocks proved worth keeping.

        A store says nothing of that: it may be the next part of the request that stored them.
        """
        is_here = self.index.residency(rows, TierName.CPU) == Residency.READY
        self.index.past[rows[is_here]] |= WAS_USED
        # What was used since it was offered below may be taken there now.
        self.index.past[rows[is_here]] &= ~np.uint8(WAS_DEMOTED | WAS_REFUSED)

    def make_rows(self, count: int) -> int:
        """Return how many more blocks fit into the index, forgetting some if it is full.

        Forgets blocks that only the remote tier has: an existence query finds them again.
        """
        index = self.index
        if len(index) + count > INDEX_ROWS_MAX:
            rows = index.rows()
            here = index.residency(rows, TierName.CPU) != Residency.ABSENT
            here |= index.residency(rows, TierName.SSD) != Residency.ABSENT
            forgettable = index.held(rows[~here], TierName.REMOTE)
            index.move(forgettable, TierName.REMOTE, Residency.ABSENT)
            index.forget_absent(forgettable)
        return max(0, INDEX_ROWS_MAX - len(index))

    def claim(self, row: int, mark: int) -> bool:
        """Claim one row; False: there is no room."""
        return self.claim_all(np.array([row]), mark) == 1

    def claim_all(self, rows: Rows, mark: int) -> int:
        """Give rows that are absent from the CPU tier slots to be written, evicting if need be.

        For rows of one size. Spares blocks touched at ``mark`` or later. Returns for how many
        leading rows there is room: nothing has changed for the others.
        """
        assert (self.index.slot[rows] == NO_SLOT).all()
        size = self.size_of(int(rows[0])) if len(rows) else 0
        num_claimed = self._take(rows, size)
        while num_claimed < len(rows) and self._make_room(size, mark, len(rows) - num_claimed):
            num_more = self._take(rows[num_claimed:], size)
            if not num_more:
                break
            num_claimed += num_more
        return num_claimed

    def publish(self, row: int, checksum: bytes) -> bool:
        """Publish one row; False if it was expelled meanwhile."""
        return bool(self.publish_all([row], [checksum]))

    def payload_bytes(self, rows: Sequence[int]) -> int:
        """Return the bytes of these rows' payloads, together."""
        return int(self.index.payload_bytes[np.array(rows, np.int64)].sum())

    def publish_all(self, rows: Sequence[int], checksums: Sequence[bytes]) -> list[int]:
        """Make claimed rows readable; returns those that are, not expelled meanwhile."""
        index, numbers = self.index, np.array(rows, np.int64)
        assert (index.residency(numbers, TierName.CPU) == Residency.WRITING).all()
        index.checksum[numbers] = as_keys(b"".join(checksums))
        index.move(numbers, TierName.CPU, Residency.READY)
        offsets, pins = index.slot[numbers].tolist(), index.pins[numbers].tolist()
        for row, offset, num_pins in zip(rows, offsets, pins, strict=True):
            if not num_pins:
                self.slots.let_go(offset)
                self.eviction.offer(index, row)
        expelled = self.expelled.intersection(rows)
        for row in expelled:
            self._expel_ready(row)
        return [row for row in rows if row not in expelled]

    def abandon(self, row: int) -> None:
        """Take a claimed row's slot back; the row is forgotten if it is nowhere else."""
        assert self.state(row, TierName.CPU) == Residency.WRITING
        self._vacate(row)

    def evict(self, rows: Rows) -> None:
        """Drop ready, unpinned rows from the CPU tier; forgotten if they are nowhere else."""
        index = self.index
        assert (index.residency(rows, TierName.CPU) == Residency.READY).all()
        assert not index.pins[rows].any(), "a pinned block is not evicted"
        for offset in index.slot[rows].tolist():
            self.slots.give(offset)
        self._note_gone(rows)

    def evict_all(self, selection: Selection) -> tuple[int, int]:
        """Drop the ready, unpinned rows of a selection; returns blocks and payload bytes."""
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
        """Serve rows of the CPU tier no more; each leaves once nobody holds or fills it."""
        for row in rows.tolist():
            if self.state(row, TierName.CPU) == Residency.READY:
                self._expel_ready(row)
            else:
                self.expelled.add(row)

    def pin(self, row: int) -> None:
        """Keep a row's slot from being evicted until the matching ``unpin``."""
        self.index.pins[row] += 1
        self.num_pins += 1
        if self.index.pins[row] == 1 and self.state(row, TierName.CPU) == Residency.READY:
            self.slots.hold(int(self.index.slot[row]))

    def unpin(self, row: int) -> None:
        """End one ``pin``; the last one of an expelled row lets it go."""
        assert self.index.pins[row] > 0, "every unpin has its pin"
        self.index.pins[row] -= 1
        self.num_pins -= 1
        if self.index.pins[row] > 0:
            return
        state = self.state(row, TierName.CPU)
        if state == Residency.EVICTING:
            self._vacate(row)
        elif state == Residency.READY:
            self.slots.let_go(int(self.index.slot[row]))
            self.eviction.offer(self.index, row)

    def condemn(self, row: int) -> None:
        """Serve a ready row no more, because its bytes are not those that were stored."""
        if self.state(row, TierName.CPU) != Residency.READY:
            return
        self.metrics.add(EVICTED_BLOCKS, tier=TierName.CPU, reason="corrupt")
        with self.residency_listener.leaving(Fate.FAILED_CHECK):
            self._expel_ready(row)

    def is_held(self, row: int) -> bool:
        """Tell whether a row has a slot that it cannot leave now."""
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
        """Tell whether a row may have to be written to a tier: absent there, or unverified."""
        return self.state(row, tier) in {Residency.ABSENT, Residency.UNVERIFIED}

    def checksum(self, row: int) -> bytes:
        """Return the checksum of a row that is ready in the CPU tier."""
        return bytes(self.index.checksum[row].tobytes())

    def offsets(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the arena offsets of rows that have slots."""
        offsets: list[int] = self.index.slot[np.array(rows, np.int64)].tolist()
        return tuple(offsets)

    def _take(self, rows: Rows, size: int) -> int:
        """Give leading rows the slots that are free; returns how many."""
        offsets = self.slots.take_some(size, rows)
        rows, index = rows[: len(offsets)], self.index
        if len(rows):
            self.num_claims += len(rows)
            index.slot[rows] = offsets
            kept = [self.is_kept(key) for key in split_hashes(index.keys_of(rows).tobytes())]
            index.past[rows] = np.where(kept, IS_KEPT, 0)
            index.move(rows, TierName.CPU, Residency.WRITING)
        return len(rows)

    def _expel_ready(self, row: int) -> None:
        if self.index.pins[row] == 0:
            self.evict(np.array([row]))
            return
        # The checksum stays: a write that waits needs it, to find bytes that fail it.
        self.expelled.add(row)
        self.index.move(row, TierName.CPU, Residency.EVICTING)

    def _vacate(self, row: int) -> None:
        """Take back the slot of a row that is held: written or expelled."""
        offset = int(self.index.slot[row])
        self.slots.let_go(offset)
        self.slots.give(offset)
        self._note_gone(np.array([row]))

    def _note_gone(self, rows: Rows) -> None:
        self.index.checksum[rows] = 0
        self.index.slot[rows] = NO_SLOT
        self.index.move(rows, TierName.CPU, Residency.ABSENT)
        self.expelled.difference_update(rows.tolist())
        self.index.forget_absent(rows)

    # Making room

    def _make_room(self, size: int, mark: int, num_wanted: int) -> bool:
        """Evict so that a slot of ``size`` is free, if that can be, or more that are wanted."""
        slabs_of = {each: self.slots.num_slabs_of(each) for each in self.slots.sizes()}
        oldest_ns = self._now_ns - SIZE_KEPT_NS
        in_use = {each for each, used_ns in self._used_ns.items() if used_ns > oldest_ns}
        for donor in donors(size, slabs_of, in_use, self.slots.num_reserved):
            if donor == size:
                has_room = self._evict_oldest(size, mark, num_wanted)
            else:
                has_room = self._empty_slab(donor)
            if has_room:
                return True
        while self.give_way(size):
            if self._evict_oldest(size, mark, num_wanted):
                return True
        self._begin_drain(size, slabs_of)
        return False

    def _evict_oldest(self, size: int, mark: int, count: int) -> bool:
        victims = self.eviction.victims(self.index, self.slots, size, mark)
        while len(rows := _next_of(victims, min(count, VICTIMS_TAKEN_AT_ONCE))):
            going = self.hold_back(rows, self._now_ns)
            self._evict_for_room(going)
            if len(going):
                break
        else:
            going = rows
        victims.close()  # not before, or they would be proposed again
        self.metrics.add(EVICTED_BLOCKS, len(going), tier=TierName.CPU, reason="capacity")
        return len(going) > 0

    def _evict_for_room(self, rows: Rows) -> None:
        """Evict rows, and have remembered of each whether a slower tier did not want it."""
        self.before_eviction(rows)
        is_refused = self.index.past[rows] & WAS_REFUSED != 0
        if is_refused.any():
            with self.residency_listener.leaving(Fate.REFUSED_BUDGET):
                self.evict(rows[is_refused])
        if not is_refused.all():
            self.evict(rows[~is_refused])

    def _empty_slab(self, size: int) -> bool:
        """Empty one slab of a size, all of which can go, so that another size may use it.

        Evicting by age alone would empty nearly the whole arena before one slab came free.
        """
        idle = {slab for num_held, slab in self.slots.slabs_by_held(size) if num_held == 0}
        if not idle:
            return False
        victims = self.eviction.victims(self.index, self.slots, size)
        slabs = (
            self.slots.slab_at(int(self.index.slot[row]))
            for row in islice(victims, SLAB_VICTIMS_MAX)
        )
        number = next((slab for slab in slabs if slab in idle), min(idle))
        rows = self.slots.owners_in(number)
        if len(rows):
            self._evict_for_room(rows)
            self.metrics.add(EVICTED_BLOCKS, len(rows), tier=TierName.CPU, reason="capacity")
        else:
            self.slots.clear(number)
        return True

    def _begin_drain(self, size: int, slabs_of: dict[int, int]) -> None:
        """Let no more blocks be used in one slab, so that a size without any gets it.

        Where a block that many read sits in every slab, none would ever be free of pins. Now the
        slab is once the leases of today have ended, which have deadlines.
        """
        if size in slabs_of or self.slots.num_draining_for(size) >= DRAINS_MAX:
            return
        for _, number in sorted(
            pair for each in slabs_of for pair in self.slots.slabs_by_held(each)
        ):
            rows = self.slots.owners_in(number)
            if (self.index.residency(rows, TierName.CPU) == Residency.READY).all():
                num_held = int((self.index.pins[rows] > 0).sum())
                self.slots.drain(number, size)
                self.expel(rows)
                gone = len(rows) - num_held
                self.metrics.add(EVICTED_BLOCKS, gone, tier=TierName.CPU, reason="capacity")
                return


def _next_of(victims: Iterator[int], count: int) -> Rows:
    return np.array(list(islice(victims, count)), np.int64)
