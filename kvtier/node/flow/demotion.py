"""Demotion ahead of eviction: what has to leave the CPU tier soon is offered to slower ones.

A tier that is written to on demotion gets its blocks here, those that its admission takes; one that
is written to at once gets another chance at what it missed, because the way was full or the tier
was out. No store waits for it: what is not written when its turn comes is evicted all the same, and
counted. So it looks far ahead, a share of the tier, and as soon as the tier is nearly full.
"""

from dataclasses import dataclass

import numpy as np

from kvtier.core.admission import OfferReason, RefusalRule
from kvtier.core.index import WAS_DEMOTED, WAS_FLUSHED, WAS_REFUSED, WAS_USED
from kvtier.core.limits import (
    DEMOTION_BLOCKS_MAX,
    DEMOTION_FREE_SHARE,
    DEMOTION_WINDOW_BLOCKS,
    DEMOTION_WINDOW_BLOCKS_MAX,
    DEMOTION_WINDOW_SHARE,
    DEMOTION_WINDOW_SHARE_MAX,
)
from kvtier.core.table import Rows
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.messages.slow_tier import AdminState, WriteMode
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import DEMOTED_BLOCKS, REFUSED_BLOCKS

__all__ = ["Demotion"]

_LOOKS_A_WINDOW = 256
"""A window is looked through each time so small a part of it has been used up."""


@dataclass(slots=True)
class _Look:
    """One look ahead."""

    lanes: list[TransferLane]
    num_left: int
    """Blocks that may be offered before others get their turn."""
    is_cut_short: bool = False


