"""Allocates slots of the CPU tier to blocks, and evicts other blocks to make room.

The eviction policy proposes victims. Blocks that ``Retention`` keeps are skipped as long as
another block can be evicted, and ``Demotion`` may hold a victim back until it is written to a
slower tier.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from kvtier.core.fate import Fate
from kvtier.core.index import IS_KEPT, NO_SLOT, WAS_REFUSED
from kvtier.core.limits import DRAINS_MAX, SIZE_KEPT_NS, SLAB_VICTIMS_MAX, VICTIMS_TAKEN_AT_ONCE
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import donors, slot_bytes
from kvtier.core.table import Rows
from kvtier.node.flow.demotion import Demotion
from kvtier.node.flow.retention import Retention
from kvtier.node.state.cache import Cache
from kvtier.observe.daemon_metrics import EVICTED_BLOCKS

__all__ = ["CpuAllocator"]


class CpuAllocator:
    """Claims slots for blocks that are about to be stored, loaded or prefetched."""

    def __init__(self, cache: Cache, retention: Retention, demotion: Demotion) -> None:
        self.cache = cache
        self._retention = retention
        self._demotion = demotion
        self._used_ns: dict[int, int] = {}
        """When a block of each slot size was last used."""
        self._now_ns = 0

    def touch(self, rows: Rows, payload_bytes: int, now_ns: int) -> int:
        """Record one use of a chain's known leading blocks; returns its mark for ``claim``."""
        self._used_ns[slot_bytes(payload_bytes)] = self._now_ns = now_ns
        self.cache.residency_listener.report_arrivals()
        return self.cache.eviction.touch(self.cache.index, rows)

    def claim(self, row: int, mark: int) -> bool:
        """Claim a slot for one row; False if there is no room."""
        return self.claim_all(np.array([row]), mark) == 1

    def claim_all(self, rows: Rows, mark: int) -> int:
        """Give slots to rows of one size that are absent from the CPU tier, evicting if needed.

        Spares blocks touched at ``mark`` or later. Returns how many leading rows got a slot, in
        state writing; the others are unchanged.
        """
        assert (self.cache.index.slot[rows] == NO_SLOT).all()
        size = self.cache.size_of(int(rows[0])) if len(rows) else 0
        num_claimed = self._take(rows, size)
        while num_claimed < len(rows) and self._make_room(size, mark, len(rows) - num_claimed):
            num_more = self._take(rows[num_claimed:], size)
            if not num_more:
                break
            num_claimed += num_more
        return num_claimed

    def _take(self, rows: Rows, size: int) -> int:
        num_taken = self.cache.take_slots(rows, size)
        if num_taken:
            index, rows = self.cache.index, rows[:num_taken]
            keys = index.hashes_of(rows)
            index.flags[rows] = np.where([self._retention.is_kept(key) for key in keys], IS_KEPT, 0)
        return num_taken

    def _make_room(self, size: int, mark: int, num_wanted: int) -> bool:
        """Evict until at least one slot of ``size`` is free; False if nothing can be evicted."""
        slots = self.cache.slots
        slabs_of = {each: slots.num_slabs_of(each) for each in slots.sizes()}
        oldest_ns = self._now_ns - SIZE_KEPT_NS
        in_use = {each for each, used_ns in self._used_ns.items() if used_ns > oldest_ns}
        for donor in donors(size, slabs_of, in_use, slots.num_reserved):
            if donor == size:
                has_room = self._evict_oldest(size, mark, num_wanted)
            else:
                has_room = self._empty_slab(donor)
            if has_room:
                return True
        while self._retention.give_way(size):
            if self._evict_oldest(size, mark, num_wanted):
                return True
        self._begin_drain(size, slabs_of)
        return False

    def _evict_oldest(self, size: int, mark: int, count: int) -> bool:
        cache = self.cache
        victims = cache.eviction.victims(cache.index, cache.slots, size, mark)
        while len(rows := _next_of(victims, min(count, VICTIMS_TAKEN_AT_ONCE))):
            going = self._demotion.hold_back(rows, self._now_ns)
            self._evict(going)
            if len(going):
                break
        else:
            going = rows
        victims.close()  # no earlier, or the policy would propose the same rows again
        self._count_evicted(len(going))
        return len(going) > 0

    def _evict(self, rows: Rows) -> None:
        """Evict rows, and record for each whether a slower tier had refused it."""
        cache = self.cache
        self._demotion.note_evicted(rows)
        is_refused = cache.index.flags[rows] & WAS_REFUSED != 0
        if is_refused.any():
            with cache.residency_listener.leaving(Fate.REFUSED_BUDGET):
                cache.evict(rows[is_refused])
        if not is_refused.all():
            cache.evict(rows[~is_refused])

    def _empty_slab(self, size: int) -> bool:
        """Empty one slab of a size without held blocks, so that another size can use it.

        Evicting by age alone would empty nearly the whole arena before one slab came free.
        """
        cache, slots = self.cache, self.cache.slots
        idle = {slab for num_held, slab in slots.slabs_by_held(size) if num_held == 0}
        if not idle:
            return False
        victims = cache.eviction.victims(cache.index, slots, size)
        slabs = (
            slots.slab_at(int(cache.index.slot[row])) for row in islice(victims, SLAB_VICTIMS_MAX)
        )
        number = next((slab for slab in slabs if slab in idle), min(idle))
        rows = slots.owners_in(number)
        if len(rows):
            self._evict(rows)
            self._count_evicted(len(rows))
        else:
            slots.clear(number)
        return True

    def _begin_drain(self, size: int, slabs_of: dict[int, int]) -> None:
        """Stop using the blocks of one slab, so that a size without any slab gets it.

        If a block that many requests read sits in every slab, no slab would ever be free of pins.
        A draining slab is free once today's leases have ended, and leases have deadlines.
        """
        cache, slots = self.cache, self.cache.slots
        if size in slabs_of or slots.num_draining_for(size) >= DRAINS_MAX:
            return
        for _, number in sorted(pair for each in slabs_of for pair in slots.slabs_by_held(each)):
            rows = slots.owners_in(number)
            if (cache.index.residency(rows, TierName.CPU) == Residency.READY).all():
                num_held = int((cache.index.pins[rows] > 0).sum())
                slots.drain(number, size)
                cache.expel(rows)
                self._count_evicted(len(rows) - num_held)
                return

    def _count_evicted(self, num_blocks: int) -> None:
        self.cache.metrics.add(EVICTED_BLOCKS, num_blocks, tier=TierName.CPU, reason="capacity")


def _next_of(victims: Iterator[int], count: int) -> Rows:
    return np.array(list(islice(victims, count)), np.int64)
