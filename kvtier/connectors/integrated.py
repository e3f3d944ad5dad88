"""The integrated engine's port to the daemon.

Calls only queue work; a few threads talk to the daemon and copy between the engine's pool and the
arena, so a slow daemon never delays a step. The queues are bounded by what the engine keeps open
(see ``engine.offload`` and ``engine.loader``), and all work ends by the client's deadlines, so
every lookup, load and store gets its final event.

A load from the back and the engine's claims are synchronized by one lock: the port registers a
block before it copies it, and does not touch blocks that the engine has claimed by then.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from kvtier.client import Announcement, Client, LoadedBlock
from kvtier.client.types import plan_timeout_s
from kvtier.connectors.kit.guard import note_fault
from kvtier.core.plan import EngineLoad, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.engine.port import (
    LoadEnded,
    LoadOrder,
    LoadProgress,
    PortChain,
    PortEvent,
    PortLookup,
    StoreEnded,
    StoreOffer,
)
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.observe.daemon_metrics import TransferRoute
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.observe.trace import TRACES

__all__ = ["DaemonPort", "PoolBytes"]

_log = Log("kvtier.engine")

_NUM_ASKERS = 2
"""Lookups have their own threads: they take a millisecond, and loads may take seconds."""

_NUM_READERS = 16
"""Most loads wait for a slow tier, and those from a fast one must not queue behind them."""

_LEFT_MIN_S = 0.025
"""With less time left a load is not started."""


class PoolBytes(Protocol):
    """The engine's blocks as bytes; both methods release the GIL."""

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy a block out."""

    def write_block(self, block: int, source: memoryview) -> None:
        """Copy a block in."""


@dataclass(slots=True)
class _RunningLoad:
    """A running load; its numbers change under the port's lock."""

    order: LoadOrder
    into: Sequence[Sequence[int]]
    deadline_s: float
    num_begun: int = 0
    """Blocks written to, or about to be, in the load's order."""
    num_claimed: int = 0
    is_cancelled: bool = False
    tiers: list[TierName] = field(default_factory=list)
    """The tiers of the blocks in place."""

    def begin(self, index: int) -> str:
        """Register the copy of block ``index``; returns why the load ends here, or ""."""
        place, num_blocks = index - self.order.first, len(self.into)
        if self.is_cancelled:
            return "cancelled"
        if place < self.num_claimed:
            return "met"
        if place != (num_blocks - 1 - self.num_begun if self.order.from_back else self.num_begun):
            return "failed"  # the daemon has lost the last blocks since the lookup
        self.num_begun += 1
        return ""


