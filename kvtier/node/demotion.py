"""Demotion ahead of eviction: a last chance for blocks that no slower tier has.

Blocks are written below when they are stored. One that could not be, because the way was full or
the tier was out, would be lost with its eviction. So while the arena is nearly full, those that go
next are offered once more, the ones that were used since they came in first. No store waits for it:
what is not written when its turn comes is evicted all the same.
"""

import numpy as np

from kvtier.core.index import WAS_DEMOTED, WAS_USED
from kvtier.core.limits import DEMOTION_BLOCKS_MAX, DEMOTION_FREE_SHARE, DEMOTION_WINDOW_BLOCKS
from kvtier.core.residency import Residency
from kvtier.core.table import Rows
from kvtier.node.cache import Cache
from kvtier.node.transfer import Lane, Transfers
from kvtier.observe.table import DEMOTED_BLOCKS

__all__ = ["Demotion"]


class Demotion:
    """Looks ahead of eviction each time slots were given out."""

    def __init__(self, cache: Cache, transfers: Transfers) -> None:
        self._cache = cache
        self._transfers = transfers
        self._num_claims_seen = 0
        self._is_cut_short = False
        """More was to be demoted than the lanes would take."""

    def advance(self, now_ns: int) -> None:
        """Offer the next blocks to go, a bounded number of them."""
        if self._num_claims_seen == self._cache.num_claims and not self._is_cut_short:
            return
        lanes = [lane for lane in self._transfers.lanes.values() if lane.is_usable(now_ns)]
        if not lanes or all(self._transfers.room_bytes(lane) <= 0 for lane in lanes):
            self._is_cut_short = True
            return  # looked at again once something was written
        self._num_claims_seen = self._cache.num_claims
        self._is_cut_short = False
        slots, num_left = self._cache.slots, DEMOTION_BLOCKS_MAX
        for size in list(slots.sizes()):
            if not slots.has_room_share(size, DEMOTION_FREE_SHARE):
                num_left -= self._demote(self._worthy(size), lanes, num_left, now_ns)

    def _worthy(self, size: int) -> Rows:
        """Return the next rows to go that no slower tier has, those that were used first."""
        cache, index = self._cache, self._cache.index
        rows = cache.eviction.coming(index, cache.slots, size, DEMOTION_WINDOW_BLOCKS)
        is_lost = index.past[rows] & WAS_DEMOTED == 0
        for tier in self._transfers.lanes:
            is_lost &= index.residency(rows, tier) == Residency.ABSENT
        rows = rows[is_lost]
        order = np.lexsort((index.stamp[rows], index.past[rows] & WAS_USED == 0))
        worthy: Rows = rows[order]
        return worthy

    def _demote(self, rows: Rows, lanes: list[Lane], num_left: int, now_ns: int) -> int:
        """Offer rows one by one, each to the fastest tier that takes it; returns how many went."""
        num_demoted = 0
        for row in rows.tolist():
            if num_demoted == num_left:
                self._is_cut_short = True
                break
            lane = next((lane for lane in lanes if self._gives(row, lane, now_ns)), None)
            if lane is None:
                self._is_cut_short = True
                break
            self._cache.index.past[row] |= WAS_DEMOTED
            self._cache.metrics.add(DEMOTED_BLOCKS, tier=lane.tier.name)
            num_demoted += 1
        return num_demoted

    def _gives(self, row: int, lane: Lane, now_ns: int) -> bool:
        """Offer a row to a tier that has room for it; tells whether it will be written."""
        has_room = self._transfers.room_bytes(lane) >= self._cache.size_of(row)
        return has_room and self._transfers.offer_to(lane, [row], now_ns) == 1
