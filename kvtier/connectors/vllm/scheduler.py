"""The scheduler half: what vLLM's scheduler asks and is told, one call after the other.

Rules
-----
* No call waits: questions go to threads, and vLLM asks again in its next step.
* A hit is named only where all ranks hold it, from where vLLM's own tokens end.
* vLLM waits for each load that it was promised until a worker reports it, so there is an order for
  each, even if only to report that nothing came.
* vLLM's blocks under an open store have a reference of ours, so that they are not used again below
  the copy, whatever becomes of their request.
* What is not known here about a request, as what an image or an adapter does to its KV, makes it
  uncached.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtier.client import Announcement, Client
from kvtier.connectors.guard import note_fault
from kvtier.connectors.vllm.account import Account
from kvtier.connectors.vllm.chain import Chains
from kvtier.connectors.vllm.clearing import Clearing
from kvtier.connectors.vllm.identity.extra import can_be_named, extra_keys
from kvtier.connectors.vllm.loads import OpenLoads, engine_blocks
from kvtier.connectors.vllm.order import Loaded, LoadOrder, Orders, Results, StoreOrder
from kvtier.connectors.vllm.routers.news import News
from kvtier.connectors.vllm.search import Search
from kvtier.connectors.vllm.settings import Role
from kvtier.connectors.vllm.stats import (
    ATTACHED,
    HIT_TOKENS,
    LOOKUP_SECONDS,
    LOOKUPS,
    Counts,
    Tally,
    split_by_tier,
)
from kvtier.connectors.vllm.steps import Chunk, StepClock
from kvtier.connectors.vllm.stores import OpenStores
from kvtier.connectors.vllm.tracked import Tracked, traits_of
from kvtier.core.cost.sample import EngineLoad
from kvtier.core.identity import tenant_digest
from kvtier.core.residency import TierName
from kvtier.observe.log import Log, Repeated

__all__ = ["Rank", "SchedulerHalf"]

_log = Log("kvtier.vllm")

_SEARCHES_MAX = 2
"""Per request, and anew after a preemption: a second one where the first, or its load, failed."""

_LOST_MAX = 8
"""So often a search whose blocks were lost before vLLM had room for them does not count."""

_OPEN_SEARCHES_MAX = 64
"""Under way or held; those of the others begin when some of these are copied, or are over."""

_TURN_S = 1.0
"""As long as a request waits for its turn to be searched for; then vLLM may compute it."""

_NUM_ASKERS = 16
"""They mostly wait for a slow tier, and what lies in a fast one must not stand behind that."""

_JOIN_S = 5.0
"""A daemon that is there is joined in less, and one that is not does not keep an idle vLLM busy."""

_LEASE_LEFT_S = 0.25
"""A hit is named only where its lease lasts that much longer: the copy begins within a step."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker's key space, and a client of it for the scheduler half."""

    client: Client
    key_space: bytes


