"""Jobs that copy chunks between vLLM's CPU tier and the arena, on threads.

Rules
-----
* Each job is reported once. From then on nothing accesses vLLM's memory for it: a job reported
  before its thread has ended is void, which is checked under a lock before each copy.
* Blocks are copied whole, and a loaded block counts if its lease still held after the copy.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.client import Client, FoundBlocks, LoadedBlock
from kvtier.connectors.vllm_tier.chain import ChunkRun
from kvtier.core.identity import NO_TENANT, BlockHash
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["ChunkJob", "ChunkTransfers", "Ended"]

_log = Log("kvtier.vllm")

_NUM_READERS = 4
_OPEN_LOADS_MAX = 256
"""vLLM has one load for each waiting request with hits."""

_OPEN_STORES_MAX = 64
"""Each store holds chunks of vLLM's CPU tier while it waits; further chunks are not stored."""


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """The blocks of a job."""

    job: int
    request_id: str
    traits: RequestTraits = NO_TRAITS
    hashes: Sequence[BlockHash] = ()
    runs: Sequence[ChunkRun] = ()
    found: FoundBlocks | None = None
    """The lookup that a load follows, with its plan."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended."""

    job: int
    is_load: bool
    request_id: str = ""
    is_whole: bool = False
    """Whether the whole job succeeded; true for a store if the daemon declined the blocks."""
    names: Sequence[bytes] = ()
    """The chunks that were loaded."""
    missing: Sequence[bytes] = ()
    """The chunks that were not loaded."""
    num_bytes: int = 0
    seconds: float = 0.0


class _Void(Exception):
    """The job was reported already."""


@dataclass(slots=True, eq=False)
class _Job:
    order: ChunkJob
    is_load: bool
    num_chunks: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_void: bool = False
    began_s: float = field(default_factory=time.monotonic)
    names: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def end(self, *, is_whole: bool) -> Ended | None:
        """Return the job's report; None if it was reported before."""
        with self.lock:
            if self.is_void:
                return None
            self.is_void = True
        wanted = [name for run in self.order.runs for name in run.names] if self.is_load else []
        come = set(self.names)
        return Ended(
            self.order.job,
            self.is_load,
            self.order.request_id,
            is_whole,
            tuple(self.names),
            [name for name in wanted if name not in come],
            self.num_bytes,
            time.monotonic() - self.began_s,
        )


