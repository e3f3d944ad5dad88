"""Flush: writing what the CPU tier would lose with the process, before it has to leave.

A tier that is written to on demotion lacks what is still in the CPU tier. What has been there for
so long that a crash would hurt is written while the tier has nothing else to do; and when the
daemon stops in order, whatever the admission would take, what is worth most first. Parents come
with their children, since without them these are not found.
"""

from collections import deque

import numpy as np

from kvtier.core.admission import OfferReason
from kvtier.core.index import WAS_FLUSHED
from kvtier.core.limits import CLOSING_BLOCKS_MAX, DEMOTION_BLOCKS_MAX, LINGERING_STORES_MAX
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.table import Keys, Rows, as_keys
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.messages.slow_tier import AdminState, WriteMode
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers, TransferLane

__all__ = ["Flush"]

_PAUSE_NS = 1_000_000
"""Between two looks at what is due: a look takes as long at most."""


class Flush:
    """Of all tiers that are written to on demotion."""

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
        """By tier, when what was stored together came, oldest first."""
        self._closing: dict[TierName, deque[bytes]] = {}
        """By tier, what is to be written before the daemon stops, most worth first."""
        self._is_closing = False
        self._resume_ns = 0
        """What is due waits until then, so that others get their turn."""

    def stored(self, rows: list[int], now_ns: int) -> None:
        """Note blocks of one chain that came into the CPU tier."""
        for lane in self._lanes():
            if lane.tier.flush_after_ns and not self._is_closing:
                empty: deque[tuple[int, Keys]] = deque(maxlen=LINGERING_STORES_MAX)
                keys = self._cache.index.keys_of(np.array(rows))
                self._lingering.setdefault(lane.tier.name, empty).append((now_ns, keys))

    def close(self, now_ns: int) -> None:
        """Begin to write what the tiers would take; each is idle once it is all there."""
        self._is_closing = True
        self._lingering.clear()
        for lane in self._lanes():
            if lane.tier.is_kept and lane.takes_writes(now_ns):
                self._closing[lane.tier.name] = deque(self._worthy(lane, now_ns))

    def advance(self, now_ns: int) -> None:
        """Queue what is due, as far as there is room for it; a bounded number of blocks."""
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
        """Return when something is due that could be written then."""
        lanes = [self._transfers.lanes[name] for name in self._lingering]
        dues = [
            self._due_ns(lane)
            for lane in lanes
            if lane.is_up and lane.admin_state is AdminState.ACTIVE
        ]
        return min((due_ns for due_ns in dues if due_ns is not None), default=None)

    def _due_ns(self, lane: TransferLane) -> int | None:
        """Return when an idle tier is to be written to next."""
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
            if len(keys) > num_left:  # the tail first: its parents are then needed
                stores.appendleft((stored_ns, keys[:-num_left]))
                keys = keys[-num_left:]
            num_left -= len(keys)
            rows = self._cache.index.find(keys)
            for row in rows[rows >= 0][::-1].tolist():
                if self._writes.offer(lane, [row], OfferReason.LINGERING, now_ns):
                    self._cache.index.past[row] |= WAS_FLUSHED
        self._resume_ns = now_ns + _PAUSE_NS

    def _write_closing(self, lane: TransferLane, key: bytes, now_ns: int) -> None:
        row = int(self._cache.index.find(as_keys(key))[0])
        if row < 0 or self._cache.state(row, TierName.CPU) != Residency.READY:
            return  # it was dropped, or found corrupt
        if self._cache.lacks(row, lane.tier.name):
            self._transfers.write(lane, [row], now_ns)

    def _worthy(self, lane: TransferLane, now_ns: int) -> list[bytes]:
        """Return the blocks that a tier lacks and would take, the most valuable first."""
        index = self._cache.index
        rows = index.in_state(TierName.CPU, Residency.READY)
        rows = rows[index.lacks(rows, lane.tier.name)]
        if len(rows) > CLOSING_BLOCKS_MAX:
            latest = np.argpartition(index.stamp[rows], -CLOSING_BLOCKS_MAX)[-CLOSING_BLOCKS_MAX:]
            rows = rows[latest]
        taken: list[int] = []
        # Children first, so that what is needed for them is known when its turn comes.
        for row in rows[np.argsort(-index.position[rows].astype(np.int64), kind="stable")].tolist():
            if self._writes.would_take(lane, row, now_ns):
                self._writes.note_needed(lane, [row])
                taken.append(row)
        return self._by_worth(np.array(taken, np.int64))

    def _by_worth(self, rows: Rows) -> list[bytes]:
        index = self._cache.index
        keys = [index.hash_of(row) for row in rows.tolist()]
        scores = self._history.orders.scores(keys) if self._history else index.stamp[rows].tolist()
        positions = index.position[rows].tolist()
        order = sorted(range(len(keys)), key=lambda place: (-scores[place], positions[place]))
        return [keys[place] for place in order]
