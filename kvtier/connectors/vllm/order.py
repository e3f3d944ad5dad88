"""What the two halves say to each other, in vLLM's own messages between its processes."""

from collections import Counter
from dataclasses import dataclass, field

from kvtier.core.identity import BlockHash, KeySpace
from kvtier.core.traits import NO_TRAITS, Traits

__all__ = ["LoadOrder", "Orders", "RankFacts", "Results", "StoreOrder"]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a worker knows of its blocks, told once; ``refusal`` says why it cannot serve them."""

    space: KeySpace | None
    num_engine_blocks: int = 1
    """Of vLLM's in one of ours."""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Blocks to copy into vLLM's, from block ``first`` of the chain on."""

    request_id: str
    tenant: bytes
    hashes: tuple[BlockHash, ...]
    first: int
    into: tuple[tuple[int, ...], ...]
    """For each block the blocks of vLLM, and -1 where vLLM has the tokens already."""
    decision: int = 0
    good_until_s: float = 0.0
    """On the monotonic clock, which all processes of a machine share: the lease lasts till then."""


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Blocks to offer, from block ``first`` of the chain on; vLLM keeps them until the result."""

    number: int
    tenant: bytes
    hashes: tuple[BlockHash, ...]
    first: int
    blocks: tuple[tuple[int, ...], ...]
    traits: Traits = NO_TRAITS
    num_prompt_blocks: int = -1


@dataclass(slots=True)
class Orders:
    """Of one step, for every worker."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """Of one step, added up over the workers: by order, how many of them are done with it."""

    stored: Counter[int] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Results") -> None:
        """Take in what another worker is done with."""
        self.stored.update(other.stored)
        self.loaded.update(other.loaded)
