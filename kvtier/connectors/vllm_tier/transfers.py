"""Jobs: chunks copied between vLLM's CPU tier and the arena, on threads.

Rules
-----
* Each job is reported once. From then on nothing touches vLLM's memory for it: a job that is
  reported before its thread is done is void, and that is looked at, under a lock, before each copy.
* Blocks are copied whole, and a loaded one counts when its lease still held after the copy.
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

from kvtier.client import Client, LoadedBlock
from kvtier.connectors.vllm_tier.chain import ChunkRun
from kvtier.core.identity import NO_TENANT, BlockHash
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["ChunkJob", "ChunkTransfers", "Ended"]

_log = Log("kvtier.vllm")

_NUM_READERS = 4
_OPEN_LOADS_MAX = 256
"""vLLM has one for each waiting request that has hits."""

_OPEN_STORES_MAX = 64
"""Each holds chunks of vLLM's CPU tier for as long as it waits; more are not stored."""


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """What a job is about."""

    job: int
    request_id: str
    traits: RequestTraits = NO_TRAITS
    hashes: Sequence[BlockHash] = ()
    runs: Sequence[ChunkRun] = ()
    decision: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over."""

    job: int
    is_load: bool
    request_id: str = ""
    is_whole: bool = False
    """All of it was done; a store also where the daemon did not want it."""
    names: Sequence[bytes] = ()
    """The chunks that were loaded."""
    missing: Sequence[bytes] = ()
    """Those that were to be loaded and were not."""
    num_bytes: int = 0
    seconds: float = 0.0


class _Void(Exception):
    """The job was reported meanwhile."""


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
        """Report the job; None if it was reported before."""
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
    """Uses a client, which it does not close. Hooks are called by vLLM's scheduling thread."""

    def __init__(self, client: Client, chunks: memoryview) -> None:
        """``chunks`` is vLLM's CPU tier, one row of bytes a chunk."""
        self._client = client
        self._rows: npt.NDArray[np.uint8] | None = np.asarray(chunks).view(np.uint8)
        self._open: set[_Job] = set()
        self._ended: deque[Ended] = deque()
        self._changed = threading.Condition()
        self._faults = RateLimitedLog(_log)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kvtier-load")
        self._writer = ThreadPoolExecutor(1, "kvtier-store")

    def load(self, order: ChunkJob, num_chunks: int) -> None:
        """Begin a load of ``num_chunks``; what of them ``order`` lacks does not come."""
        job = _Job(order, True, num_chunks)
        self._begin(job, self._readers, self._load, _OPEN_LOADS_MAX)

    def store(self, order: ChunkJob, num_chunks: int) -> None:
        """Begin a store of ``num_chunks``; what of them ``order`` lacks is not stored."""
        job = _Job(order, False, num_chunks)
        self._begin(job, self._writer, self._store, _OPEN_STORES_MAX)

    def take_ended(self) -> list[Ended]:
        """Take the jobs that have ended since the last call."""
        with self._changed:
            ended, self._ended = list(self._ended), deque()
        return ended

    def drain(self, timeout_s: float) -> None:
        """Wait until every job has ended; those that have not in time end now, and badly."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)
            left = list(self._open)
        for job in left:
            self._end(job, is_whole=False)  # waits for the copy of one block, if one is under way
        with self._changed:  # for those that were just ending by themselves
            self._changed.wait_for(lambda: not self._open, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End every job, and let go of vLLM's memory."""
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
        except Exception:  # no thread was to be had; the work may be queued all the same
            self._faults.exception("a job of the tier did not begin", job=job.order.job)
        if not is_begun:
            self._end(job, is_whole=False)

    def _run(self, job: _Job, carry_out: Callable[[_Job], bool]) -> None:
        is_whole = False
        try:
            is_whole = not job.is_void and carry_out(job)
        except (DaemonUnavailable, _Void):
            pass  # the client has said so, or there is nobody to say it to
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
        ends_s = job.began_s + (order.wait_s or self._client.deadlines.load_s)
        for run in order.runs:
            self._load_run(job, run, ends_s - time.monotonic())
        return len(job.names) == job.num_chunks

    def _load_run(self, job: _Job, run: ChunkRun, left_s: float) -> None:
        """Copy blocks as they come, and note which are good."""
        if left_s <= 0:
            return
        order = job.order
        hashes = order.hashes[: run.first + len(run.chunks)]
        for item in self._client.load(
            NO_TENANT, hashes, run.first, decision=order.decision, timeout_s=left_s
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
            return False  # its turn came too late, and others wait behind it
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

    # No name is given to vLLM's memory here: whatever has one keeps vLLM from letting go of it.

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
