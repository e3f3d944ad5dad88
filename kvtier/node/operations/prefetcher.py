"""Prefetches blocks into the CPU tier before they are requested, and keeps them there.

The blocks of an announced request are kept and prefetched until its turn; operators pin and warm
chains. Prefetch reads have the lowest priority: a worker takes one only when no load is waiting. A
load that needs the same block joins the read. Prefetching never evicts a more valuable block,
except for announced requests, whose share is bounded by the budget of ``Retention``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.core.identity import split_hashes
from kvtier.core.index import Scope
from kvtier.core.limits import CLAIMS_MAX, PREFETCH_ARENA_SHARE
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import History, Use
from kvtier.core.table import as_keys
from kvtier.node.flow.cpu_allocator import CpuAllocator
from kvtier.node.flow.decision import Decisions
from kvtier.node.flow.retention import Retention
from kvtier.node.messages.actions import PinResult, WarmResult
from kvtier.node.messages.events import PinBlocks, Warm
from kvtier.node.state.block_run import BlockRun, PromptChain
from kvtier.node.state.read_queue import BACKGROUND
from kvtier.node.state.session import Session
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import PREFETCHED_BLOCKS

__all__ = ["Prefetcher"]

_FindRun = Callable[[PromptChain, int, int], BlockRun]
"""Returns the run of a chain that could be loaded, given the first block and the time."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Blocks ``first`` to ``end`` of a chain, which an announced request will look up."""

    session: Session
    use: Use
    chain: PromptChain
    first: int
    end: int


