"""One request on its way through the engine."""

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from kvtier.core.identity import BlockHash, hash_blocks
from kvtier.core.plan import RestorePlan
from kvtier.core.traits import Traits
from kvtier.engine.account import Timing, TokenAccount
from kvtier.engine.port import PortLookup
from kvtier.engine.request import (
    DecisionReason,
    Deliver,
    EngineRequest,
    RestoreDecision,
    Usage,
    format_decision,
)

__all__ = ["Back", "BlockChain", "Phase", "Sequence"]


class Phase(StrEnum):
    """Where a request is. It goes down this list, and back to waiting when it is preempted."""

    WAITING = "waiting"
    LOOKING = "looking"
    """The tiers below were asked what they have."""
    LOADING = "loading"
    """It has its blocks, and the tiers below write to some of them."""
    RUNNING = "running"
    """It computes; the tiers below may write to its ``back`` meanwhile."""
    ENDED = "ended"


class BlockChain:
    """The hashes of a growing list of tokens, in blocks of one size; each computed once."""

    def __init__(self, root: BlockHash, block_tokens: int) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.hashes: list[BlockHash] = []

    def extend(self, tokens: list[int]) -> None:
        """Hash the full blocks of ``tokens`` that were not hashed before."""
        hashed = len(self.hashes) * self.block_tokens
        if len(tokens) - hashed >= self.block_tokens:
            parent = self.parent(len(self.hashes))
            self.hashes += hash_blocks(parent, tokens[hashed:], self.block_tokens)

    def parent(self, index: int) -> BlockHash:
        """Return the hash before block ``index``."""
        return self.hashes[index - 1] if index else self.root


@dataclass(slots=True)
class Back:
    """Tokens behind a gap that are in place already, from ``start`` to ``end``: whole blocks."""

    start: int
    end: int


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, its tokens and its blocks.

    ::

        tokens  |<------ num_computed: K and V in blocks ------>|<-- to compute -->|
        blocks  [0][1][2] …   (published up to num_published, offered up to num_offered)

    With a ``back``, that much of what is to compute is, or is going to be, in place already::

        tokens  |<-- num_computed -->|<-- to compute -->|<-- back -->|<-- to compute -->|
    """

    request: EngineRequest
    deliver: Deliver
    arrival_ns: int
    ticket: int
    """Counts arrivals: of two requests, the higher ticket is the later one."""
    tenant: bytes
    chain: BlockChain
    """Of engine blocks."""
    port_chain: BlockChain
    """Of the blocks below; from the same root."""
    generator: torch.Generator | None
    tokens: list[int]
    traits: Traits
    account: TokenAccount
    timing: Timing
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    back: Back | None = None
    num_published: int = 0
    """Leading blocks that were given to the prefix cache."""
    num_offered: int = 0
    """Leading blocks of ``port_chain`` that were considered for storing."""
    num_lookups: int = 0
    num_reserved: int = 0
    """Blocks it will need when its lookup is answered."""
    found: PortLookup | None = None
    found_first: int = 0
    """The block of ``port_chain`` that ``found`` begins with."""
    num_loaded: int = 0
    """Blocks of ``port_chain`` that were loaded in all."""
    plan: RestorePlan | None = None
    """The latest one that the daemon made for it."""
    advised_offload_tokens: int | None = None
    """What the daemon said it pays to offer; the request's own limit goes before it."""
    decision: str = ""
    is_finished: bool = False
    """The port was told that it is."""
    announced: list[BlockHash] = field(default_factory=list)
    match_generation: int = -1
    matched: int = 0

    @property
    def request_id(self) -> str:
        """Return the id by which clients and the port know it."""
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        """Return the tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Return the tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Return the tokens whose K and V are still to compute."""
        return len(self.tokens) - self.num_computed

    @property
    def num_uncovered(self) -> int:
        """Return the tokens that have yet to be computed, as far as is known now."""
        return self.num_missing - (self.back.end - self.back.start if self.back else 0)

    @property
    def num_blocks_needed(self) -> int:
        """Return the blocks that hold all tokens known."""
        return -(-len(self.tokens) // self.chain.block_tokens)

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        self.chain.extend(self.tokens)
        self.port_chain.extend(self.tokens)

    def join(self) -> bool:
        """Go on behind the back where everything before it is computed; False: not so far yet."""
        if self.back is None or self.num_computed < self.back.start:
            return False
        self.num_computed = max(self.num_computed, self.back.end)
        self.num_published = max(self.num_published, self.back.end // self.chain.block_tokens)
        self.back = None
        return True

    def decide(self, decision: RestoreDecision, reason: str = DecisionReason.COMPLETE) -> None:
        """Note what was done about the prefix; the first decision is the one that is told."""
        self.decision = self.decision or format_decision(decision, reason)

    def usage(self) -> Usage:
        """Return the account so far."""
        return Usage(
            prompt_tokens=self.account.num_counted,
            completion_tokens=self.num_generated,
            tier_tokens=self.account.tier_tokens(),
            computed_tokens=self.account.computed,
            decision=self.decision
            or format_decision(RestoreDecision.COMPUTED, DecisionReason.CANCELLED),
        )
