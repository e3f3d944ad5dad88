"""Warming: blocks of slower tiers are brought into the CPU tier before they are asked for.

Behind real loads: a worker takes these reads when no load has any. What a load asks for meanwhile
is read in its turn. Nothing that is worth more is pushed out for it, save for requests that were
announced, which are about to ask; those are bounded by what may be kept for them.
"""

import numpy as np

from kvtier.core.limits import PREFETCH_ARENA_SHARE
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.node.messages.actions import WarmResult
from kvtier.node.state.block_run import BlockRun
from kvtier.node.state.cache import Cache
from kvtier.node.state.read_queue import BACKGROUND
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import PREFETCHED_BLOCKS

__all__ = ["Prefetcher"]


class Prefetcher:
    """Reads that nobody waits for."""

    def __init__(
        self, cache: Cache, transfers: TierTransfers, history: History | None = None
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._history = history
        self._rows: set[int] = set()
        """Being read, or queued to be; some may have ended since."""

    def start(self, run: BlockRun, reason: str, now_ns: int) -> WarmResult:
        """Queue what the CPU tier lacks of a run, from its head, as far as there is room.

        ``reason`` is ``announced`` or ``warm``.
        """
        mark = self._cache.touch(run.rows, run.payload_bytes, now_ns)
        room_bytes = self._room_bytes()
        num_ready = num_coming = 0
        end = ""
        for place, row in enumerate(run.rows.tolist()):
            state = self._cache.state(row, TierName.CPU)
            if state == Residency.ABSENT:
                room_bytes -= self._cache.size_of(row)
                end = self._refusal(row, reason) if room_bytes >= 0 else "busy"
                if not end and not self._cache.claim(row, mark):
                    end = "no_room"
                if end:
                    break
                self._rows.add(row)
                self._transfers.read(row, run.sources(place)[0], BACKGROUND, now_ns)
                self._cache.metrics.add(PREFETCHED_BLOCKS, reason=reason)
            num_ready += state == Residency.READY
            num_coming += state != Residency.READY
        return WarmResult(num_ready, num_coming, end)

    @property
    def has_room(self) -> bool:
        """Tell whether anything more may be brought in just now."""
        return self._room_bytes() > 0

    def _refusal(self, row: int, reason: str) -> str:
        """Return why a block is not brought in, or nothing."""
        size = self._cache.size_of(row)
        is_sure = reason == "announced" or self._cache.slots.num_free(size) > 0
        return "" if is_sure or self._beats_next(row, size) else "worth"

    def _beats_next(self, row: int, size: int) -> bool:
        """Tell whether a block is worth more than what would be evicted for it."""
        cache = self._cache
        victims = cache.eviction.next_victims(cache.index, cache.slots, size, 1)
        if self._history is None or not len(victims):
            return False
        keys = [cache.index.hash_of(each) for each in (row, int(victims[0]))]
        score, victim_score = self._history.orders.scores(keys)
        return score > victim_score

    def _room_bytes(self) -> int:
        """Return how much more may be filled at once for nobody."""
        rows = np.array([*self._rows], np.int64)
        is_coming = self._cache.index.residency(rows, TierName.CPU) == Residency.WRITING
        self._rows = set(rows[is_coming].tolist())
        held_bytes = sum(self._cache.size_of(row) for row in self._rows)
        return int(self._cache.slots.reserved_bytes * PREFETCH_ARENA_SHARE) - held_bytes
