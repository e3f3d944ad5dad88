"""The integrated engine's port to the daemon.

Calls only queue work; a few threads talk to the daemon and copy between the engine's pool and the
arena, so a slow daemon never holds up a step. Queues are bounded by what the engine keeps open
(see ``engine.offload`` and ``engine.loader``), and each piece of work ends by the client's
deadlines, so every lookup, load and store gets its ending event.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Protocol

from kvtier.client import Client, LoadedBlock
from kvtier.core.cost.sample import EngineLoad, StepSample
from kvtier.core.plan import Outcome
from kvtier.core.residency import TierName
from kvtier.core.traits import Traits
from kvtier.engine.port import (
    Chain,
    Found,
    Loaded,
    LoadEnded,
    LoadOrder,
    PortEvent,
    Stored,
    StoreOffer,
)
from kvtier.errors import DaemonUnavailable

__all__ = ["DaemonPort", "PoolBytes"]

_NUM_READERS = 2
"""Two loads at once: one copies while the other waits for the SSD. More would share one bus."""


class PoolBytes(Protocol):
    """The engine's blocks as bytes; both copies release the GIL."""

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy a block out."""

    def write_block(self, block: int, source: memoryview) -> None:
        """Copy a block in."""


class DaemonPort:
    """A ``KVPort`` over a ``Client``, which it closes with itself."""

    def __init__(
        self, client: Client, pool: PoolBytes, *, block_tokens: int, engine_block_bytes: int
    ) -> None:
        self.block_tokens = block_tokens
        self._client = client
        self._pool = pool
        self._engine_block_bytes = engine_block_bytes
        self._events: deque[PortEvent] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._cancelled: set[str] = set()
        self._active: set[str] = set()
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kvtier-load")
        self._writer = ThreadPoolExecutor(1, "kvtier-store")

    def bind(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever there is an event."""
        self._wake = wake

    def announce(self, chain: Chain, first: int, traits: Traits) -> None:
        """Tell nobody yet."""

    def meet(self, request_id: str, num_computed: int) -> None:
        """Tell nobody yet."""

    def finish(self, request_id: str, outcome: Outcome | None) -> None:
        """Tell nobody yet."""

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Tell nobody yet."""

    def lookup(self, chain: Chain, first: int, traits: Traits, load: EngineLoad) -> None:
        """Queue a lookup."""
        request_id = traits.request_id
        if not self._client.is_attached:
            self._emit(Found(request_id, (), "daemon_away"))
            return
        self._readers.submit(self._lookup, request_id, chain, first)

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """Queue a load."""
        request_id, chain, first = order.request_id, order.chain, order.first
        with self._lock:
            self._active.add(request_id)
        self._readers.submit(self._load, request_id, chain, first, into)

    def store(
        self, chain: Chain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Queue a store."""
        number = next(self._numbers)
        if self._client.is_attached:
            self._writer.submit(self._store, number, chain, first, blocks)
        else:
            self._emit(Stored(number, 0))
        return number

    def cancel(self, request_id: str) -> None:
        """Stop a load at the next block."""
        with self._lock:
            if request_id in self._active:
                self._cancelled.add(request_id)

    def poll(self) -> list[PortEvent]:
        """Take the events so far."""
        events: list[PortEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Finish what is under way and end the session."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._client.close()

    def _emit(self, event: PortEvent) -> None:
        self._events.append(event)
        self._wake()

    def _lookup(self, request_id: str, chain: Chain, first: int) -> None:
        try:
            tiers, reason = self._client.lookup(chain.tenant, chain.hashes, first)
        except DaemonUnavailable:
            tiers, reason = (), "daemon_away"
        self._emit(Found(request_id, tiers, reason))

    def _load(
        self, request_id: str, chain: Chain, first: int, into: Sequence[Sequence[int]]
    ) -> None:
        tiers: list[TierName] = []
        hashes = chain.hashes[: first + len(into)]
        end = "failed"
        try:
            num_proven = 0
            for item in self._client.load(chain.tenant, hashes, first):
                # That this item came proves the lease of the block before it: now it may be used.
                if len(tiers) > num_proven:
                    num_proven = len(tiers)
                    self._emit(Loaded(request_id, num_proven))
                if request_id in self._cancelled:
                    end = "cancelled"
                    break
                if isinstance(item, LoadedBlock):
                    self._scatter(item.payload, into[item.index - first])
                    tiers.append(item.tier)
                else:
                    end = _REASONS.get(item, "failed")
        except DaemonUnavailable:
            # The last copy may have outlived its lease.
            tiers, end = tiers[:num_proven], "daemon_away"
        finally:
            with self._lock:
                self._active.discard(request_id)
                self._cancelled.discard(request_id)
            if end == "cancelled":
                tiers = tiers[:num_proven]
            self._emit(LoadEnded(request_id, tuple(tiers), end))

    def _store(
        self, number: int, chain: Chain, first: int, blocks: Sequence[Sequence[int]]
    ) -> None:
        hashes = chain.hashes[: first + len(blocks)]

        def copy(index: int, slot: memoryview) -> None:
            self._gather(blocks[index - first], slot)

        taken = 0
        try:
            taken = self._client.store(chain.tenant, hashes, first, copy)
        except DaemonUnavailable:
            taken = 0  # offered again when a later request has these blocks
        finally:
            self._emit(Stored(number, taken))

    def _gather(self, blocks: Sequence[int], slot: memoryview) -> None:
        size = self._engine_block_bytes
        for place, block in enumerate(blocks):
            self._pool.read_block(block, slot[place * size : (place + 1) * size])

    def _scatter(self, payload: memoryview, blocks: Sequence[int]) -> None:
        size = self._engine_block_bytes
        for place, block in enumerate(blocks):
            self._pool.write_block(block, payload[place * size : (place + 1) * size])


_REASONS: Mapping[str, str] = {
    "complete": "complete",
    "absent": "failed",
    "late": "late",
    "daemon_away": "daemon_away",
}
"""How a load's end is said to the engine; what is not here is a failure."""
