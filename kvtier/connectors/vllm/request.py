"""A request of vLLM's, and what was asked and offered of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.connectors.kit.chains import RankChains
from kvtier.connectors.vllm.prefix_lookup import PrefixLookup
from kvtier.core.plan import PlanOutcome
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.observe.trace import traceparent_of

__all__ = ["RequestTimes", "TrackedRequest", "note_blocks"]


@dataclass(slots=True)
class RequestTimes:
    """Of one request; all times are on one monotonic clock."""

    arrived_s: float
    num_restored: int = 0
    """Blocks in place, of those that were held."""
    restore_s: float = 0.0
    computing_since_s: float | None = None
    computed_tokens: int = 0
    """Of the prompt."""
    compute_s: float = 0.0
    """Its share of the steps."""

    def note_chunk(self, num_prompt_tokens: int, now_s: float) -> None:
        """Note that a step computes some tokens of the prompt."""
        if self.computing_since_s is None:
            self.computing_since_s = now_s
        self.computed_tokens += num_prompt_tokens

    def outcome(self, decision: int, tiers: Sequence[TierName], now_s: float) -> PlanOutcome | None:
        """Return what came of a plan, once the first token is there; None if it cannot be told.

        ``tiers`` are those of the blocks that were held.
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


@dataclass(slots=True)
class TrackedRequest:
    """Knows of ``request`` what vLLM tells nobody twice."""

    request: Any
    tenant: bytes
    traits: RequestTraits
    chains: RankChains
    account: RequestTimes
    blocks: list[int] = field(default_factory=list)
    """Of vLLM."""
    num_local: int = 0
    """Tokens that vLLM had itself when it last asked for more."""
    num_offered: int = 0
    """Blocks of ours."""
    num_searches: int = 0
    """Since it was last preempted."""
    was_empty: bool = False
    """The daemon was known to have nothing when it came."""
    num_lost: int = 0
    num_preemptions: int = 0
    """When it was last searched for."""
    waits_since_s: float | None = None
    """For its turn to be searched for."""
    answer: PrefixLookup | None = None
    """What vLLM went by; its plan's outcome is still to be told."""
    advised_tokens: int | None = None
    """By the daemon's last answer. Who never asked offers more than it takes, and is told so."""
    num_learned: int = 0
    """Blocks of ours that routers can be told of."""
    is_old: bool = False
    """It has blocks from before a reset, and offers none any more."""

    @property
    def request_id(self) -> str:
        """Return its name, which may be that of another one once it is over."""
        return str(self.request.request_id)

    @property
    def num_left(self) -> int:
        """Return the tokens of its prompt that are not computed yet."""
        return max(0, int(self.request.num_prompt_tokens - self.request.num_computed_tokens))

    @property
    def traceparent(self) -> str:
        """Return where it belongs in its client's trace; empty where vLLM traces nothing."""
        return traceparent_of(self.request.trace_headers)

    @property
    def offload_tokens(self) -> int | None:
        """Return how many leading tokens may be offered: what it says itself, or what is advised.

        None: all of them.
        """
        own = self.traits.max_offload_tokens
        return self.advised_tokens if own is None else own

    def extend(self) -> None:
        """Hash the blocks that are full by now."""
        self.chains.extend(self.request.all_token_ids)

    def note_preemptions(self) -> None:
        """Have it searched for anew if it was preempted since it was last looked at."""
        if self.request.num_preemptions > self.num_preemptions:
            self.num_preemptions = self.request.num_preemptions
            self.num_searches = 0

    def note_blocks(self, fresh: Sequence[int], *, is_whole: bool) -> None:
        """Take the blocks that vLLM gave it: all of them, or more of them."""
        if is_whole:
            self.blocks.clear()
        self.blocks.extend(fresh)

    def take_outcomes(self, now_s: float) -> list[PlanOutcome | None]:
        """Return what came of each rank's plan, once; nothing before the first token is there.

        What a request took that lost its blocks, or was searched for again, says nothing.
        """
        answer = self.answer
        if answer is None or not self.request.num_output_tokens:
            return []
        self.answer = None
        if self.request.num_preemptions or self.num_searches > 1:
            return []
        return [
            self.account.outcome(decision, answer.tiers_of(rank), now_s)
            for rank, decision in enumerate(answer.decisions)
        ]


def note_blocks(tracked: Mapping[str, TrackedRequest], output: Any) -> Mapping[str, int]:
    """Take the blocks that vLLM gave out in a step; return what its requests have computed."""
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
