"""The scheduler half: what vLLM's scheduler asks and is told, one call after the other.

Rules
-----
* No call waits: questions go to threads, and vLLM asks again in its next step.
* vLLM's blocks under an open store have a reference of ours, so that they are not used again below
  the copy, whatever becomes of their request.
* What is not known here about a request, as what an image or an adapter does to its KV, makes it
  uncached.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvtier.client import Announcement, Client
from kvtier.connectors.vllm.order import LoadOrder, Orders, Results, StoreOrder
from kvtier.connectors.vllm.search import Search
from kvtier.connectors.vllm.steps import Chunk, StepClock
from kvtier.core.cost.sample import EngineLoad
from kvtier.core.identity import BlockHash, chain_root, hash_blocks, tenant_digest
from kvtier.core.residency import TierName
from kvtier.core.traits import Traits

__all__ = ["SchedulerHalf"]

_SEARCHES_MAX = 2
"""Per request: once, and once more where what was held was lost before it was copied."""

_NUM_ASKERS = 4

_OPEN_STORES_MAX = 64
_POOL_SHARE_MAX = 0.25
"""Of vLLM's blocks, under open stores: the others stay for computing."""

_LEASE_LEFT_S = 0.25
"""A hit is named only where its lease lasts that much longer: the copy begins within a step."""