class SchedulerHalf:
    """Answers for all ranks, whose clients it closes with itself."""

    def __init__(
        self, ranks: Sequence[Rank], block_tokens: int, ratio: int, role: Role = Role.BOTH
    ) -> None:
        """``ratio`` of vLLM's blocks make one of ours, of ``block_tokens``."""
        self.tally = Tally()
        self.hit_tokens = 0
        """Of prompts, that vLLM had itself; of requests that are over."""
        self.news: News | None = None
        """What routers are told, if any listens to vLLM."""
        self._clients = [rank.client for rank in ranks]
        self._clearing = Clearing(self._clients)
        self._key_spaces = [rank.key_space for rank in ranks]
        self._block_tokens = block_tokens
        self._ratio = ratio
        self._role = role
        self._deadlines = ranks[0].client.deadlines
        self._tracked: dict[str, Tracked] = {}
        self._searches: dict[str, Search] = {}
        self._loads = OpenLoads(len(ranks))
        self._stores = OpenStores(len(ranks))
        self._orders = Orders()
        self._clock = StepClock()
        self._computing_s = -math.inf
        """When a step that computes last began, or ended."""
        self._backlog: EngineLoad | None = None
        self._told_attached: bool | None = None
        """What vLLM's metrics say."""
        self._began_s = time.monotonic()
        self._empty_until_s = 0.0
        """The daemon is known to have nothing, and need not be asked."""
        self._stored_s = 0.0
        """When workers last were done with stores."""
        self._faults = Repeated(_log)
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-lookup")

    @property
    def is_attached(self) -> bool:
        """Tell whether the daemon is there for all ranks."""
        return all(client.is_attached for client in self._clients)

    @property
    def is_joining(self) -> bool:
        """Tell whether vLLM should go on with steps until its metrics tell of a first session."""
        return not self._told_attached and time.monotonic() < self._began_s + _JOIN_S

    @property
    def num_open_stores(self) -> int:
        """Return the stores whose blocks are kept for them."""
        return len(self._stores)

    @property
    def has_pending_stores(self) -> bool:
        """Tell whether vLLM should go on with steps until a store is over.

        Not for ever: what a worker does not report in several times its time, it never will. That
        counts from the last step that computed, since a store begins when its step has ended.
        """
        until_s = self._computing_s + 4 * self._deadlines.store_s
        return len(self._stores) > 0 and time.monotonic() < until_s

    @property
    def frees_blocks_soon(self) -> bool:
        """Tell whether vLLM gains blocks by waiting for a step or two."""
        return self._stores.frees_soon(time.monotonic())

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, to keep blocks under a store."""
        self._stores.bind(pool)

    # A request's way

    def add(self, request: Any, adapter: bytes = b"") -> None:
        """Hear of a request, with what stands for its adapter, and announce it."""
        self.finish(request)  # an earlier one of that name, of whose end nobody said
        if not can_be_named(request) or (request.lora_request and not adapter):
            return
        tenant = tenant_digest(request.cache_salt)
        extra = extra_keys(request, adapter, self._block_tokens)
        chains = Chains(self._key_spaces, tenant, self._block_tokens, extra)
        tracked = Tracked(request, tenant, traits_of(request), chains, Account(time.monotonic()))
        self._extend(tracked)
        self._tracked[request.request_id] = tracked
        if self._role.loads:
            hashes = chains.first(len(chains))
            for client, chain in zip(self._clients, hashes, strict=True):
                client.announce([Announcement(tracked.traits, tenant, chain, 0)])

    def match(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens beyond ``num_computed`` are held; None: ask again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache or not self._role.loads:
            return 0
        tracked.num_local = num_computed
        search = self._searches.get(request.request_id)
        if search is not None and self._is_void(tracked, search, num_computed):
            self._drop(request.request_id)
            search = None
        if search is None:
            return self._begin(tracked, num_computed)
        if not search.is_over:
            return None
        tracked.advised_tokens = search.max_offload_tokens
        if not search.num_blocks:
            if search.began_s > self._stored_s:
                self._empty_until_s = search.empty_until_s
            return 0
        end = (search.first + search.num_blocks) * self._block_tokens
        return max(0, min(end, self._load_end(tracked, num_computed)) - num_computed)

    def allocated(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """Take the blocks that vLLM gave a request, and order the load into them."""
        search = self._searches.pop(request.request_id, None)
        try:
            self._order_load(request.request_id, search, blocks, num_external)
        except Exception:
            if search is not None:
                search.release()
            if num_external:
                tracked = self._tracked.get(request.request_id)
                num_local = tracked.num_local if tracked else 0  # shared with others, and good
                fresh = blocks[num_local * self._ratio // self._block_tokens :]
                nothing = LoadOrder(request.request_id, b"", (), 0, (tuple(fresh),))
                self._orders.loads.append(nothing)
            raise

    def sources(self, request_id: str, num_external: int) -> Mapping[TierName, int]:
        """Return from which tiers the tokens of a request's load come."""
        return split_by_tier(self._loads.tiers(request_id), num_external, self._block_tokens)

    def finish(self, request: Any) -> None:
        """Let go of a request."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self.hit_tokens += min(tracked.num_local, int(tracked.request.num_prompt_tokens))
        self._drop(request.request_id)
        self._loads.forget(request.request_id)  # its copy goes on, into blocks that vLLM keeps
        self._tell_outcomes(tracked, time.monotonic())
        if tracked.traits.request_id:
            for client in self._clients:
                client.announce((), [tracked.traits.request_id])

    def reset(self) -> None:
        """Have all blocks of before forgotten; until they are, none is found and none offered."""
        self._clearing.promise()
        for tracked in self._tracked.values():
            tracked.is_old = True
        for request_id in list(self._searches):
            self._drop(request_id)
        self._clearing.begin(is_quiet=not len(self._stores))
        if self.news is not None:
            self.news.forget_tiers()

    # A step's way

    def offer(self, output: Any) -> None:
        """Order the stores of a step that vLLM has scheduled."""
        now_s = time.monotonic()
        self._clearing.step(self._begin_asking, is_quiet=not len(self._stores))
        computed = self._note_blocks(output)
        chunks: list[Chunk] = []
        for request_id, num_new in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            num_past, num_prompt = computed[request_id], tracked.request.num_prompt_tokens
            chunks.append(Chunk(request_id, num_new, num_past, num_prompt))
            tracked.account.note_chunk(max(0, min(num_new, num_prompt - num_past)), now_s)
            if self._role.stores and self.is_attached and not self._clearing.is_due:
                self._offer(tracked, num_past + num_new, now_s)
        if num_scheduled := len(output.num_scheduled_tokens):
            known = chunks if len(chunks) == num_scheduled else ()
            self._computing_s = now_s
            self._orders.step = self._clock.begin(known, now_s)

    def take_orders(self) -> Orders:
        """Take what the workers are to do in this step."""
        orders, self._orders = self._orders, Orders()
        self._backlog = None
        return orders

    def take(self, results: Results) -> None:
        """Take what workers are done with."""
        now_s = time.monotonic()
        with ExitStack() as parts:  # each is done, also where another one fails
            parts.callback(self._end_step, results.step, now_s)
            for request_id, loaded in results.loaded.items():
                parts.callback(self._note_loaded, request_id, loaded, now_s)
            parts.callback(self._note_stored, results.stored, now_s)

    def take_counts(self) -> Counts:
        """Take what was counted since the last call, and whether there is a session now."""
        if self._told_attached is not (is_attached := self.is_attached):
            self._told_attached = is_attached
            self.tally.add(ATTACHED, is_attached)
        return self.tally.take()

    def close(self) -> None:
        """End the sessions."""
        for request_id in list(self._searches):
            self._drop(request_id)
        self._askers.shutdown(wait=False, cancel_futures=True)  # they end as their clients do
        for client in self._clients:
            client.close()

    def _extend(self, tracked: Tracked) -> None:
        """Hash the blocks of a request that are full by now, and know them for routers."""
        tracked.extend()
        if self.news is not None:
            self.news.follow(tracked)

    # Searches and loads

    def _load_end(self, tracked: Tracked, num_computed: int) -> int:
        """Return up to which token a request may be loaded: not the last one, that is computed."""
        most = tracked.traits.max_load_tokens
        end = int(tracked.request.num_tokens) - 1
        end = end if most is None else min(end, num_computed + most)
        return end // self._block_tokens * self._block_tokens

    def _is_void(self, tracked: Tracked, search: Search, num_computed: int) -> bool:
        """Tell whether a search says nothing any more, and a new one may begin."""
        now_s = time.monotonic()
        if not search.is_over:
            return now_s > search.began_s + self._deadlines.lookup_s + self._deadlines.load_s
        # vLLM has lost blocks of its own meanwhile, and those would lie before what is held.
        is_behind = num_computed // self._block_tokens < search.first
        is_lost = search.num_blocks > 0 and now_s > search.good_until_s - _LEASE_LEFT_S
        if search.num_blocks and (is_behind or is_lost) and tracked.num_lost < _LOST_MAX:
            tracked.num_lost += 1
            tracked.num_searches -= 1  # it found what it was to find, and waited for room too long
        return is_behind or is_lost

    def _begin(self, tracked: Tracked, num_computed: int) -> int | None:
        """Begin a search where there is something to gain, and say whether to wait for it."""
        self._extend(tracked)
        if tracked.request.num_preemptions > tracked.num_preemptions:
            tracked.num_preemptions = tracked.request.num_preemptions
            tracked.num_searches = 0
        first = num_computed // self._block_tokens
        end = self._load_end(tracked, num_computed) // self._block_tokens
        if first >= end or tracked.num_searches >= _SEARCHES_MAX or not self.is_attached:
            return 0
        if self._clearing.is_due:
            return 0
        if not len(self._stores) and time.monotonic() < self._empty_until_s:
            self.tally.add(LOOKUPS, not tracked.was_empty, "empty")  # once, however long it waits
            tracked.was_empty = True
            return 0
        if len(self._searches) >= _OPEN_SEARCHES_MAX:
            now_s = time.monotonic()
            tracked.waits_since_s = tracked.waits_since_s or now_s
            return None if now_s < tracked.waits_since_s + _TURN_S else 0
        tracked.waits_since_s = None
        tracked.num_searches += 1
        search = Search(
            self._clients,
            tracked.tenant,
            tracked.chains.first(end),
            first,
            tracked.traits,
            self._load(tracked),
            tracked.traceparent,
        )
        self._searches[tracked.request.request_id] = search
        self._begin_asking(self._ask, search)
        return None

    def _begin_asking(self, ask: Callable[..., None], *of: object) -> None:
        self._askers.submit(ask, *of).add_done_callback(partial(note_fault, self._faults))

    def _ask(self, search: Search) -> None:
        search.run()
        outcome = "failed" if search.has_failed else "hit" if search.num_blocks else "miss"
        self.tally.add(LOOKUPS, label=outcome)
        self.tally.add(LOOKUP_SECONDS, search.took_s)

    def _drop(self, request_id: str) -> None:
        search = self._searches.pop(request_id, None)
        if search is not None:
            search.release()

    def _order_load(
        self, request_id: str, search: Search | None, blocks: Sequence[int], num_external: int
    ) -> None:
        tracked = self._tracked.get(request_id)
        if search is not None and search.is_over and tracked is not None:
            tracked.answer = search
        if not num_external:
            if search is not None:
                search.release()
            return
        assert search is not None, "vLLM loads what it was told of"
        assert tracked is not None
        engine_tokens = self._block_tokens // self._ratio
        end = tracked.num_local + num_external
        wanted = range(tracked.num_local // engine_tokens, end // engine_tokens)
        into = engine_blocks(blocks, wanted, search.first, self._ratio)
        order = LoadOrder(
            request_id,
            tracked.tenant,
            tracked.chains.first(search.first + len(into)),
            search.first,
            into,
            tuple(search.decisions),
            search.good_until_s,
            tracked.traceparent,
        )
        self._loads.open(request_id, search, len(into), time.monotonic())
        tracked.num_offered = max(tracked.num_offered, search.first + len(into))
        for tier, num_tokens in self.sources(request_id, num_external).items():
            self.tally.add(HIT_TOKENS, num_tokens, tier.value)
        self._orders.loads.append(order)

    def _note_loaded(self, request_id: str, loaded: Loaded, now_s: float) -> None:
        ended = self._loads.note_loaded(request_id, loaded, now_s)
        tracked = self._tracked.get(request_id)
        if ended is None or tracked is None:
            return
        tracked.account.num_restored = ended.num_filled
        tracked.account.restore_s = ended.seconds
        if ended.num_filled < ended.num_blocks:  # these it computes, and may offer
            tracked.num_offered = min(tracked.num_offered, ended.first + ended.num_filled)

    # Stores and steps

    def _note_blocks(self, output: Any) -> Mapping[str, int]:
        """Take the blocks that vLLM gave out in a step; return what its requests have computed."""
        computed: dict[str, int] = {}
        for fresh in output.scheduled_new_reqs:
            computed[fresh.req_id] = fresh.num_computed_tokens
            if tracked := self._tracked.get(fresh.req_id):
                tracked.note_blocks(fresh.block_ids[0], is_whole=True)
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids and (tracked := self._tracked.get(request_id)):
                is_whole = request_id in cached.resumed_req_ids
                tracked.note_blocks(block_ids[0], is_whole=is_whole)
        return computed

    def _offer(self, tracked: Tracked, num_computed: int, now_s: float) -> None:
        """Order the store of the blocks that are full after this step."""
        self._extend(tracked)
        end = min(num_computed // self._block_tokens, len(tracked.chains))
        if tracked.offload_tokens is not None:
            end = min(end, tracked.offload_tokens // self._block_tokens)
        first, ratio = tracked.num_offered, self._ratio
        if end <= first:  # as in nearly all steps
            return
        end = min(end, first + self._stores.room() // ratio)  # the others with a later step
        flat = tracked.blocks[first * ratio : end * ratio]
        if end <= first or tracked.is_old or len(flat) < (end - first) * ratio:
            return
        blocks = tuple(tuple(flat[at : at + ratio]) for at in range(0, len(flat), ratio))
        chains = tracked.chains.first(end)
        num_prompt_blocks = tracked.request.num_prompt_tokens // self._block_tokens
        order = StoreOrder(
            self._stores.open(flat, now_s),
            tracked.tenant,
            chains,
            first,
            blocks,
            tracked.traits,
            num_prompt_blocks,
            tracked.traceparent,
        )
        self._orders.stores.append(order)
        tracked.num_offered = end

    def _note_stored(self, stored: Mapping[int, int], now_s: float) -> None:
        self._stores.note_done(stored)
        if stored:
            self._stored_s, self._empty_until_s = now_s, 0.0

    def _end_step(self, number: int, now_s: float) -> None:
        if number:
            self._computing_s = now_s
        step = self._clock.end(number, now_s)
        if step is None:
            return
        for client in self._clients:
            client.note_steps([step.sample()], self._load())
        for chunk in step.chunks:
            if tracked := self._tracked.get(chunk.request_id):
                if not chunk.is_decode:
                    tracked.account.compute_s += step.share_s(chunk)
                self._tell_outcomes(tracked, now_s)

    def _tell_outcomes(self, tracked: Tracked, now_s: float) -> None:
        for client, outcome in zip(self._clients, tracked.take_outcomes(now_s), strict=False):
            if outcome is not None:
                client.note_outcome(outcome)

    def _load(self, but: Tracked | None = None) -> EngineLoad:
        """Return what vLLM has to do, besides one request; what it had when the step began."""
        if self._backlog is None:
            lefts = [tracked.num_left for tracked in self._tracked.values()]
            self._backlog = EngineLoad(sum(lefts), lefts.count(0))
        if but is None:
            return self._backlog
        left = self._backlog.waiting_tokens - but.num_left
        return EngineLoad(max(0, left), self._backlog.num_running)
