"""One request on its way through the engine."""

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from kvtier.core.identity import BlockHash, hash_blocks
from kvtier.core.residency import TierName
from kvtier.engine.port import Found
from kvtier.engine.request import (
    Decision,
    DecisionReason,
    Deliver,
    Request,
    TierTokens,
    Usage,
    format_decision,
)

__all__ = ["BlockChain", "Phase", "Sequence", "TokenAccount"]


class Phase(StrEnum):
    """Where a request is. It goes down this list, and back to waiting when it is preempted."""

    WAITING = "waiting"
    LOOKING = "looking"
    """The tiers below were asked what they have."""
    LOADING = "loading"
    """It has its blocks, and the tiers below write to some of them."""
    RUNNING = "running"
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
class TokenAccount:
    """Who supplied each prompt token first. Supply comes from the front, so a length will do."""

    num_prompt: int
    num_counted: int = 0
    computed: int = 0
    by_tier: dict[TierName, int] = field(default_factory=dict)

    def count(self, source: TierName | None, end: int) -> None:
        """Count the prompt tokens before ``end`` that nobody supplied yet; None: computed."""
        num_new = max(0, min(end, self.num_prompt) - self.num_counted)
        self.num_counted += num_new
        if source is None:
            self.computed += num_new
        else:
            self.by_tier[source] = self.by_tier.get(source, 0) + num_new

    def tier_tokens(self) -> TierTokens:
        """Return the tokens that were not computed, by tier."""
        return TierTokens(**{tier.value: count for tier, count in self.by_tier.items()})


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, its tokens and its blocks.

    ::

        tokens  |<------ num_computed: K and V in blocks ------>|<-- to compute -->|
        blocks  [0][1][2] …   (published up to num_published, offered up to num_offered)
    """

    request: Request
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
    account: TokenAccount
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    """Leading blocks that were given to the prefix cache."""
    num_offered: int = 0
    """Leading blocks of ``port_chain`` that were considered for storing."""
    num_lookups: int = 0
    num_reserved: int = 0
    """Blocks it will need when its lookup is answered."""
    found: Found | None = None
    found_first: int = 0
    """The block of ``port_chain`` that ``found`` begins with."""
    num_loaded: int = 0
    """Blocks of ``port_chain`` that were loaded in all."""
    decision: str = ""
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
    def num_blocks_needed(self) -> int:
        """Return the blocks that hold all tokens known."""
        return -(-len(self.tokens) // self.chain.block_tokens)

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        self.chain.extend(self.tokens)
        self.port_chain.extend(self.tokens)

    def decide(self, decision: Decision, reason: str = DecisionReason.COMPLETE) -> None:
        """Note what was done about the prefix; the first decision is the one that is told."""
        self.decision = self.decision or format_decision(decision, reason)

    def usage(self) -> Usage:
        """Return the account so far."""
        return Usage(
            prompt_tokens=self.account.num_counted,
            completion_tokens=self.num_generated,
            tier_tokens=self.account.tier_tokens(),
            computed_tokens=self.account.computed,
            decision=self.decision or format_decision(Decision.COMPUTED, DecisionReason.CANCELLED),
        )