@dataclass(slots=True)
class _Tracked:
    """A request of vLLM's, and what was asked and offered of it."""

    request: Any
    tenant: bytes
    root: BlockHash
    traits: Traits
    hashes: list[BlockHash] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of vLLM."""
    num_offered: int = 0
    num_searches: int = 0
    search: Search | None = None
    loading: Search | None = None

    @property
    def num_left(self) -> int:
        """Return the tokens of its prompt that are not computed yet."""
        return max(0, int(self.request.num_prompt_tokens - self.request.num_computed_tokens))

    def extend(self, block_tokens: int) -> None:
        """Hash the blocks that are full by now."""
        start = len(self.hashes) * block_tokens
        tokens = self.request.all_token_ids
        if len(tokens) - start >= block_tokens:
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes += hash_blocks(parent, list(tokens[start:]), block_tokens)


class SchedulerHalf:
    """Answers for one client, which it closes with itself."""

    def __init__(self, client: Client, key_space: bytes, block_tokens: int, ratio: int) -> None:
        """``ratio`` of vLLM's blocks make one of ours, of ``block_tokens``."""
        self._client = client
        self._key_space = key_space
        self._block_tokens = block_tokens
        self._ratio = ratio
        self._tracked: dict[str, _Tracked] = {}
        self._orders = Orders()
        self._open: dict[int, list[int]] = {}
        self._numbers = count(1)
        self._pool: Any = None
        self._clock = StepClock()
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-lookup")

    @property
    def num_open_stores(self) -> int:
        """Return the stores whose blocks are kept for them."""
        return len(self._open)

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, to keep blocks under a store."""
        self._pool = pool

    # A request's way

    def add(self, request: Any) -> None:
        """Hear of a request, and announce it."""
        if request.lora_request or request.mm_features or request.prompt_embeds is not None:
            return
        tenant = tenant_digest(request.cache_salt)
        tracked = _Tracked(request, tenant, chain_root(self._key_space, tenant), _traits(request))
        tracked.extend(self._block_tokens)
        self._tracked[request.request_id] = tracked
        self._client.announce([Announcement(tracked.traits, tenant, tuple(tracked.hashes), 0)])

    def match(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens beyond ``num_computed`` are held; None: ask again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0
        tracked.extend(self._block_tokens)
        search = tracked.search
        if search is None:
            return None if self._begin(tracked, num_computed) else 0
        if not search.is_over:
            if time.monotonic() < search.began_s + self._client.deadlines.load_s:
                return None
            self._drop(tracked)
            return 0
        if search.tiers and time.monotonic() > search.good_until_s - _LEASE_LEFT_S:
            self._drop(tracked)
            tracked.num_searches -= 1  # it found what it was to find, and vLLM had no room for it
            return None if self._begin(tracked, num_computed) else 0
        end = (search.first + len(search.tiers)) * self._block_tokens
        return max(0, end - num_computed)

    def allocated(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """Take the blocks that vLLM gave a request, and order the load into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        search = tracked.search
        if not num_external or search is None:
            self._drop(tracked)
            return
        end = search.first + len(search.tiers)
        num_before = end * self._block_tokens - num_external
        skipped = num_before * self._ratio // self._block_tokens
        into = tuple(
            tuple(
                blocks[place] if place >= skipped else -1
                for place in range(index * self._ratio, (index + 1) * self._ratio)
            )
            for index in range(search.first, end)
        )
        self._orders.loads.append(
            LoadOrder(
                request.request_id,
                tracked.tenant,
                tuple(tracked.hashes[:end]),
                search.first,
                into,
                good_until_s=search.good_until_s,
            )
        )
        tracked.num_offered = max(tracked.num_offered, end)
        tracked.search, tracked.loading = None, search

    def sources(self, request_id: str) -> list[TierName]:
        """Return which tier each block of a request's load comes from."""
        tracked = self._tracked.get(request_id)
        return list(tracked.loading.tiers) if tracked and tracked.loading else []

    def finish(self, request: Any) -> None:
        """Let go of a request."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._drop(tracked)
        if tracked.loading is not None:  # its copy goes on, into blocks that vLLM keeps for it
            self._release(tracked.loading)
        self._client.announce((), [request.request_id])

    # A step's way

    def offer(self, output: Any) -> None:
        """Order the stores of a step that vLLM has scheduled."""
        for fresh in output.scheduled_new_reqs:
            self._note_blocks(fresh.req_id, fresh.block_ids, is_whole=True)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            is_resumed = request_id in cached.resumed_req_ids
            self._note_blocks(request_id, block_ids, is_whole=is_resumed)
        computed = {fresh.req_id: fresh.num_computed_tokens for fresh in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens
        known = [self._tracked[each] for each in scheduled if each in self._tracked]
        chunks: list[Chunk] = []
        for tracked in known:
            request_id = tracked.request.request_id
            num_new, num_past = scheduled[request_id], computed[request_id]
            chunks.append(Chunk(num_new, num_past, tracked.request.num_prompt_tokens))
            self._offer(tracked, num_past + num_new)
        self._clock.begin(chunks if len(known) == len(scheduled) else (), time.monotonic())

    def take_orders(self) -> Orders:
        """Take what the workers are to do in this step."""
        orders, self._orders = self._orders, Orders()
        return orders

    def note_end(self) -> None:
        """Hear that the oldest step under way is over."""
        step = self._clock.end(time.monotonic())
        if step is not None:
            self._client.note_steps([step], self._load())

    def take(self, results: Results, num_workers: int) -> None:
        """Let go of what all workers are done with."""
        for number in [each for each, done in results.stored.items() if done >= num_workers]:
            blocks = self._open.pop(number, [])
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
        for request_id in results.loaded:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.loading is not None:
                self._release(tracked.loading)
                tracked.loading = None

    def close(self) -> None:
        """End the session."""
        for tracked in self._tracked.values():
            self._drop(tracked)
        self._askers.shutdown(cancel_futures=True)
        self._client.close()

    def _begin(self, tracked: _Tracked, num_computed: int) -> bool:
        """Begin a search where there is something to gain; tell whether one is under way."""
        first = num_computed // self._block_tokens
        end = (tracked.request.num_tokens - 1) // self._block_tokens  # the last token is computed
        most = tracked.traits.max_load_tokens
        is_wanted = first < end and most != 0 and tracked.num_searches < _SEARCHES_MAX
        if not is_wanted or not self._client.is_attached:
            return False
        tracked.num_searches += 1
        hashes = tuple(tracked.hashes[:end])
        search = Search(
            self._client, tracked.tenant, hashes, first, tracked.traits, self._load(tracked)
        )
        tracked.search = search
        self._askers.submit(search.run)
        return True

    def _load(self, but: _Tracked | None = None) -> EngineLoad:
        """Return what vLLM has to do, besides one request."""
        lefts = [tracked.num_left for tracked in self._tracked.values() if tracked is not but]
        return EngineLoad(waiting_tokens=sum(lefts), num_running=lefts.count(0))

    def _drop(self, tracked: _Tracked) -> None:
        search, tracked.search = tracked.search, None
        if search is not None:
            self._release(search)

    def _release(self, search: Search) -> None:
        search.is_unwanted = True
        self._askers.submit(search.release)

    def _note_blocks(self, request_id: str, block_ids: Any, *, is_whole: bool) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        fresh = list(block_ids[0]) if block_ids else []
        tracked.blocks = fresh if is_whole else tracked.blocks + fresh

    def _offer(self, tracked: _Tracked, num_computed: int) -> None:
        """Order the store of the blocks that are full after this step."""
        tracked.extend(self._block_tokens)
        end = min(num_computed // self._block_tokens, len(tracked.hashes))
        most = tracked.traits.max_offload_tokens
        if most is not None:
            end = min(end, most // self._block_tokens)
        first = tracked.num_offered
        num_blocks = (end - first) * self._ratio
        if num_blocks <= 0 or not self._client.is_attached or not self._has_room(num_blocks):
            return
        flat = tracked.blocks[first * self._ratio : end * self._ratio]
        self._pool.touch([self._pool.blocks[block] for block in flat])
        number = next(self._numbers)
        self._open[number] = flat
        blocks = tuple(
            tuple(flat[start : start + self._ratio]) for start in range(0, len(flat), self._ratio)
        )
        self._orders.stores.append(
            StoreOrder(
                number,
                tracked.tenant,
                tuple(tracked.hashes[:end]),
                first,
                blocks,
                tracked.traits,
                tracked.request.num_prompt_tokens // self._block_tokens,
            )
        )
        tracked.num_offered = end

    def _has_room(self, num_blocks: int) -> bool:
        num_held = sum(map(len, self._open.values()))
        most = len(self._pool.blocks) * _POOL_SHARE_MAX
        return len(self._open) < _OPEN_STORES_MAX and num_held + num_blocks <= most


def _traits(request: Any) -> Traits:
    """Return what a client said of a request, as far as it makes sense."""
    params = request.kv_transfer_params or {}
    return Traits(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        max_offload_tokens=_tokens(params.get("max_offload_tokens")),
        max_load_tokens=_tokens(params.get("max_load_tokens")),
    )


def _tokens(value: object) -> int | None:
    """Return a number of tokens that a client gave; what is none counts as not given."""
    return value if type(value) is int and value >= 0 else None