class ChunkTransfers:
    """Runs jobs with a client, which it does not close. Call it on vLLM's scheduler thread."""

    def __init__(self, client: Client, chunks: memoryview) -> None:
        """``chunks`` is vLLM's CPU tier, one row of bytes per chunk."""
        self._client = client
        self._rows: npt.NDArray[np.uint8] | None = np.asarray(chunks).view(np.uint8)
        self._open: set[_Job] = set()
        self._ended: deque[Ended] = deque()
        self._changed = threading.Condition()
        self._faults = RateLimitedLog(_log)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kvtier-load")
        self._writer = ThreadPoolExecutor(1, "kvtier-store")

    def load(self, order: ChunkJob, num_chunks: int) -> None:
        """Start a load of ``num_chunks``; those that ``order`` lacks are not loaded."""
        job = _Job(order, True, num_chunks)
        self._begin(job, self._readers, self._load, _OPEN_LOADS_MAX)

    def store(self, order: ChunkJob, num_chunks: int) -> None:
        """Start a store of ``num_chunks``; those that ``order`` lacks are not stored."""
        job = _Job(order, False, num_chunks)
        self._begin(job, self._writer, self._store, _OPEN_STORES_MAX)

    def take_ended(self) -> list[Ended]:
        """Take the jobs that ended since the last call."""
        with self._changed:
            ended, self._ended = list(self._ended), deque()
        return ended

    def drain(self, timeout_s: float) -> None:
        """Wait until every job has ended; those that have not in time fail now."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)
            left = list(self._open)
        for job in left:
            self._end(job, is_whole=False)  # waits for the copy of one block at most
        with self._changed:  # for those that were just ending
            self._changed.wait_for(lambda: not self._open, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End every job, and release vLLM's memory."""
        self.drain(timeout_s)
        self._rows = None
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self,
        job: _Job,
        threads: ThreadPoolExecutor,
        carry_out: Callable[[_Job], bool],
        open_max: int,
    ) -> None:
        with self._changed:
            has_room = sum(each.is_load == job.is_load for each in self._open) < open_max
            self._open.add(job)
        is_begun = False
        try:
            if has_room and job.order.runs and self._client.is_attached:
                threads.submit(partial(self._run, job, carry_out))
                is_begun = True
        except Exception:  # no thread could be started; the work may still be queued
            self._faults.exception("a job of the tier did not start", job=job.order.job)
        if not is_begun:
            self._end(job, is_whole=False)

    def _run(self, job: _Job, carry_out: Callable[[_Job], bool]) -> None:
        is_whole = False
        try:
            is_whole = not job.is_void and carry_out(job)
        except (DaemonUnavailable, _Void):
            pass  # already logged, or reported already
        except Exception:
            self._faults.exception("a job of the tier failed", job=job.order.job)
        finally:
            self._end(job, is_whole=is_whole)

    def _end(self, job: _Job, *, is_whole: bool) -> None:
        ended = job.end(is_whole=is_whole)
        if ended is None:
            return
        with self._changed:
            self._open.discard(job)
            self._ended.append(ended)
            self._changed.notify_all()

    def _load(self, job: _Job) -> bool:
        order = job.order
        timeout_s = self._client.deadlines.load_s
        if order.found is not None:
            timeout_s = order.found.load_timeout_s(timeout_s)
        ends_s = job.began_s + timeout_s
        for run in order.runs:
            self._load_run(job, run, ends_s - time.monotonic())
        return len(job.names) == job.num_chunks

    def _load_run(self, job: _Job, run: ChunkRun, left_s: float) -> None:
        """Copy blocks as they arrive, and record which are good."""
        if left_s <= 0:
            return
        order = job.order
        hashes = order.hashes[: run.first + len(run.chunks)]
        decision = order.found.decision if order.found else 0
        for item in self._client.load(
            NO_TENANT, hashes, run.first, decision=decision, timeout_s=left_s
        ):
            if not isinstance(item, LoadedBlock):
                break
            place = item.index - run.first
            self._copy_in(job, run.chunks[place], item.payload)
            if time.monotonic() > item.good_until_s:
                raise DaemonSlow("the lease ran out while copying")
            job.names.append(run.names[place])
            job.num_bytes += len(item.payload)

    def _store(self, job: _Job) -> bool:
        order = job.order
        if time.monotonic() > job.began_s + self._client.deadlines.store_s:
            return False  # it waited too long for its turn, and others queue behind it
        for run in order.runs:
            hashes = order.hashes[: run.first + len(run.chunks)]
            fill = partial(self._fill, job, run)
            self._client.store(NO_TENANT, hashes, run.first, fill, traits=order.traits)
        return sum(len(run.chunks) for run in order.runs) == job.num_chunks

    def _fill(
        self, job: _Job, run: ChunkRun, indexes: Sequence[int], slots: Sequence[memoryview]
    ) -> Generator[None]:
        for index, slot in zip(indexes, slots, strict=True):
            self._copy_out(job, run.chunks[index - run.first], slot)
            job.num_bytes += len(slot)
            yield

    # No local variable refers to vLLM's memory: a reference would keep vLLM from freeing it.

    def _copy_in(self, job: _Job, chunk: int, block: memoryview) -> None:
        with job.lock:
            if job.is_void or self._rows is None:
                raise _Void
            self._rows[chunk] = np.frombuffer(block, np.uint8)

    def _copy_out(self, job: _Job, chunk: int, block: memoryview) -> None:
        with job.lock:
            if job.is_void or self._rows is None:
                raise _Void
            np.frombuffer(block, np.uint8)[:] = self._rows[chunk]