class Prefetcher:
    """Handles pins, warms and announced requests."""

    def __init__(
        self,
        allocator: CpuAllocator,
        transfers: TierTransfers,
        retention: Retention,
        decisions: Decisions,
        *,
        find_run: _FindRun,
        block_bytes_of: Callable[[bytes], int],
        history: History | None = None,
    ) -> None:
        """``block_bytes_of`` returns a key space's block size, 0 if no engine has registered it."""
        self._cache = allocator.cache
        self._allocator = allocator
        self._transfers = transfers
        self._retention = retention
        self._decisions = decisions
        self._find_run = find_run
        self._block_bytes_of = block_bytes_of
        self._history = history
        self._waiting: dict[tuple[str, str], _Wanted] = {}
        """Announced requests, by session and request id, that wait for room to be prefetched."""
        self._rows: set[int] = set()
        """Rows queued or being read; reads of some may have ended since."""

    def pin(self, event: PinBlocks, now_ns: int) -> PinResult:
        """Keep a chain for as long as the operator asks, or unpin it."""
        block_bytes = self._block_bytes(event.key_space, event.hashes)
        if not block_bytes:
            return PinResult(0, "unknown")
        keys = split_hashes(event.hashes)
        return self._retention.pin(keys, block_bytes, event.ttl_ns, now_ns)

    def warm(self, event: Warm, now_ns: int) -> WarmResult:
        """Read the blocks of a chain that slower tiers have into the CPU tier."""
        block_bytes = self._block_bytes(event.key_space, event.hashes)
        if not block_bytes:
            return WarmResult(0, 0, "unknown")
        scope = Scope(event.key_space, event.tenant)
        run = self._find_run(PromptChain.of(scope, event.hashes, block_bytes), 0, now_ns)
        result = self._start(run, "warm", now_ns)
        if result.reason or run.reason == "complete":
            return result
        return WarmResult(result.num_ready, result.num_coming, run.reason)

    def announce(
        self, session: Session, use: Use, chain: PromptChain, first: int, now_ns: int
    ) -> None:
        """Keep the blocks that a waiting request will look up, and prefetch the missing ones."""
        token, traits = session.token, use.traits
        num_kept = self._retention.announce(token, use.keys, use.payload_bytes, traits, now_ns)
        wanted = _Wanted(session, use, chain, first, num_kept)
        if num_kept > first and not self._prefetch(wanted, now_ns):
            self._waiting[token, traits.request_id] = wanted
            if len(self._waiting) > CLAIMS_MAX:
                del self._waiting[next(iter(self._waiting))]

    def request_over(self, session: str, request_id: str) -> None:
        """Note that an announced request was looked up, or will not be."""
        self._retention.request_over(session, request_id)
        self._waiting.pop((session, request_id), None)

    def session_ended(self, session: str) -> None:
        """Forget the announced requests of an engine that is gone."""
        self._retention.session_ended(session)
        for name in [each for each in self._waiting if each[0] == session]:
            del self._waiting[name]

    def advance(self, now_ns: int) -> None:
        """Expire claims, and prefetch more for announced requests as room becomes free."""
        self._retention.expire(now_ns)
        while self._waiting and self._room_bytes() > 0:
            name = next(iter(self._waiting))
            if not self._prefetch(self._waiting[name], now_ns):
                break
            del self._waiting[name]

    def _prefetch(self, wanted: _Wanted, now_ns: int) -> bool:
        """Prefetch the blocks that are worth it; False if some have to wait for room."""
        run = self._find_run(wanted.chain, wanted.first, now_ns).head(wanted.end - wanted.first)
        num_paying = self._decisions.num_paying(
            wanted.session, wanted.use, run, wanted.first, now_ns=now_ns
        )
        run = run.head(num_paying)
        return not len(run) or self._start(run, "announced", now_ns).reason != "busy"

    def _start(self, run: BlockRun, reason: str, now_ns: int) -> WarmResult:
        """Queue reads of the blocks that the CPU tier lacks, from the head, while there is room.

        ``reason`` is ``announced`` or ``warm``.
        """
        mark = self._allocator.touch(run.rows, run.payload_bytes, now_ns)
        room_bytes = self._room_bytes()
        num_ready = num_coming = 0
        end = ""
        for place, row in enumerate(run.rows.tolist()):
            state = self._cache.state(row, TierName.CPU)
            if state == Residency.ABSENT:
                room_bytes -= self._cache.size_of(row)
                end = self._refusal(row, reason) if room_bytes >= 0 else "busy"
                if not end and not self._allocator.claim(row, mark):
                    end = "no_room"
                if end:
                    break
                self._rows.add(row)
                self._transfers.read(row, run.sources(place)[0], BACKGROUND, now_ns)
                self._cache.metrics.add(PREFETCHED_BLOCKS, reason=reason)
            num_ready += state == Residency.READY
            num_coming += state != Residency.READY
        return WarmResult(num_ready, num_coming, end)

    def _refusal(self, row: int, reason: str) -> str:
        """Return why a block is not prefetched, or an empty string."""
        size = self._cache.size_of(row)
        is_sure = reason == "announced" or self._cache.slots.num_free(size) > 0
        return "" if is_sure or self._beats_next(row, size) else "worth"

    def _beats_next(self, row: int, size: int) -> bool:
        """Return whether a block is worth more than the next victim of its size."""
        cache = self._cache
        victims = cache.eviction.next_victims(cache.index, cache.slots, size, 1)
        if self._history is None or not len(victims):
            return False
        keys = [cache.index.hash_of(each) for each in (row, int(victims[0]))]
        score, victim_score = self._history.queues.scores(keys)
        return score > victim_score

    def _room_bytes(self) -> int:
        """Return how many more bytes may be prefetched now."""
        rows = np.array([*self._rows], np.int64)
        is_coming = self._cache.index.residency(rows, TierName.CPU) == Residency.WRITING
        self._rows = set(rows[is_coming].tolist())
        held_bytes = sum(self._cache.size_of(row) for row in self._rows)
        return int(self._cache.slots.reserved_bytes * PREFETCH_ARENA_SHARE) - held_bytes

    def _block_bytes(self, key_space: bytes, hashes: bytes) -> int:
        """Return the block size of a key space, 0 if no engine or block of it is known."""
        known = self._block_bytes_of(key_space)
        if known:
            return known
        index = self._cache.index
        rows = index.find(as_keys(hashes))
        rows = rows[rows >= 0]
        return int(index.payload_bytes[rows[0]]) if len(rows) else 0
