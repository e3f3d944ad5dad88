"""A request in the engine: its tokens, blocks, hashes and timing."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from kvtier.core.identity import BlockHash, hash_blocks
from kvtier.core.plan import PlanOutcome, RestorePlan
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.engine.port import PortChain, PortLookup
from kvtier.engine.request import (
    DecisionReason,
    Deliver,
    EngineRequest,
    RestoreDecision,
    Usage,
    format_decision,
)

__all__ = [
    "BlockChain",
    "LoadedTail",
    "Phase",
    "RequestTiming",
    "Sequence",
    "StallTimes",
    "TokenSources",
]

_NOT_YET, _COUNTED = b"\0", b"\1"


class TokenSources:
    """Tracks who supplied each prompt token first: a tier, or the engine by computing it.

    Tokens are supplied from both ends during a split, and again after a preemption, so each token
    has its own mark and counts once.
    """

    def __init__(self, num_prompt: int) -> None:
        self.computed = 0
        self.by_tier: Counter[TierName] = Counter()
        self._marks = bytearray(num_prompt)

    @property
    def num_counted(self) -> int:
        """Return the number of prompt tokens supplied so far."""
        return self.computed + self.by_tier.total()

    def count(self, source: TierName | None, start: int, end: int) -> None:
        """Count the prompt tokens from ``start`` to ``end`` that are not counted yet.

        The source None means that they were computed.
        """
        end = min(end, len(self._marks))
        num_new = self._marks.count(_NOT_YET, start, end)
        if not num_new:
            return
        self._marks[start:end] = _COUNTED * (end - start)
        if source is None:
            self.computed += num_new
        else:
            self.by_tier[source] += num_new

    def is_counted(self, end: int) -> bool:
        """Return whether every prompt token before ``end`` is counted."""
        return not self._marks.count(_NOT_YET, 0, min(end, len(self._marks)))


class StallTimes:
    """Time during which requests were present but nothing could be computed, by cause."""

    def __init__(self) -> None:
        self._waited_ns: dict[str, int] = {}
        self._waits_for = ""
        self._since_ns = 0

    def note(self, waits_for: str, now_ns: int) -> None:
        """Record what the engine waits for from now on; empty while it computes."""
        if self._waits_for:
            waited_ns = self._waited_ns.get(self._waits_for, 0) + now_ns - self._since_ns
            self._waited_ns[self._waits_for] = waited_ns
        self._waits_for, self._since_ns = waits_for, now_ns

    def seconds(self) -> dict[str, float]:
        """Return the times up to the last note; from any thread."""
        return {waited: ns / 1e9 for waited, ns in self._waited_ns.copy().items()}


@dataclass(slots=True)
class RequestTiming:
    """Breakdown of the time until a request's first token."""

    arrival_ns: int
    waiting_since_ns: int
    wait_ns: int = 0
    restore_began_ns: int = 0
    restore_ns: int = 0
    compute_s: float = 0.0
    restored: dict[TierName, int] = field(default_factory=dict)
    """Number of restored blocks, by tier."""
    was_preempted: bool = False
    """The request lost its blocks once, so its total time says nothing about its plan."""

    def begin_waiting(self, now_ns: int) -> None:
        """Note that the request is queued again."""
        self.waiting_since_ns = now_ns

    def end_waiting(self, now_ns: int) -> None:
        """Note that the request left the queue."""
        self.wait_ns += now_ns - self.waiting_since_ns

    def begin_restoring(self, now_ns: int) -> None:
        """Note that its blocks are requested."""
        self.restore_began_ns = now_ns

    def note_restored(self, tiers: tuple[TierName, ...], now_ns: int) -> None:
        """Note that more blocks are in place."""
        self.restore_ns = now_ns - self.restore_began_ns
        for tier in tiers:
            self.restored[tier] = self.restored.get(tier, 0) + 1

    def outcome(
        self, decision: int, computed_tokens: int, first_token_ns: int
    ) -> PlanOutcome | None:
        """Return the outcome of a plan, or None if it is unknown."""
        if not decision or self.was_preempted:
            return None
        return PlanOutcome(
            decision=decision,
            tiers=tuple(self.restored.items()),
            restore_s=self.restore_ns / 1e9,
            computed_tokens=computed_tokens,
            compute_s=self.compute_s,
            wait_s=self.wait_ns / 1e9,
            ttft_s=(first_token_ns - self.arrival_ns) / 1e9,
        )


class Phase(StrEnum):
    """The phase of a request, in this order; preemption returns it to waiting."""

    WAITING = "waiting"
    LOOKING = "looking"
    """A lookup in the tiers below is in flight."""
    LOADING = "loading"
    """It has its blocks, and the tiers below write to some of them."""
    RUNNING = "running"
    """It computes; the tiers below may write to its ``loaded_tail`` meanwhile."""
    ENDED = "ended"


