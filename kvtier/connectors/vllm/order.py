"""What the two halves say to each other, in vLLM's own messages between its processes."""

from collections import Counter
from dataclasses import dataclass, field

from kvtier.connectors.vllm.identity.facts import BlockFacts
from kvtier.core.identity import BlockHash
from kvtier.core.request import NO_TRAITS, RequestTraits

__all__ = [
    "RankFacts",
    "Results",
    "WorkerLoadOrder",
    "WorkerLoaded",
    "WorkerOrders",
    "WorkerStoreOrder",
]

_Chain = tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a worker knows of its blocks, told once; ``refusal`` says why it cannot serve them."""

    blocks: BlockFacts | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoadOrder:
    """Blocks to copy into vLLM's, from block ``first`` of the chain on."""

    request_id: str
    tenant: bytes
    chains: tuple[_Chain, ...]
    """By rank."""
    first: int
    into: tuple[tuple[int, ...], ...]
    """For each block the blocks of vLLM, and -1 where vLLM has the tokens already."""
    decisions: tuple[int, ...] = ()
    """Numbers of the plans that led to it, by rank."""
    good_until_s: float = 0.0
    """On the monotonic clock, which all processes of a machine share: the lease lasts till then."""
    traceparent: str = ""
    """Of the request, where it is traced."""


@dataclass(frozen=True, slots=True)
class WorkerStoreOrder:
    """Blocks to offer, from block ``first`` of the chain on; vLLM keeps them until the result."""

    number: int
    tenant: bytes
    chains: tuple[_Chain, ...]
    """By rank."""
    first: int
    blocks: tuple[tuple[int, ...], ...]
    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    traceparent: str = ""


@dataclass(slots=True)
class WorkerOrders:
    """Of one step, for every worker."""

    step: int = 0
    """Its number, which comes back with its results; 0: it computes nothing."""
    loads: list[WorkerLoadOrder] = field(default_factory=list)
    stores: list[WorkerStoreOrder] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerLoaded:
    """How a load went for those workers that are done with it."""

    num_filled: int
    """Of its blocks, from the first one on: what all of them have."""
    ended_s: float
    """Of the last one, on the monotonic clock."""
    num_workers: int = 1

    def joined(self, other: "WorkerLoaded") -> "WorkerLoaded":
        """Return what this and other workers have."""
        return WorkerLoaded(
            min(self.num_filled, other.num_filled),
            max(self.ended_s, other.ended_s),
            self.num_workers + other.num_workers,
        )


@dataclass(slots=True)
class Results:
    """Of one step, added up over the workers."""

    step: int = 0
    stored: Counter[int] = field(default_factory=Counter)
    """By store, how many workers are done with it."""
    loaded: dict[str, WorkerLoaded] = field(default_factory=dict)
    """By request."""

    def __bool__(self) -> bool:
        return bool(self.step or self.stored or self.loaded)

    def add(self, other: "Results") -> None:
        """Take in what other workers are done with."""
        self.step = max(self.step, other.step)
        self.stored.update(other.stored)
        for request_id, loaded in other.loaded.items():
            self.note_loaded(request_id, loaded)

    def note_loaded(self, request_id: str, loaded: WorkerLoaded) -> None:
        """Take in how a load went."""
        before = self.loaded.get(request_id)
        self.loaded[request_id] = loaded if before is None else before.joined(loaded)
