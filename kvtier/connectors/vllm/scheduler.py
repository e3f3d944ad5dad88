"""The scheduler half: answers vLLM's scheduler, one call at a time.

Rules
-----
* No call waits: lookups run on threads, and vLLM asks again in its next step.
* A hit is reported only if all ranks hold it, from where vLLM's own tokens end.
* vLLM waits for each load that it was promised until a worker reports it. So every load has a job,
  even if only to report that nothing was loaded.
* A request is not cached if something that determines its KV is unknown, such as an adapter.
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
from kvtier.connectors.vllm.request import PrefixLookup, RequestTimes, TrackedRequest, note_blocks
from kvtier.connectors.vllm.reset import CacheReset
from kvtier.connectors.vllm.router_feed import RouterFeed
from kvtier.connectors.vllm.stats import ATTACHED, HIT_TOKENS, Counts, StatCounters, split_by_tier
from kvtier.connectors.vllm_common.settings import Role, traits_of
from kvtier.core.identity import tenant_digest
from kvtier.core.residency import TierName

__all__ = ["Rank", "SchedulerHalf"]

_JOIN_S = 5.0
"""Attaching to a running daemon takes less; without a daemon, vLLM goes idle after this time."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker's key space, and a client of it for the scheduler half."""

    client: Client
    key_space: bytes