class Demotion:
    """Looks ahead of eviction each time slots were given out."""

    def __init__(self, cache: Cache, transfers: TierTransfers, writes: TierWrites) -> None:
        self._cache = cache
        self._transfers = transfers
        self._writes = writes
        self._num_claims_seen = 0
        self._is_cut_short = False
        """More was to be demoted than the lanes would take."""

    def advance(self, now_ns: int) -> None:
        """Offer the next blocks to go, a bounded number of them."""
        num_claims = self._cache.num_claims - self._num_claims_seen
        if not self._is_cut_short and num_claims < self._num_claims_between():
            return
        lanes = self._lanes(now_ns, WriteMode.DEMOTE, WriteMode.STORE)
        if not lanes or all(self._transfers.room_bytes(lane) <= 0 for lane in lanes):
            self._is_cut_short = True
            return  # looked at again once something was written
        self._num_claims_seen = self._cache.num_claims
        look = _Look(lanes, DEMOTION_BLOCKS_MAX)
        slots = self._cache.slots
        for size in list(slots.sizes()):
            if not slots.has_room_share(size, DEMOTION_FREE_SHARE):
                self._demote(self._next(size), look, now_ns)
        self._is_cut_short = look.is_cut_short

    def hold_back(self, rows: Rows, now_ns: int) -> Rows:
        """Offer what is about to leave and had no chance yet; returns the rows that may go now.

        The order changes with time, so that what nobody looked ahead at may be the next to go. What
        a tier takes of it stays until it is written, and so does, from its parent on, what has no
        room to be written after it; others go instead. Without any room all go.
        """
        lanes = self._lanes(now_ns, WriteMode.DEMOTE)
        if not lanes:
            return rows
        index = self._cache.index
        parents = dict(zip(rows.tolist(), index.parent_rows(rows).tolist(), strict=True))
        needed: set[int] = set()
        going: list[int] = []
        for row, parent in parents.items():
            chances: list[int | None] = [0]
            if not index.past[row] & WAS_DEMOTED:
                chances = [self._offer(row, lane, now_ns) for lane in lanes]
            is_full = all(chance is None for chance in chances)
            if not is_full and not index.past[row] & WAS_DEMOTED:
                self._mark(row, is_taken=1 in chances)
            if 1 in chances or (is_full and row in needed):
                needed.add(parent)
            else:
                going.append(row)
        return np.array(going, np.int64)

    def note_evicted(self, rows: Rows) -> None:
        """Count rows that leave the CPU tier now and would have been offered, had there been time.

        To be called before they are gone.
        """
        index = self._cache.index
        for lane in self._transfers.lanes.values():
            if lane.tier.write is WriteMode.DEMOTE and lane.admin_state is AdminState.ACTIVE:
                is_missed = index.past[rows] & WAS_DEMOTED == 0
                is_missed &= index.lacks(rows, lane.tier.name)
                self._cache.metrics.add(
                    REFUSED_BLOCKS, int(is_missed.sum()), tier=lane.tier.name, rule=RefusalRule.FULL
                )

    def _lanes(self, now_ns: int, *modes: WriteMode) -> list[TransferLane]:
        """Return the lanes that are written to in one of these modes, and can be used."""
        lanes = self._transfers.lanes.values()
        return [lane for lane in lanes if lane.tier.write in modes and lane.takes_writes(now_ns)]

    def _num_claims_between(self) -> int:
        """Return how many slots are given out between two looks: few of those looked at."""
        windows = [self._window(size) for size in self._cache.slots.sizes()]
        return max(1, min(windows, default=0) // _LOOKS_A_WINDOW)

    def _window(self, size: int) -> int:
        """Return how many blocks of a size to look ahead."""
        slots = self._cache.slots
        num_slots = slots.num_slabs_of(size) * (slots.slab_bytes // size)
        wanted = max(DEMOTION_WINDOW_BLOCKS, int(num_slots * DEMOTION_WINDOW_SHARE))
        if not self._is_last_chance():
            # The longer a block was here the better it is known what it is worth.
            wanted = min(wanted, max(1, int(num_slots * DEMOTION_WINDOW_SHARE_MAX)))
        return min(wanted, DEMOTION_WINDOW_BLOCKS_MAX)

    def _is_last_chance(self) -> bool:
        """Tell whether all tiers are written to at once, so that here they get what they missed."""
        lanes = self._transfers.lanes.values()
        return all(lane.tier.write is WriteMode.STORE for lane in lanes)

    def _next(self, size: int) -> Rows:
        """Return the next rows to go that were not offered yet.

        In the order in which they go, children before their parents, so that what is needed below
        for its children is known by then. Where everything is written anyway, those first that
        proved useful.
        """
        cache, index = self._cache, self._cache.index
        rows = cache.eviction.next_victims(index, cache.slots, size, self._window(size))
        rows = rows[index.past[rows] & WAS_DEMOTED == 0]
        if self._is_last_chance():
            order = np.lexsort((index.stamp[rows], index.past[rows] & WAS_USED == 0))
            rows = rows[order]
        fresh: Rows = rows
        return fresh

    def _demote(self, rows: Rows, look: _Look, now_ns: int) -> None:
        """Offer rows one by one, and mark those that had their chance."""
        for row in rows.tolist():
            if look.num_left == 0:
                look.is_cut_short = True
                return
            chances = [self._offer(row, lane, now_ns) for lane in look.lanes]
            if all(chance is None for chance in chances):
                look.is_cut_short = True
                return
            look.num_left -= 1  # a refusal takes as long
            # What it needs may have been passed over before.
            look.is_cut_short |= 1 in chances
            self._mark(row, is_taken=1 in chances)

    def _offer(self, row: int, lane: TransferLane, now_ns: int) -> int | None:
        """Offer a row to a tier; returns how many were taken, None where there is no room."""
        index, name = self._cache.index, lane.tier.name
        if not self._cache.lacks(row, name):
            if index.past[row] & WAS_FLUSHED:
                self._writes.note_written(lane, row, now_ns)
            return 0
        if lane.tier.write is WriteMode.STORE and self._is_below(row):
            return 0  # a last chance is for what would be lost
        if self._transfers.room_bytes(lane) < self._cache.size_of(row):
            return None
        taken = self._writes.offer(lane, [row], OfferReason.LEAVING, now_ns)
        self._cache.metrics.add(DEMOTED_BLOCKS, taken, tier=name)
        return taken

    def _is_below(self, row: int) -> bool:
        """Tell whether some slower tier has a block, or is about to have it."""
        return any(not self._cache.lacks(row, tier) for tier in self._transfers.lanes)

    def _mark(self, row: int, *, is_taken: bool) -> None:
        index = self._cache.index
        index.past[row] &= ~np.uint8(WAS_FLUSHED)
        index.past[row] |= WAS_DEMOTED
        if not is_taken and not self._is_below(row):
            index.past[row] |= WAS_REFUSED
