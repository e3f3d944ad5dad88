"""One request of vLLM as the scheduler half tracks it, with its lookup and timing."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvtier.client import Client, FoundBlocks, HeldBlocks
from kvtier.connectors.kit.chains import RankChains
from kvtier.core.identity import BlockHash
from kvtier.core.plan import EngineLoad, PlanOutcome
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import DaemonUnavailable
from kvtier.observe.trace import TRACES, traceparent_of

__all__ = ["PrefixLookup", "RequestTimes", "TrackedRequest", "note_blocks"]


@dataclass(slots=True)
class RequestTimes:
    """Breakdown of the time until a request's first token, as seen by vLLM's scheduler.

    Restoring is lookup and copy; computing starts with the first step that has a chunk of the
    request; the rest was spent in vLLM's queue. All times are on one monotonic clock.
    """

    arrived_s: float
    num_restored: int = 0
    """Held blocks that were loaded."""
    restore_s: float = 0.0
    computing_since_s: float | None = None
    computed_tokens: int = 0
    """Prompt tokens that were computed."""
    compute_s: float = 0.0
    """The request's share of step durations."""

    def note_chunk(self, num_prompt_tokens: int, now_s: float) -> None:
        """Record that a step computes some tokens of the prompt."""
        if self.computing_since_s is None:
            self.computing_since_s = now_s
        self.computed_tokens += num_prompt_tokens

    def outcome(self, decision: int, tiers: Sequence[TierName], now_s: float) -> PlanOutcome | None:
        """Return the outcome of a plan at the first token; None if it is unknown.

        ``tiers`` are the tiers of the held blocks.
        """
        if not decision or self.computing_since_s is None:
            return None
        ttft_s = now_s - self.arrived_s
        computing_s = now_s - self.computing_since_s
        return PlanOutcome(
            decision=decision,
            tiers=tuple(Counter(tiers[: self.num_restored]).items()),
            restore_s=self.restore_s,
            computed_tokens=self.computed_tokens,
            compute_s=self.compute_s,
            wait_s=max(0.0, ttft_s - self.restore_s - computing_s),
            ttft_s=ttft_s,
        )


_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class PrefixLookup:
    """The lookup of one request; call ``run`` on a thread and read the results once ``is_over``.

    For each rank it looks up what can be loaded, has the daemon promote as much as the plans say,
    and keeps the leases. The blocks that it reports are verified and in the arena for all ranks,
    and stay there until ``release`` or ``good_until_s``.
    """

    clients: Sequence[Client]
    """One client for each rank."""
    tenant: bytes
    chains: Sequence[Sequence[BlockHash]]
    """Block hashes by rank."""
    first: int
    traits: RequestTraits
    load: EngineLoad
    traceparent: str = ""
    """The request's trace context; empty if it is not traced."""
    is_over: bool = False
    is_unwanted: bool = False
    has_failed: bool = False
    num_blocks: int = 0
    """Blocks held for every rank, from ``first`` on."""
    decisions: Sequence[int] = ()
    """Numbers of the restore plans, by rank."""
    good_until_s: float = 0.0
    max_offload_tokens: int | None = None
    empty_until_s: float = 0.0
    """Time until which some rank's tiers hold only blocks stored after this lookup started."""
    began_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    _held: list[HeldBlocks] = field(default_factory=list)

    @property
    def tiers(self) -> Sequence[TierName]:
        """Return the tier of each held block, for the first rank."""
        return self.tiers_of(0)

    def tiers_of(self, rank: int) -> Sequence[TierName]:
        """Return the tier of each held block, for one rank."""
        return self._held[rank].tiers[: self.num_blocks] if self.num_blocks else ()

    def run(self) -> None:
        """Look up and hold what is found. Ends by the client's deadlines."""
        try:
            if not self.is_unwanted:
                self._run()
        except DaemonUnavailable:
            self.has_failed = True  # already logged; vLLM computes
        except BaseException:
            self.has_failed = True
            raise
        finally:
            if not self.num_blocks:
                self.release()
            self.took_s = time.monotonic() - self.began_s
            self.is_over = True
            if self.is_unwanted:
                self.release()

    def release(self) -> None:
        """Release blocks that are held or will be. Never waits."""
        self.is_unwanted = True
        for held in list(self._held):
            held.release()

    def _run(self) -> None:
        founds = self._for_each(self._look_up)
        advised = [
            each.max_offload_tokens for each in founds if each.max_offload_tokens is not None
        ]
        self.max_offload_tokens = min(advised, default=None)
        if empty_s := max(found.empty_s for found in founds):
            self.empty_until_s = time.monotonic() + empty_s
        self.decisions = [found.decision for found in founds]
        wanted = min(found.num_planned for found in founds)
        if not wanted or self.is_unwanted:
            return
        most_s = self.clients[0].deadlines.load_s
        wait_s = max(found.load_timeout_s(most_s) for found in founds)
        held = self._for_each(partial(self._hold, wanted, wait_s))
        self._held = held
        self.good_until_s = min(each.good_until_s for each in held)
        self.num_blocks = min(len(each.tiers) for each in held)

    def _look_up(self, rank: int) -> FoundBlocks:
        client, chain = self.clients[rank], self.chains[rank]
        with TRACES.forward("lookup", self.traceparent) as mark:
            found = client.lookup(self.tenant, chain, self.first, self.traits, self.load)
            mark.set(asked_blocks=len(chain) - self.first, found_blocks=len(found.tiers))
        return found

    def _hold(self, wanted: int, wait_s: float, rank: int) -> HeldBlocks:
        with TRACES.forward("hold", self.traceparent) as mark:
            held = self.clients[rank].hold(
                self.tenant,
                self.chains[rank][: self.first + wanted],
                self.first,
                decision=self.decisions[rank],
                timeout_s=wait_s,
            )
            self._held.append(held)  # at once: if another rank fails, this one is released
            mark.set(wanted_blocks=wanted, held_blocks=len(held.tiers), end=held.end)
        return held

    def _for_each(self, ask: Callable[[int], _Answer]) -> list[_Answer]:
        """Call ``ask`` for all ranks concurrently."""
        if len(self.clients) == 1:
            return [ask(0)]
        with ThreadPoolExecutor(len(self.clients), "kvtier-rank") as ranks:
            return list(ranks.map(ask, range(len(self.clients))))


