"""Writes blocks to slower tiers before the CPU tier loses them by eviction, a crash, or a stop.

``Demotion`` looks ahead of eviction. Tiers in write mode ``demote`` get their blocks here, as far
as admission accepts them; tiers in mode ``store`` get another chance at blocks they missed while
their queue was full or the tier was out. Stores never wait for it: a block that is not written when
its turn comes is evicted anyway, and counted. So it looks far ahead, and starts as soon as the CPU
tier is nearly full.

``Flush`` covers blocks that are only in the CPU tier. Blocks older than
``flush_after_ns`` are written while the tier is idle, to limit the loss in a crash. On an orderly
stop it writes all blocks that admission accepts, the most valuable first. Parents are
written with their children, which could not be found without them.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvtier.core.admission import OfferReason, RefusalRule
from kvtier.core.index import WAS_DEMOTED, WAS_FLUSHED, WAS_REFUSED, WAS_USED
from kvtier.core.limits import (
    CLOSING_BLOCKS_MAX,
    DEMOTION_BLOCKS_MAX,
    DEMOTION_FREE_SHARE,
    DEMOTION_WINDOW_BLOCKS,
    DEMOTION_WINDOW_BLOCKS_MAX,
    DEMOTION_WINDOW_SHARE,
    DEMOTION_WINDOW_SHARE_MAX,
    LINGERING_STORES_MAX,
)
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.slow_tier import AdminState, WriteMode
from kvtier.core.table import Keys, Rows, as_keys
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.messages.events import DaemonStopping
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import DEMOTED_BLOCKS, REFUSED_BLOCKS

__all__ = ["Demotion", "Flush"]

_LOOKS_A_WINDOW = 256
"""A window is examined again each time this fraction of it has been used up."""


@dataclass(slots=True)
class _Look:
    """State of one look ahead."""

    lanes: list[TransferLane]
    num_left: int
    """Blocks that may still be offered before other work gets its turn."""
    is_cut_short: bool = False


class Demotion:
    """Looks ahead of eviction after slots were claimed."""

    def __init__(self, cache: Cache, transfers: TierTransfers, writes: TierWrites) -> None:
        self._cache = cache
        self._transfers = transfers
        self._writes = writes
        self._num_claims_seen = 0
        self._is_cut_short = False
        """Whether more blocks were due than the lanes had room for."""

    def advance(self, now_ns: int) -> None:
        """Offer the next blocks to be evicted, a bounded number."""
        num_claims = self._cache.num_claims - self._num_claims_seen
        if not self._is_cut_short and num_claims < self._num_claims_between():
            return
        lanes = self._lanes(now_ns, WriteMode.DEMOTE, WriteMode.STORE)
        if not lanes or all(self._transfers.room_bytes(lane) <= 0 for lane in lanes):
            self._is_cut_short = True
            return  # tried again when a write has ended
        self._num_claims_seen = self._cache.num_claims
        look = _Look(lanes, DEMOTION_BLOCKS_MAX)
        slots = self._cache.slots
        for size in list(slots.sizes()):
            if not slots.has_room_share(size, DEMOTION_FREE_SHARE):
                self._demote(self._next(size), look, now_ns)
        self._is_cut_short = look.is_cut_short

    def hold_back(self, rows: Rows, now_ns: int) -> Rows:
        """Offer victims that were not offered yet; returns the rows that may be evicted now.

        Eviction order changes with time, so a block that no look ahead reached may be the next
        victim. Victims that a tier accepts stay until they are written. So do their ancestors for
        which the queue has no room yet; other blocks are evicted instead. If the queue has no room
        at all, all may be evicted.
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
            if not index.flags[row] & WAS_DEMOTED:
                chances = [self._offer(row, lane, now_ns) for lane in lanes]
            is_full = all(chance is None for chance in chances)
            if not is_full and not index.flags[row] & WAS_DEMOTED:
                self._mark(row, is_taken=1 in chances)
            if 1 in chances or (is_full and row in needed):
                needed.add(parent)
            else:
                going.append(row)
        return np.array(going, np.int64)

    def note_evicted(self, rows: Rows) -> None:
        """Count rows that are evicted without having been offered, for lack of time.

        Call it while they are still in the CPU tier.
        """
        index = self._cache.index
        for lane in self._transfers.lanes.values():
            if lane.tier.write is WriteMode.DEMOTE and lane.admin_state is AdminState.ACTIVE:
                is_missed = index.flags[rows] & WAS_DEMOTED == 0
                is_missed &= index.lacks(rows, lane.tier.name)
                self._cache.metrics.add(
                    REFUSED_BLOCKS, int(is_missed.sum()), tier=lane.tier.name, rule=RefusalRule.FULL
                )

    def _lanes(self, now_ns: int, *modes: WriteMode) -> list[TransferLane]:
        """Return the lanes with one of these write modes that take writes now."""
        lanes = self._transfers.lanes.values()
        return [lane for lane in lanes if lane.tier.write in modes and lane.takes_writes(now_ns)]

    def _num_claims_between(self) -> int:
        """Return how many claims to wait for before the next look ahead."""
        windows = [self._window(size) for size in self._cache.slots.sizes()]
        return max(1, min(windows, default=0) // _LOOKS_A_WINDOW)

    def _window(self, size: int) -> int:
        """Return how many blocks of a size to look ahead."""
        slots = self._cache.slots
        num_slots = slots.num_slabs_of(size) * (slots.slab_bytes // size)
        wanted = max(DEMOTION_WINDOW_BLOCKS, int(num_slots * DEMOTION_WINDOW_SHARE))
        if not self._is_last_chance():
            # The longer a block stays, the better its value is known, so look ahead no further.
            wanted = min(wanted, max(1, int(num_slots * DEMOTION_WINDOW_SHARE_MAX)))
        return min(wanted, DEMOTION_WINDOW_BLOCKS_MAX)

    def _is_last_chance(self) -> bool:
        """Return whether all tiers are in mode ``store``, so that blocks only catch up here."""
        lanes = self._transfers.lanes.values()
        return all(lane.tier.write is WriteMode.STORE for lane in lanes)

    def _next(self, size: int) -> Rows:
        """Return the next rows to be evicted that were not offered yet.

        In eviction order, children before their parents, so that parents that are needed are known
        by then. If all tiers are in mode ``store``, blocks that proved useful come first.
        """
        cache, index = self._cache, self._cache.index
        rows = cache.eviction.next_victims(index, cache.slots, size, self._window(size))
        rows = rows[index.flags[rows] & WAS_DEMOTED == 0]
        if self._is_last_chance():
            order = np.lexsort((index.stamp[rows], index.flags[rows] & WAS_USED == 0))
            rows = rows[order]
        fresh: Rows = rows
        return fresh

    def _demote(self, rows: Rows, look: _Look, now_ns: int) -> None:
        """Offer rows one by one, and mark those that were offered."""
        for row in rows.tolist():
            if look.num_left == 0:
                look.is_cut_short = True
                return
            chances = [self._offer(row, lane, now_ns) for lane in look.lanes]
            if all(chance is None for chance in chances):
                look.is_cut_short = True
                return
            look.num_left -= 1  # a refusal takes just as long
            # Its parent may have been skipped before.
            look.is_cut_short |= 1 in chances
            self._mark(row, is_taken=1 in chances)

    def _offer(self, row: int, lane: TransferLane, now_ns: int) -> int | None:
        """Offer a row to a tier; returns how many were taken, None if there is no room."""
        index, name = self._cache.index, lane.tier.name
        if not self._cache.lacks(row, name):
            if index.flags[row] & WAS_FLUSHED:
                self._writes.note_written(lane, row, now_ns)
            return 0
        if lane.tier.write is WriteMode.STORE and self._is_below(row):
            return 0  # only blocks that would otherwise be lost are offered again
        if self._transfers.room_bytes(lane) < self._cache.size_of(row):
            return None
        taken = self._writes.offer(lane, [row], OfferReason.LEAVING, now_ns)
        self._cache.metrics.add(DEMOTED_BLOCKS, taken, tier=name)
        return taken

    def _is_below(self, row: int) -> bool:
        """Return whether some slower tier has a block, or is about to have it."""
        return any(not self._cache.lacks(row, tier) for tier in self._transfers.lanes)

    def _mark(self, row: int, *, is_taken: bool) -> None:
        index = self._cache.index
        index.flags[row] &= ~np.uint8(WAS_FLUSHED)
        index.flags[row] |= WAS_DEMOTED
        if not is_taken and not self._is_below(row):
            index.flags[row] |= WAS_REFUSED


_PAUSE_NS = 1_000_000
"""Pause between two flush steps; one step takes at most about as long."""


class Flush:
    """Flushes blocks to the tiers in mode ``demote``."""

    def __init__(
        self,
        cache: Cache,
        transfers: TierTransfers,
        writes: TierWrites,
        history: History | None = None,
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._writes = writes
        self._history = history
        self._lingering: dict[TierName, deque[tuple[int, Keys]]] = {}
        """By tier, the stores that are not flushed yet and their times, oldest first."""
        self._closing: dict[TierName, deque[bytes]] = {}
        """By tier, the blocks to write before the daemon stops, most valuable first."""
        self._is_closing = False
        self._resume_ns = 0
        """End of the pause in flushing, in which other work gets its turn."""

    def stored(self, rows: list[int], now_ns: int) -> None:
        """Note stored blocks of one chain, to flush them later."""
        for lane in self._lanes():
            if lane.tier.flush_after_ns and not self._is_closing:
                empty: deque[tuple[int, Keys]] = deque(maxlen=LINGERING_STORES_MAX)
                keys = self._cache.index.keys_of(np.array(rows))
                self._lingering.setdefault(lane.tier.name, empty).append((now_ns, keys))

    def close(self, _event: DaemonStopping, now_ns: int) -> None:
        """Start to write all blocks that the tiers accept; a tier is idle when all are written."""
        self._is_closing = True
        self._lingering.clear()
        for lane in self._lanes():
            if lane.tier.is_kept and lane.takes_writes(now_ns):
                self._closing[lane.tier.name] = deque(self._worthy(lane, now_ns))

    def advance(self, now_ns: int) -> None:
        """Queue blocks that are due, as far as there is room; a bounded number."""
        for name in self._lingering:
            lane = self._transfers.lanes[name]
            due_ns = self._due_ns(lane)
            if due_ns is not None and due_ns <= now_ns and lane.takes_writes(now_ns):
                self._write_lingering(lane, now_ns)
        for name, keys in self._closing.items():
            lane = self._transfers.lanes[name]
            while keys and lane.takes_writes(now_ns) and self._transfers.room_bytes(lane) > 0:
                self._write_closing(lane, keys.popleft(), now_ns)

    def next_deadline_ns(self) -> int | None:
        """Return when the next blocks that can be written become due."""
        lanes = [self._transfers.lanes[name] for name in self._lingering]
        dues = [
            self._due_ns(lane)
            for lane in lanes
            if lane.is_up and lane.admin_state is AdminState.ACTIVE
        ]
        return min((due_ns for due_ns in dues if due_ns is not None), default=None)

    def _due_ns(self, lane: TransferLane) -> int | None:
        """Return when the next write to an idle tier is due."""
        stores, after_ns = self._lingering.get(lane.tier.name), lane.tier.flush_after_ns
        if not (stores and after_ns and lane.is_idle):
            return None
        return max(stores[0][0] + after_ns, self._resume_ns)

    def _lanes(self) -> list[TransferLane]:
        lanes = self._transfers.lanes.values()
        return [lane for lane in lanes if lane.tier.write is WriteMode.DEMOTE]

    def _write_lingering(self, lane: TransferLane, now_ns: int) -> None:
        stores, num_left = self._lingering[lane.tier.name], DEMOTION_BLOCKS_MAX
        came_ns = now_ns - lane.tier.flush_after_ns
        while stores and stores[0][0] <= came_ns and num_left > 0:
            stored_ns, keys = stores.popleft()
            if len(keys) > num_left:  # the tail first, so that its parents are needed
                stores.appendleft((stored_ns, keys[:-num_left]))
                keys = keys[-num_left:]
            num_left -= len(keys)
            rows = self._cache.index.find(keys)
            for row in rows[rows >= 0][::-1].tolist():
                if self._writes.offer(lane, [row], OfferReason.LINGERING, now_ns):
                    self._cache.index.flags[row] |= WAS_FLUSHED
        self._resume_ns = now_ns + _PAUSE_NS

    def _write_closing(self, lane: TransferLane, key: bytes, now_ns: int) -> None:
        row = int(self._cache.index.find(as_keys(key))[0])
        if row < 0 or self._cache.state(row, TierName.CPU) != Residency.READY:
            return  # it was dropped, or found corrupt
        if self._cache.lacks(row, lane.tier.name):
            self._transfers.write(lane, [row], now_ns)

    def _worthy(self, lane: TransferLane, now_ns: int) -> list[bytes]:
        """Return the blocks that a tier lacks and would accept, the most valuable first."""
        index = self._cache.index
        rows = index.in_state(TierName.CPU, Residency.READY)
        rows = rows[index.lacks(rows, lane.tier.name)]
        if len(rows) > CLOSING_BLOCKS_MAX:
            latest = np.argpartition(index.stamp[rows], -CLOSING_BLOCKS_MAX)[-CLOSING_BLOCKS_MAX:]
            rows = rows[latest]
        taken: list[int] = []
        # Children first, so that needed parents are known when their turn comes.
        for row in rows[np.argsort(-index.position[rows].astype(np.int64), kind="stable")].tolist():
            if self._writes.would_take(lane, row, now_ns):
                self._writes.note_needed(lane, [row])
                taken.append(row)
        return self._by_worth(np.array(taken, np.int64))

    def _by_worth(self, rows: Rows) -> list[bytes]:
        index = self._cache.index
        keys = index.hashes_of(rows)
        scores = self._history.queues.scores(keys) if self._history else index.stamp[rows].tolist()
        positions = index.position[rows].tolist()
        order = sorted(range(len(keys)), key=lambda place: (-scores[place], positions[place]))
        return [keys[place] for place in order]