class SchedulerHalf:
    """Answers for all ranks; ``close`` also closes their clients."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        block_tokens: int,
        ratio: int,
        role: Role = Role.BOTH,
        router_feed: RouterFeed | None = None,
    ) -> None:
        """``ratio`` vLLM blocks make one kvtier block of ``block_tokens``."""
        self.counters = StatCounters()
        self.hit_tokens = 0
        """Prompt tokens that vLLM had itself, over all finished requests."""
        self._router_feed = router_feed
        self._clients = [rank.client for rank in ranks]
        self._cache_reset = CacheReset(self._clients)
        self._key_spaces = [rank.key_space for rank in ranks]
        self._block_tokens = block_tokens
        self._role = role
        self._deadlines = ranks[0].client.deadlines
        self._tracked: dict[str, TrackedRequest] = {}
        self._backlog = Backlog(self._tracked)
        self._lookups = OpenLookups(self._clients, block_tokens, self._backlog, self.counters)
        self._loads = OpenLoads(len(ranks), block_tokens, ratio)
        self._stores = OpenStores(len(ranks), block_tokens, ratio)
        self._jobs = StepJobs()
        self._clock = StepClock()
        self._reported_attached: bool | None = None
        """The last state reported to vLLM's metrics."""
        self._began_s = time.monotonic()

    @property
    def is_attached(self) -> bool:
        """Return whether all ranks have a session."""
        return all(client.is_attached for client in self._clients)

    @property
    def is_joining(self) -> bool:
        """Return whether vLLM should run steps so that its metrics report the first session."""
        return not self._reported_attached and time.monotonic() < self._began_s + _JOIN_S

    @property
    def has_pending_stores(self) -> bool:
        """Return whether vLLM should run steps until a store has ended.

        Not forever: a store that is not reported after several timeouts never will be. The time
        counts from the last step that computed, since a store starts when its step ends.
        """
        until_s = self._clock.computing_s + 4 * self._deadlines.store_s
        return len(self._stores) > 0 and time.monotonic() < until_s

    @property
    def frees_blocks_soon(self) -> bool:
        """Return whether vLLM gains blocks by waiting for a step or two."""
        return self._stores.frees_soon(time.monotonic())

    def bind(self, pool: Any) -> None:
        """Set vLLM's block pool, in which stores reference blocks."""
        self._stores.bind(pool)

    def start(self) -> None:
        """Start the clients; does not wait for their sessions."""
        for client in self._clients:
            client.start()

    # Per request

    def add(self, request: Any, adapter: bytes = b"") -> None:
        """Track a request and announce it; ``adapter`` is the fingerprint of its adapter."""
        self.finish(request)  # an earlier one with this id, whose end was not reported
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
        """Return how many tokens beyond ``num_computed`` are held; None: vLLM should ask again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache or not self._role.loads:
            return 0
        tracked.num_local = num_computed
        lookup = self._lookups.find(tracked, num_computed)
        if lookup is not None:
            return self._lookups.answer(tracked, lookup, num_computed)
        self._extend(tracked)
        if self._cache_reset.is_due or not self.is_attached:
            return 0
        return self._lookups.begin(tracked, num_computed, is_quiet=not len(self._stores))

    def start_load(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """Start the load into the blocks that vLLM allocated for a request."""
        tracked = self._tracked.get(request.request_id)
        lookup = self._lookups.take(request.request_id)
        try:
            self._open_load(tracked, lookup, blocks, num_external)
        except Exception:
            if lookup is not None:
                lookup.release()
            if num_external:
                num_local = tracked.num_local if tracked else 0
                nothing = self._loads.order_nothing(request.request_id, blocks, num_local)
                self._jobs.loads.append(nothing)
            raise

    def sources(self, request_id: str, num_external: int) -> Mapping[TierName, int]:
        """Return the tokens of a request's load by tier."""
        return split_by_tier(self._loads.tiers(request_id), num_external, self._block_tokens)

    def finish(self, request: Any) -> None:
        """Stop tracking a request."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self.hit_tokens += min(tracked.num_local, int(tracked.request.num_prompt_tokens))
        self._lookups.drop(request.request_id)
        self._loads.forget(request.request_id)  # its copy continues, into blocks that vLLM keeps
        self._report_outcomes(tracked, time.monotonic())
        if tracked.traits.request_id:
            for client in self._clients:
                client.announce((), [tracked.traits.request_id])

    def reset(self) -> None:
        """Drop all earlier blocks; until that is complete, none is found or offered."""
        self._cache_reset.schedule()
        for tracked in self._tracked.values():
            tracked.is_stale = True
        self._lookups.drop_all()
        self._cache_reset.begin(is_quiet=not len(self._stores))
        if self._router_feed is not None:
            self._router_feed.clear_residency()

    # Per step

    def start_stores(self, output: Any) -> None:
        """Start the stores of a step that vLLM has scheduled."""
        now_s = time.monotonic()
        self._cache_reset.step(self._lookups.submit, is_quiet=not len(self._stores))
        computed = note_blocks(self._tracked, output)
        chunks: list[StepChunk] = []
        for request_id, num_new in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            num_past, num_prompt = computed[request_id], tracked.request.num_prompt_tokens
            chunks.append(StepChunk(request_id, num_new, num_past, num_prompt))
            tracked.times.note_chunk(max(0, min(num_new, num_prompt - num_past)), now_s)
            if self._role.stores and self.is_attached and not self._cache_reset.is_due:
                self._extend(tracked)
                if order := self._stores.order(tracked, num_past + num_new, now_s):
                    self._jobs.stores.append(order)
        if num_scheduled := len(output.num_scheduled_tokens):
            known = chunks if len(chunks) == num_scheduled else ()
            self._jobs.step = self._clock.begin(known, now_s)

    def take_jobs(self) -> StepJobs:
        """Take the workers' jobs of this step."""
        jobs, self._jobs = self._jobs, StepJobs()
        self._backlog.end_step()
        return jobs

    def take_results(self, results: StepResults) -> None:
        """Process the results of the workers."""
        now_s = time.monotonic()
        with ExitStack() as parts:  # each runs even if another one fails
            parts.callback(self._end_step, results.step, now_s)
            for request_id, loaded in results.loaded.items():
                parts.callback(self._loads.note_loaded, request_id, loaded, now_s)
            parts.callback(self._note_stored, results.stored, now_s)

    def take_counts(self) -> Counts:
        """Take the counts since the last call, and whether there is a session now."""
        if self._reported_attached is not (is_attached := self.is_attached):
            self._reported_attached = is_attached
            self.counters.add(ATTACHED, is_attached)
        return self.counters.take()

    def close(self) -> None:
        """Close the clients."""
        self._lookups.close()
        for client in self._clients:
            client.close()

    def _extend(self, tracked: TrackedRequest) -> None:
        """Hash a request's full blocks, and pass them to the router feed."""
        tracked.extend()
        if self._router_feed is not None:
            self._router_feed.follow(tracked)

    def _open_load(
        self,
        tracked: TrackedRequest | None,
        lookup: PrefixLookup | None,
        blocks: Sequence[int],
        num_external: int,
    ) -> None:
        if lookup is not None and lookup.is_over and tracked is not None:
            tracked.answer = lookup
        if not num_external:
            if lookup is not None:
                lookup.release()
            return
        assert lookup is not None, "vLLM loads only what was reported to it"
        assert tracked is not None
        order = self._loads.order(tracked, lookup, blocks, num_external, time.monotonic())
        for tier, num_tokens in self.sources(order.request_id, num_external).items():
            self.counters.add(HIT_TOKENS, num_tokens, tier.value)
        self._jobs.loads.append(order)

    def _note_stored(self, stored: Mapping[int, int], now_s: float) -> None:
        self._stores.note_done(stored)
        if stored:
            self._lookups.note_stored(now_s)

    def _end_step(self, number: int, now_s: float) -> None:
        step = self._clock.end(number, now_s)
        if step is None:
            return
        for client in self._clients:
            client.note_steps([step.sample()], self._backlog.load())
        for chunk in step.chunks:
            if tracked := self._tracked.get(chunk.request_id):
                if not chunk.is_decode:
                    tracked.times.compute_s += step.share_s(chunk)
                self._report_outcomes(tracked, now_s)

    def _report_outcomes(self, tracked: TrackedRequest, now_s: float) -> None:
        for client, outcome in zip(self._clients, tracked.take_outcomes(now_s), strict=False):
            if outcome is not None:
                client.note_outcome(outcome)
