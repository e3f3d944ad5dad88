"""Jobs that the scheduler half gives to the workers, and their results."""

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.core.identity import BlockHash
from kvtier.core.request import NO_TRAITS, RequestTraits

__all__ = [
    "LoadJob",
    "LoadResult",
    "StepJobs",
    "StepResults",
    "StoreJob",
    "WorkerReports",
]

_Chain = tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to load into vLLM's, from block ``first`` of the chain on."""

    request_id: str
    tenant: bytes
    chains: tuple[_Chain, ...]
    """Block hashes by rank."""
    first: int
    into: tuple[tuple[int, ...], ...]
    """For each kvtier block its vLLM blocks; -1 for those whose tokens vLLM has."""
    decisions: tuple[int, ...] = ()
    """Numbers of the restore plans, by rank."""
    good_until_s: float = 0.0
    """End of the lease, on the monotonic clock, which all processes of a machine share."""
    traceparent: str = ""
    """The request's trace context; empty if it is not traced."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Blocks to store, from block ``first`` of the chain on; vLLM keeps them until the result."""

    number: int
    tenant: bytes
    chains: tuple[_Chain, ...]
    """Block hashes by rank."""
    first: int
    blocks: tuple[tuple[int, ...], ...]
    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    traceparent: str = ""


@dataclass(slots=True)
class StepJobs:
    """The jobs of one step, the same for every worker."""

    step: int = 0
    """The step's number, returned with its results; 0: the step computes nothing."""
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load, over the workers that have ended it."""

    num_filled: int
    """Leading blocks that all these workers have filled."""
    ended_s: float
    """When the last of them ended, on the monotonic clock."""
    num_workers: int = 1

    def joined(self, other: "LoadResult") -> "LoadResult":
        """Return the result over these and other workers."""
        return LoadResult(
            min(self.num_filled, other.num_filled),
            max(self.ended_s, other.ended_s),
            self.num_workers + other.num_workers,
        )


@dataclass(slots=True)
class StepResults:
    """The results of one step, summed over the workers."""

    step: int = 0
    stored: Counter[int] = field(default_factory=Counter)
    """How many workers have ended a store, by its number."""
    loaded: dict[str, LoadResult] = field(default_factory=dict)
    """Results of loads by request id."""

    def __bool__(self) -> bool:
        return bool(self.step or self.stored or self.loaded)

    def add(self, other: "StepResults") -> None:
        """Add the results of other workers."""
        self.step = max(self.step, other.step)
        self.stored.update(other.stored)
        for request_id, loaded in other.loaded.items():
            self.note_loaded(request_id, loaded)

    def note_loaded(self, request_id: str, loaded: LoadResult) -> None:
        """Add the result of a load."""
        before = self.loaded.get(request_id)
        self.loaded[request_id] = loaded if before is None else before.joined(loaded)


class WorkerReports:
    """Collects a worker's results, from any thread, until vLLM takes them.

    Every job is reported exactly once, whether it succeeds or not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = StepResults()
        self._received: set[str] = set()
        self._missing: set[int] = set()

    def end_load(self, job: LoadJob, num_filled: int) -> None:
        """Record that a load has ended; nothing writes to its blocks any more."""
        empty = job.into[num_filled:]
        with self._lock:
            self._missing.update(block for blocks in empty for block in blocks if block >= 0)
            self._received.add(job.request_id)
            self._results.note_loaded(job.request_id, LoadResult(num_filled, time.monotonic()))

    def end_store(self, job: StoreJob) -> None:
        """Record that a store has ended; nothing reads its blocks any more."""
        with self._lock:
            self._results.stored[job.number] += 1

    def refuse(self, jobs: Iterable[LoadJob | StoreJob]) -> None:
        """Record that these jobs are not carried out."""
        for job in jobs:
            if isinstance(job, LoadJob):
                self.end_load(job, 0)
            else:
                self.end_store(job)

    def take_received(self) -> set[str]:
        """Take the requests whose loads have ended."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def take_missing(self) -> set[int]:
        """Take the vLLM blocks that loads left unfilled."""
        with self._lock:
            missing, self._missing = self._missing, set()
        return missing

    def take_results(self, step: int) -> StepResults | None:
        """Take the results for the scheduler half; None if there are none."""
        with self._lock:
            results, self._results = self._results, StepResults()
        results.step = step
        return results or None