class BlockChain:
    """The hashes of a growing list of tokens, in blocks of one size; each computed once."""

    def __init__(self, root: BlockHash, block_tokens: int) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.hashes: list[BlockHash] = []

    def extend(self, tokens: list[int]) -> None:
        """Hash the full blocks of ``tokens`` that are not hashed yet."""
        hashed = len(self.hashes) * self.block_tokens
        if len(tokens) - hashed >= self.block_tokens:
            parent = self.parent(len(self.hashes))
            self.hashes += hash_blocks(parent, tokens[hashed:], self.block_tokens)

    def parent(self, index: int) -> BlockHash:
        """Return the parent hash of block ``index``."""
        return self.hashes[index - 1] if index else self.root


@dataclass(slots=True)
class LoadedTail:
    """Tokens behind a gap that are already in place, from ``start`` to ``end``: whole blocks."""

    start: int
    end: int


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, its tokens and its blocks.

    ::

        tokens  |<------ num_computed: K and V in blocks ------>|<-- to compute -->|
        blocks  [0][1][2] …   (published up to num_published, offered up to num_offered)

    With a ``loaded_tail``, that part of the tokens to compute is loaded instead::

        tokens  |<-- num_computed -->|<-- to compute -->|<-- tail -->|<-- to compute -->|
    """

    request: EngineRequest
    deliver: Deliver
    arrival_ns: int
    ticket: int
    """Order of arrival; a later request has a higher ticket."""
    tenant: bytes
    chain: BlockChain
    """Hashes of engine blocks."""
    port_chain: BlockChain
    """Hashes of the port's blocks, from the same root."""
    generator: torch.Generator | None
    tokens: list[int]
    traits: RequestTraits
    sources: TokenSources
    timing: RequestTiming
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    loaded_tail: LoadedTail | None = None
    num_published: int = 0
    """Leading blocks that are in the prefix cache."""
    num_offered: int = 0
    """Leading blocks of ``port_chain`` that were considered for storing."""
    num_lookups: int = 0
    num_reserved: int = 0
    """Blocks it will need when its lookup is answered."""
    found: PortLookup | None = None
    found_first: int = 0
    """The block of ``port_chain`` where ``found`` begins."""
    num_loaded: int = 0
    """Total number of loaded blocks of ``port_chain``."""
    plan: RestorePlan | None = None
    """The daemon's latest plan for it."""
    advised_offload_tokens: int | None = None
    """The daemon's advice on how much to offload; the request's own limit takes precedence."""
    decision: str = ""
    is_finished: bool = False
    """Whether ``port.finish`` was called."""
    announced: list[BlockHash] = field(default_factory=list)
    match_generation: int = -1
    matched: int = 0

    @property
    def request_id(self) -> str:
        """Return the id used by clients and the port."""
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Return the number of generated tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Return the number of tokens whose K and V are not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def num_uncovered(self) -> int:
        """Return the number of tokens still to compute, without the loaded tail."""
        return self.num_missing - (
            self.loaded_tail.end - self.loaded_tail.start if self.loaded_tail else 0
        )

    @property
    def num_blocks_needed(self) -> int:
        """Return the number of blocks that hold all known tokens."""
        return -(-len(self.tokens) // self.chain.block_tokens)

    def chain_below(self, end: int | None = None) -> PortChain:
        """Return the first ``end`` blocks of ``port_chain``, or all, for a call of the port."""
        return PortChain(self.tenant, self.port_chain.root, tuple(self.port_chain.hashes[:end]))

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        self.chain.extend(self.tokens)
        self.port_chain.extend(self.tokens)

    def join(self) -> bool:
        """Skip the loaded tail if everything before it is computed; returns whether it did."""
        if self.loaded_tail is None or self.num_computed < self.loaded_tail.start:
            return False
        self.num_computed = max(self.num_computed, self.loaded_tail.end)
        self.num_published = max(
            self.num_published, self.loaded_tail.end // self.chain.block_tokens
        )
        self.loaded_tail = None
        return True

    def decide(self, decision: RestoreDecision, reason: str = DecisionReason.COMPLETE) -> None:
        """Note the decision about the prefix; the first one is reported."""
        self.decision = self.decision or format_decision(decision, reason)

    def usage(self) -> Usage:
        """Return the token counts so far."""
        return Usage(
            prompt_tokens=self.sources.num_counted,
            completion_tokens=self.num_generated,
            tier_tokens=self.sources.by_tier.copy(),
            computed_tokens=self.sources.computed,
            decision=self.decision
            or format_decision(RestoreDecision.COMPUTED, DecisionReason.CANCELLED),
        )
