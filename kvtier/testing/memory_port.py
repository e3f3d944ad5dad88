"""A KV port that stores blocks in a dictionary, with a script for its faults.

It implements the port's contract strictly: blocks beyond the reported ones are filled with garbage,
and nothing happens before ``poll`` unless the test wants it. With ``is_manual`` every operation
waits for ``finish_*``, in any order.

A load from the back receives blocks by ``report_loaded``, and blocks that the engine claims are no
longer written. Unless the port is manual, the engine may first claim ``meets_max`` times, so that
both have something to do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import BlockHash
from kvtier.core.plan import EngineLoad, PlanOutcome, RestorePlan, StepSample
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

__all__ = ["LoadScript", "MemoryPort", "PoolBlocks"]


class PoolBlocks(Protocol):
    """The pool, as a port sees it."""

    def block_bytes(self, block: int) -> npt.NDArray[np.uint8]:
        """Return the writable bytes of a block."""


@dataclass(frozen=True, slots=True)
class LoadScript:
    """How the next loads end: after at most ``num_blocks`` blocks, with ``reason``."""

    num_blocks: int | None = None
    reason: str = "failed"
    is_reported_early: bool = False
    """``LoadProgress`` comes before ``LoadEnded``."""


@dataclass(slots=True)
class _OpenLoad:
    order: LoadOrder
    into: list[list[int]]
    num_claimed: int = 0
    num_filled: int = 0
    """Blocks of the load in place, in its order."""
    num_meets: int = 0

    @property
    def num_left(self) -> int:
        """Return the number of blocks neither in place nor claimed."""
        return len(self.into) - self.num_claimed - self.num_filled

    def place(self, number: int) -> int:
        """Return the position of the block that comes after ``number`` others."""
        return len(self.into) - 1 - number if self.order.from_back else number

    def hash_at(self, place: int) -> BlockHash:
        """Return the hash of the block at a position."""
        return self.order.chain.hashes[self.order.first + place]


@dataclass(slots=True)
class _OpenStore:
    chain: PortChain
    first: int
    blocks: list[list[int]]


def _no_plan(_found: PortLookup) -> RestorePlan | None:
    return None


@dataclass(slots=True)
class MemoryPort:
    """Stores whole blocks by hash and restores them as scripted."""

    block_tokens: int = 64
    tier: TierName = TierName.CPU
    is_manual: bool = False
    script: LoadScript = field(default_factory=LoadScript)
    kept: dict[BlockHash, bytes] = field(default_factory=dict)
    tiers: dict[BlockHash, TierName] = field(default_factory=dict)
    """Tier of a block, if not ``tier``."""
    stores_taken_max: int | None = None
    """Maximum number of blocks taken per store; None: all."""
    pool: PoolBlocks | None = None
    make_plan: Callable[[PortLookup], RestorePlan | None] = _no_plan
    """Returns the plan of a lookup from its result."""
    max_offload_tokens: int | None = None
    """Offload limit returned by lookups."""
    meets_max: int = 1
    """A load from the back ends by itself after this many claims of the engine."""
    num_lookups: int = 0
    stored_hashes: list[BlockHash] = field(default_factory=list)
    """Every hash offered, in order, with repetitions."""
    announced: dict[str, tuple[PortChain, int, RequestTraits]] = field(default_factory=dict)
    finished: dict[str, PlanOutcome | None] = field(default_factory=dict)
    offers: list[StoreOffer] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    waiting: dict[str, EngineLoad] = field(default_factory=dict)
    """Load of the engine before each lookup, by request."""
    steps: list[StepSample] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    open_lookups: dict[str, PortLookup] = field(default_factory=dict)
    open_loads: dict[str, _OpenLoad] = field(default_factory=dict)
    open_stores: dict[int, _OpenStore] = field(default_factory=dict)
    is_closed: bool = False
    _events: list[PortEvent] = field(default_factory=list)
    _num_stores: int = 0
    _wake: Callable[[], None] | None = None

    def bind(self, wake: Callable[[], None]) -> None:
        """Set the callback for the end of manual operations."""
        self._wake = wake

    def announce(self, chain: PortChain, first: int, traits: RequestTraits) -> None:
        """Record the announcement."""
        assert traits.request_id not in self.announced, "a request is announced once"
        assert chain.hashes, "an announced request has blocks"
        self.announced[traits.request_id] = (chain, first, traits)

    def claim(self, request_id: str, num_computed: int) -> int:
        """Grant the engine the blocks that are not in place yet."""
        load = self.open_loads.get(request_id)
        if load is None:
            return 0
        assert load.order.from_back, "only a load from the back is met"
        most = len(load.into) - load.num_filled
        load.num_claimed = max(load.num_claimed, min(num_computed, most))
        load.num_meets += 1
        if not self.is_manual and (load.num_meets >= self.meets_max or not load.num_left):
            self.finish_load(request_id)
        return load.num_claimed

    def finish(self, request_id: str, outcome: PlanOutcome | None) -> None:
        """Record the outcome."""
        assert request_id not in self.finished, "a request is finished once"
        self.finished[request_id] = outcome

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Record the steps."""
        self.steps += steps

    def lookup(self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad) -> None:
        """Answer with the leading blocks that are stored."""
        request_id = traits.request_id
        assert request_id not in self.open_lookups, "one lookup at a time for a request"
        assert first < len(chain.hashes), "a lookup asks for something"
        self.num_lookups += 1
        tiers: list[TierName] = []
        for block_hash in chain.hashes[first:]:
            if block_hash not in self.kept:
                break
            tiers.append(self.tiers.get(block_hash, self.tier))
        is_complete = len(tiers) == len(chain.hashes) - first
        reason = "complete" if is_complete else "absent"
        self.waiting[request_id] = load
        found = PortLookup(
            request_id, tuple(tiers), reason, max_offload_tokens=self.max_offload_tokens
        )
        self.open_lookups[request_id] = replace(found, plan=self.make_plan(found))
        if not self.is_manual:
            self.finish_lookup(request_id)

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """Start filling blocks; all of them are garbage from now on."""
        request_id = order.request_id
        assert request_id not in self.open_loads, "one load at a time for a request"
        assert into, "a load asks for something"
        self.loads.append(order)
        self.open_loads[request_id] = _OpenLoad(order, [list(blocks) for blocks in into])
        self._fill_garbage(into)
        if not self.is_manual and not (order.from_back and self.meets_max):
            self.finish_load(request_id)

    def store(
        self, chain: PortChain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Start taking blocks; their bytes are read when the store finishes."""
        assert len(chain.hashes) == first + len(blocks), "a chain ends with what is offered"
        self._num_stores += 1
        self.offers.append(offer)
        self.stored_hashes += chain.hashes[first:]
        groups = [list(group) for group in blocks]
        self.open_stores[self._num_stores] = _OpenStore(chain, first, groups)
        if not self.is_manual:
            self.finish_store(self._num_stores)
        return self._num_stores

    def cancel(self, request_id: str) -> None:
        """Record the cancellation; the operation still ends as scripted."""
        self.cancelled.append(request_id)

    def poll(self) -> list[PortEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Stop accessing the pool."""
        self.is_closed = True
        self.open_loads.clear()
        self.open_stores.clear()

    # For the script

    def finish_lookup(self, request_id: str) -> None:
        """End a lookup with what was found when it began."""
        self._emit(self.open_lookups.pop(request_id))

    def copy_loaded(self, request_id: str, num_blocks: int) -> None:
        """Put the next blocks of an open load in place, ``num_blocks`` in all, silently."""
        self._fill(self.open_loads[request_id], num_blocks)

    def report_loaded(self, request_id: str, num_blocks: int) -> None:
        """Put the next blocks of an open load in place, ``num_blocks`` in all, and say so."""
        load = self.open_loads[request_id]
        self._fill(load, num_blocks)
        self._emit(LoadProgress(request_id, self._tiers(load)))

    def finish_load(self, request_id: str, script: LoadScript | None = None) -> None:
        """End a load as scripted."""
        script = script or self.script
        load = self.open_loads[request_id]
        num_asked = len(load.into)
        self._fill(load, num_asked if script.num_blocks is None else script.num_blocks)
        if script.is_reported_early:
            self._emit(LoadProgress(request_id, self._tiers(load)))
        del self.open_loads[request_id]
        reason = "complete" if load.num_filled == num_asked else script.reason
        if load.num_claimed and not load.num_left:
            reason = "met"
        self._emit(LoadEnded(request_id, self._tiers(load), reason))

    def finish_store(self, store_id: int) -> None:
        """End a store: read its blocks now and keep them."""
        store = self.open_stores.pop(store_id)
        most = len(store.blocks) if self.stores_taken_max is None else self.stores_taken_max
        for offset, group in enumerate(store.blocks[:most]):
            content = b"".join(self._view(block).tobytes() for block in group)
            self.kept[store.chain.hashes[store.first + offset]] = content
        self._emit(StoreEnded(store_id, min(most, len(store.blocks))))

    def finish_all(self) -> None:
        """End all open operations."""
        for request_id in list(self.open_lookups):
            self.finish_lookup(request_id)
        for request_id in list(self.open_loads):
            self.finish_load(request_id)
        for store_id in list(self.open_stores):
            self.finish_store(store_id)

    def _view(self, block: int) -> npt.NDArray[np.uint8]:
        assert self.pool is not None, "the port needs a pool"
        return self.pool.block_bytes(block)

    def _tiers(self, load: _OpenLoad) -> tuple[TierName, ...]:
        hashes = [load.hash_at(load.place(number)) for number in range(load.num_filled)]
        return tuple(self.tiers.get(block_hash, self.tier) for block_hash in hashes)

    def _fill(self, load: _OpenLoad, most: int) -> None:
        """Copy at most ``most`` blocks in all into place, until one is missing or claimed."""
        most = min(most, len(load.into) - load.num_claimed)
        while load.num_filled < most:
            place = load.place(load.num_filled)
            content = self.kept.get(load.hash_at(place))
            if content is None:
                return
            group = load.into[place]
            parts = np.frombuffer(content, dtype=np.uint8).reshape(len(group), -1)
            for block, part in zip(group, parts, strict=True):
                self._view(block)[:] = part
            load.num_filled += 1

    def _fill_garbage(self, into: Sequence[Sequence[int]]) -> None:
        for group in into:
            for block in group:
                self._view(block)[:] = 0xFF  # NaN in every float dtype

    def _emit(self, event: PortEvent) -> None:
        self._events.append(event)
        if self._wake is not None:
            self._wake()