@dataclass(slots=True)
class TrackedRequest:
    """A request, and the facts that vLLM reports about it only once."""

    request: Any
    tenant: bytes
    traits: RequestTraits
    chains: RankChains
    times: RequestTimes
    blocks: list[int] = field(default_factory=list)
    """vLLM's block ids, in token order."""
    num_local: int = 0
    """Tokens that vLLM had itself at its last query."""
    num_offered: int = 0
    """Leading kvtier blocks that were offered or need not be."""
    num_lookups: int = 0
    """Lookups since the last preemption."""
    was_empty: bool = False
    """Whether the daemon was known to have nothing when the request arrived."""
    num_lost: int = 0
    num_preemptions: int = 0
    """Preemptions at the time of the last lookup."""
    waits_since_s: float | None = None
    """Since when it waits for its lookup to start."""
    answer: PrefixLookup | None = None
    """The lookup that vLLM used, until the outcome of its plan is reported."""
    advised_tokens: int | None = None
    """The daemon's last advice on how many tokens to offer; None without a lookup."""
    num_followed: int = 0
    """Leading kvtier blocks that the router feed tracks."""
    is_stale: bool = False
    """Whether it has blocks from before a reset; it then offers none."""

    @property
    def request_id(self) -> str:
        """Return the request's id, which may be reused once the request has ended."""
        return str(self.request.request_id)

    @property
    def num_left(self) -> int:
        """Return the number of prompt tokens not yet computed."""
        return max(0, int(self.request.num_prompt_tokens - self.request.num_computed_tokens))

    @property
    def traceparent(self) -> str:
        """Return the request's trace context; empty if vLLM does not trace."""
        return traceparent_of(self.request.trace_headers)

    @property
    def offload_tokens(self) -> int | None:
        """Return how many leading tokens may be offered; None: all of them.

        The request's own limit takes precedence over the daemon's advice.
        """
        own = self.traits.max_offload_tokens
        return self.advised_tokens if own is None else own

    def extend(self) -> None:
        """Hash the blocks that are full now."""
        self.chains.extend(self.request.all_token_ids)

    def note_preemptions(self) -> None:
        """Allow new lookups if the request was preempted since the last one."""
        if self.request.num_preemptions > self.num_preemptions:
            self.num_preemptions = self.request.num_preemptions
            self.num_lookups = 0

    def note_blocks(self, fresh: Sequence[int], *, is_whole: bool) -> None:
        """Add blocks that vLLM allocated; ``is_whole``: they replace all earlier ones."""
        if is_whole:
            self.blocks.clear()
        self.blocks.extend(fresh)

    def take_outcomes(self, now_s: float) -> list[PlanOutcome | None]:
        """Return the outcome of each rank's plan, once; empty before the first token.

        A request that was preempted or looked up again has no meaningful outcome.
        """
        answer = self.answer
        if answer is None or not self.request.num_output_tokens:
            return []
        self.answer = None
        if self.request.num_preemptions or self.num_lookups > 1:
            return []
        return [
            self.times.outcome(decision, answer.tiers_of(rank), now_s)
            for rank, decision in enumerate(answer.decisions)
        ]


def note_blocks(tracked: Mapping[str, TrackedRequest], output: Any) -> Mapping[str, int]:
    """Record the blocks allocated in a step; returns computed tokens by request id."""
    computed: dict[str, int] = {}
    for fresh in output.scheduled_new_reqs:
        computed[fresh.req_id] = fresh.num_computed_tokens
        if known := tracked.get(fresh.req_id):
            known.note_blocks(fresh.block_ids[0], is_whole=True)
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if block_ids and (known := tracked.get(request_id)):
            is_whole = request_id in cached.resumed_req_ids
            known.note_blocks(block_ids[0], is_whole=is_whole)
    return computed
