"""The scheduler half: what vLLM's scheduler asks and is told, one call after the other.

Rules
-----
* No call waits: questions go to threads, and vLLM asks again in its next step.
* A hit is named only where all ranks hold it, from where vLLM's own tokens end.
* vLLM waits for each load that it was promised until a worker reports it, so there is an order for
  each, even if only to report that nothing came.
* What is not known here about a request, as what an image or an adapter does to its KV, makes it
  uncached.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvtier.client import Announcement, Client
from kvtier.connectors.kit.chains import RankChains
from kvtier.connectors.vllm.block_identity import can_be_named, extra_keys
from kvtier.connectors.vllm.engine_state import Backlog, StepChunk, StepClock
from kvtier.connectors.vllm.jobs import StepJobs, StepResults
from kvtier.connectors.vllm.open_lookups import OpenLookups
from kvtier.connectors.vllm.open_transfers import OpenLoads, OpenStores
from kvtier.connectors.vllm.prefix_lookup import PrefixLookup
from kvtier.connectors.vllm.request import RequestTimes, TrackedRequest, note_blocks
from kvtier.connectors.vllm.reset import CacheReset
from kvtier.connectors.vllm.router_feed import RouterFeed
from kvtier.connectors.vllm.stats import ATTACHED, HIT_TOKENS, Counts, StatCounters, split_by_tier
from kvtier.connectors.vllm_common.settings import Role, traits_of
from kvtier.core.identity import tenant_digest
from kvtier.core.residency import TierName

__all__ = ["Rank", "SchedulerHalf"]

_JOIN_S = 5.0
"""A daemon that is there is joined in less, and one that is not does not keep an idle vLLM busy."""


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
        self.tally = StatCounters()
        self.hit_tokens = 0
        """Of prompts, that vLLM had itself; of requests that are over."""
        self.news: RouterFeed | None = None
        """What routers are told, if any listens to vLLM."""
        self._clients = [rank.client for rank in ranks]
        self._clearing = CacheReset(self._clients)
        self._key_spaces = [rank.key_space for rank in ranks]
        self._block_tokens = block_tokens
        self._role = role
        self._deadlines = ranks[0].client.deadlines
        self._tracked: dict[str, TrackedRequest] = {}
        self._backlog = Backlog(self._tracked)
        self._searches = OpenLookups(self._clients, block_tokens, self._backlog, self.tally)
        self._loads = OpenLoads(len(ranks), block_tokens, ratio)
        self._stores = OpenStores(len(ranks), block_tokens, ratio)
        self._orders = StepJobs()
        self._clock = StepClock()
        self._told_attached: bool | None = None
        """What vLLM's metrics say."""
        self._began_s = time.monotonic()

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
        until_s = self._clock.computing_s + 4 * self._deadlines.store_s
        return len(self._stores) > 0 and time.monotonic() < until_s

    @property
    def frees_blocks_soon(self) -> bool:
        """Tell whether vLLM gains blocks by waiting for a step or two."""
        return self._stores.frees_soon(time.monotonic())

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, to keep blocks under a store."""
        self._stores.bind(pool)

    def start(self) -> None:
        """Begin the sessions, none of which is waited for."""
        for client in self._clients:
            client.start()

    # A request's way

    def add(self, request: Any, adapter: bytes = b"") -> None:
        """Hear of a request, with what stands for its adapter, and announce it."""
        self.finish(request)  # an earlier one of that name, of whose end nobody said
        if not can_be_named(request) or (request.lora_request and not adapter):
            return
        tenant = tenant_digest(request.cache_salt)
        extra = extra_keys(request, adapter, self._block_tokens)
        chains = RankChains(self._key_spaces, tenant, self._block_tokens, extra)
        tracked = TrackedRequest(
            request, tenant, traits_of(request), chains, RequestTimes(time.monotonic())
        )
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
        search = self._searches.find(tracked, num_computed)
        if search is not None:
            return self._searches.answer(tracked, search, num_computed)
        self._extend(tracked)
        if self._clearing.is_due or not self.is_attached:
            return 0
        return self._searches.begin(tracked, num_computed, is_quiet=not len(self._stores))

    def allocated(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """Take the blocks that vLLM gave a request, and order the load into them."""
        tracked = self._tracked.get(request.request_id)
        search = self._searches.take(request.request_id)
        try:
            self._order_load(tracked, search, blocks, num_external)
        except Exception:
            if search is not None:
                search.release()
            if num_external:
                num_local = tracked.num_local if tracked else 0
                nothing = self._loads.order_nothing(request.request_id, blocks, num_local)
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
        self._searches.drop(request.request_id)
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
        self._searches.drop_all()
        self._clearing.begin(is_quiet=not len(self._stores))
        if self.news is not None:
            self.news.forget_tiers()

    # A step's way

    def offer(self, output: Any) -> None:
        """Order the stores of a step that vLLM has scheduled."""
        now_s = time.monotonic()
        self._clearing.step(self._searches.submit, is_quiet=not len(self._stores))
        computed = note_blocks(self._tracked, output)
        chunks: list[StepChunk] = []
        for request_id, num_new in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            num_past, num_prompt = computed[request_id], tracked.request.num_prompt_tokens
            chunks.append(StepChunk(request_id, num_new, num_past, num_prompt))
            tracked.account.note_chunk(max(0, min(num_new, num_prompt - num_past)), now_s)
            if self._role.stores and self.is_attached and not self._clearing.is_due:
                self._extend(tracked)
                if order := self._stores.order(tracked, num_past + num_new, now_s):
                    self._orders.stores.append(order)
        if num_scheduled := len(output.num_scheduled_tokens):
            known = chunks if len(chunks) == num_scheduled else ()
            self._orders.step = self._clock.begin(known, now_s)

    def take_orders(self) -> StepJobs:
        """Take what the workers are to do in this step."""
        orders, self._orders = self._orders, StepJobs()
        self._backlog.end_step()
        return orders

    def take(self, results: StepResults) -> None:
        """Take what workers are done with."""
        now_s = time.monotonic()
        with ExitStack() as parts:  # each is done, also where another one fails
            parts.callback(self._end_step, results.step, now_s)
            for request_id, loaded in results.loaded.items():
                parts.callback(self._loads.note_loaded, request_id, loaded, now_s)
            parts.callback(self._note_stored, results.stored, now_s)

    def take_counts(self) -> Counts:
        """Take what was counted since the last call, and whether there is a session now."""
        if self._told_attached is not (is_attached := self.is_attached):
            self._told_attached = is_attached
            self.tally.add(ATTACHED, is_attached)
        return self.tally.take()

    def close(self) -> None:
        """End the sessions."""
        self._searches.close()
        for client in self._clients:
            client.close()

    def _extend(self, tracked: TrackedRequest) -> None:
        """Hash the blocks of a request that are full by now, and know them for routers."""
        tracked.extend()
        if self.news is not None:
            self.news.follow(tracked)

    def _order_load(
        self,
        tracked: TrackedRequest | None,
        search: PrefixLookup | None,
        blocks: Sequence[int],
        num_external: int,
    ) -> None:
        if search is not None and search.is_over and tracked is not None:
            tracked.answer = search
        if not num_external:
            if search is not None:
                search.release()
            return
        assert search is not None, "vLLM loads what it was told of"
        assert tracked is not None
        order = self._loads.order(tracked, search, blocks, num_external, time.monotonic())
        for tier, num_tokens in self.sources(order.request_id, num_external).items():
            self.tally.add(HIT_TOKENS, num_tokens, tier.value)
        self._orders.loads.append(order)

    def _note_stored(self, stored: Mapping[int, int], now_s: float) -> None:
        self._stores.note_done(stored)
        if stored:
            self._searches.note_stored(now_s)

    def _end_step(self, number: int, now_s: float) -> None:
        step = self._clock.end(number, now_s)
        if step is None:
            return
        for client in self._clients:
            client.note_steps([step.sample()], self._backlog.load())
        for chunk in step.chunks:
            if tracked := self._tracked.get(chunk.request_id):
                if not chunk.is_decode:
                    tracked.account.compute_s += step.share_s(chunk)
                self._tell_outcomes(tracked, now_s)

    def _tell_outcomes(self, tracked: TrackedRequest, now_s: float) -> None:
        for client, outcome in zip(self._clients, tracked.take_outcomes(now_s), strict=False):
            if outcome is not None:
                client.note_outcome(outcome)