class DaemonPort:
    """A ``KVPort`` on a ``Client``; ``close`` also closes the client."""

    def __init__(
        self,
        client: Client,
        pool: PoolBytes,
        *,
        block_tokens: int,
        engine_block_bytes: int,
        on_copied: Callable[[TransferRoute, float], object] = lambda _route, _seconds: None,
    ) -> None:
        """``on_copied`` gets the duration of each block's copy, on threads of the port."""
        self.block_tokens = block_tokens
        self._on_copied = on_copied
        self._client = client
        self._pool = pool
        self._engine_block_bytes = engine_block_bytes
        self._events: deque[PortEvent] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._announced: set[str] = set()
        self._loads: dict[str, _RunningLoad] = {}
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._faults = RateLimitedLog(_log)
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-lookup")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kvtier-load")
        self._writer = ThreadPoolExecutor(1, "kvtier-store")

    def bind(self, wake: Callable[[], None]) -> None:
        """Set the callback for new events."""
        self._wake = wake

    def announce(self, chain: PortChain, first: int, traits: RequestTraits) -> None:
        """Queue the announcement, which is sent together with others."""
        self._announced.add(traits.request_id)
        self._client.announce([Announcement(traits, chain.tenant, chain.hashes, first)])

    def finish(self, request_id: str, outcome: PlanOutcome | None) -> None:
        """Queue the outcome, which is sent together with others."""
        if outcome is not None:
            self._client.note_outcome(outcome)
        if request_id in self._announced:
            self._announced.remove(request_id)
            self._client.announce((), [request_id])

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Queue the step durations for the next report."""
        self._client.note_steps(steps, load)

    def lookup(self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad) -> None:
        """Queue a lookup."""
        if not self._client.is_attached:
            self._emit(PortLookup(traits.request_id, (), "daemon_away"))
            return
        self._begin(self._askers, self._lookup, chain, first, traits, load)

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """Queue a load; its timeout starts now."""
        most_s = plan_timeout_s(order.wait_ns, self._client.deadlines.load_s)
        load = _RunningLoad(order, into, time.monotonic() + most_s)
        with self._lock:
            self._loads[order.request_id] = load
        self._begin(self._readers, self._load, load)

    def claim(self, request_id: str, num_computed: int) -> int:
        """Grant the engine the blocks whose copy has not started."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is None:
                return 0  # the load has ended; its last event says how far it got
            most = len(load.into) - load.num_begun
            load.num_claimed = max(load.num_claimed, min(num_computed, most))
            return load.num_claimed

    def store(
        self, chain: PortChain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Queue a store."""
        number = next(self._numbers)
        if self._client.is_attached:
            self._begin(self._writer, self._store, number, chain, first, blocks, offer)
        else:
            self._emit(StoreEnded(number, 0))
        return number

    def cancel(self, request_id: str) -> None:
        """Stop a load at the next block."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is not None:
                load.is_cancelled = True

    def poll(self) -> list[PortEvent]:
        """Return the events since the last call."""
        events: list[PortEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Finish running work and end the session."""
        self._askers.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._client.close()

    def _begin(self, threads: ThreadPoolExecutor, work: Callable[..., None], *of: object) -> None:
        """Run ``work`` on a thread; its exceptions are logged."""
        threads.submit(work, *of).add_done_callback(partial(note_fault, self._faults))

    def _emit(self, event: PortEvent) -> None:
        self._events.append(event)
        self._wake()

    def _lookup(
        self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad
    ) -> None:
        answer = PortLookup(traits.request_id, (), "daemon_away")
        try:
            with TRACES.step("lookup", traits.request_id, asked_blocks=len(chain.hashes) - first):
                found = self._client.lookup(chain.tenant, chain.hashes, first, traits, load)
            answer = PortLookup(
                traits.request_id, found.tiers, found.reason, found.plan, found.max_offload_tokens
            )
        except DaemonUnavailable:
            pass  # already logged; the engine computes
        finally:
            self._emit(answer)

    def _load(self, load: _RunningLoad) -> None:
        end = "failed"
        try:
            with TRACES.step("load", load.order.request_id, decision=load.order.decision) as mark:
                end = self._follow(load)
                mark.set(loaded_blocks=len(load.tiers), end=end)
        except DaemonUnavailable:
            end = "daemon_away"
        finally:
            with self._lock:
                del self._loads[load.order.request_id]
            self._emit(LoadEnded(load.order.request_id, tuple(load.tiers), end))

    def _follow(self, load: _RunningLoad) -> str:
        """Copy blocks as they arrive; returns why there are no more."""
        order = load.order
        left_s = load.deadline_s - time.monotonic()
        if left_s < _LEFT_MIN_S:
            return "late"
        items = self._client.load(
            order.chain.tenant,
            order.chain.hashes[: order.first + len(load.into)],
            order.first,
            decision=order.decision,
            from_back=order.from_back,
            timeout_s=left_s,
        )
        for item in items:
            if not isinstance(item, LoadedBlock):
                return _REASONS.get(item, "failed")
            with self._lock:
                end = load.begin(item.index)
            if end:
                return end
            self._scatter(item.payload, load.into[item.index - order.first])
            if time.monotonic() > item.good_until_s:
                raise DaemonSlow("the lease ran out while copying")
            load.tiers.append(item.tier)
            self._emit(LoadProgress(order.request_id, tuple(load.tiers)))
        return "failed"

    def _store(
        self,
        number: int,
        chain: PortChain,
        first: int,
        blocks: Sequence[Sequence[int]],
        offer: StoreOffer,
    ) -> None:
        def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
            for index, slot in zip(indexes, slots, strict=True):
                self._gather(blocks[index - first], slot)
                yield

        taken = 0
        try:
            with TRACES.step("store", offer.traits.request_id, blocks=len(blocks)) as mark:
                taken = self._client.store(
                    chain.tenant,
                    chain.hashes[: first + len(blocks)],
                    first,
                    fill,
                    traits=offer.traits,
                    num_prompt_blocks=offer.num_prompt_blocks,
                )
                mark.set(taken_blocks=taken)
        except DaemonUnavailable:
            taken = 0  # offered again when a later request has these blocks
        finally:
            self._emit(StoreEnded(number, taken))

    def _gather(self, blocks: Sequence[int], slot: memoryview) -> None:
        size, began_s = self._engine_block_bytes, time.perf_counter()
        for place, block in enumerate(blocks):
            self._pool.read_block(block, slot[place * size : (place + 1) * size])
        self._on_copied(TransferRoute.GPU_TO_CPU, time.perf_counter() - began_s)

    def _scatter(self, payload: memoryview, blocks: Sequence[int]) -> None:
        size, began_s = self._engine_block_bytes, time.perf_counter()
        for place, block in enumerate(blocks):
            self._pool.write_block(block, payload[place * size : (place + 1) * size])
        self._on_copied(TransferRoute.CPU_TO_GPU, time.perf_counter() - began_s)


_REASONS: Mapping[str, str] = {
    "complete": "complete",
    "absent": "failed",
    "late": "late",
    "daemon_away": "daemon_away",
}
"""Maps the daemon's reason for the end of a load to the engine's; all others are ``failed``."""
