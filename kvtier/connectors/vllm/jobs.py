"""What the two halves say to each other, in vLLM's own messages between its processes."""

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.connectors.vllm.block_identity import BlockFacts
from kvtier.core.identity import BlockHash
from kvtier.core.request import NO_TRAITS, RequestTraits

__all__ = [
    "LoadJob",
    "LoadResult",
    "RankReport",
    "StepJobs",
    "StepResults",
    "StoreJob",
    "WorkerReports",
]

_Chain = tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a worker knows of its blocks, told once; ``refusal`` says why it cannot serve them."""

    blocks: BlockFacts | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class LoadJob:
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
class StoreJob:
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
class StepJobs:
    """Of one step, for every worker."""

    step: int = 0
    """Its number, which comes back with its results; 0: it computes nothing."""
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load went for those workers that are done with it."""

    num_filled: int
    """Of its blocks, from the first one on: what all of them have."""
    ended_s: float
    """Of the last one, on the monotonic clock."""
    num_workers: int = 1

    def joined(self, other: "LoadResult") -> "LoadResult":
        """Return what this and other workers have."""
        return LoadResult(
            min(self.num_filled, other.num_filled),
            max(self.ended_s, other.ended_s),
            self.num_workers + other.num_workers,
        )


@dataclass(slots=True)
class StepResults:
    """Of one step, added up over the workers."""

    step: int = 0
    stored: Counter[int] = field(default_factory=Counter)
    """By store, how many workers are done with it."""
    loaded: dict[str, LoadResult] = field(default_factory=dict)
    """By request."""

    def __bool__(self) -> bool:
        return bool(self.step or self.stored or self.loaded)

    def add(self, other: "StepResults") -> None:
        """Take in what other workers are done with."""
        self.step = max(self.step, other.step)
        self.stored.update(other.stored)
        for request_id, loaded in other.loaded.items():
            self.note_loaded(request_id, loaded)

    def note_loaded(self, request_id: str, loaded: LoadResult) -> None:
        """Take in how a load went."""
        before = self.loaded.get(request_id)
        self.loaded[request_id] = loaded if before is None else before.joined(loaded)


class WorkerReports:
    """Kept by any thread until vLLM takes them, in its own order of calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = StepResults()
        self._received: set[str] = set()
        self._missing: set[int] = set()

    def end_load(self, order: LoadJob, num_filled: int) -> None:
        """Note that a load is over; nothing writes to its blocks any more."""
        empty = order.into[num_filled:]
        with self._lock:
            self._missing.update(block for blocks in empty for block in blocks if block >= 0)
            self._received.add(order.request_id)
            self._results.note_loaded(order.request_id, LoadResult(num_filled, time.monotonic()))

    def end_store(self, order: StoreJob) -> None:
        """Note that a store is over; nothing reads its blocks any more."""
        with self._lock:
            self._results.stored[order.number] += 1

    def refuse(self, orders: Iterable[LoadJob | StoreJob]) -> None:
        """Note that nothing comes of these."""
        for order in orders:
            if isinstance(order, LoadJob):
                self.end_load(order, 0)
            else:
                self.end_store(order)

    def take_received(self) -> set[str]:
        """Take the requests whose loads are over."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def take_missing(self) -> set[int]:
        """Take the blocks of vLLM that no load has filled."""
        with self._lock:
            missing, self._missing = self._missing, set()
        return missing

    def take_results(self, step: int) -> StepResults | None:
        """Take what the scheduler half waits for in this step, if there is something."""
        with self._lock:
            results, self._results = self._results, StepResults()
        results.step = step
        return results or None
