"""The worker half: copies between vLLM's tensors and the arena, on threads of its own.

Rules
-----
* vLLM keeps the blocks of a store or load until its result is reported, so a step never waits.
* Blocks that are not loaded in time are reported as missing; vLLM computes them.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvtier.client import Client, LoadedBlock
from kvtier.connectors.kit.copies import BlockCopier
from kvtier.connectors.kit.device import Fence, is_reached
from kvtier.connectors.kit.guard import Threads
from kvtier.connectors.vllm.jobs import LoadJob, StepJobs, StoreJob, WorkerReports
from kvtier.connectors.vllm.stats import (
    LOAD_BYTES,
    LOAD_SECONDS,
    MISSING_BLOCKS,
    STAGED_BYTES,
    STORE_BLOCKS,
    STORE_SECONDS,
    Counts,
    StatCounters,
)
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.observe.log import Log
from kvtier.observe.trace import TRACES

__all__ = ["WorkerHalf"]

_log = Log("kvtier.vllm")

_ATTACH_S = 2.0
_ATTACH_SOON_S = 0.25
"""How long a store and a load wait for this half's session, which may attach to a new daemon later
than the scheduler half's."""

_CLOSE_S = 5.0
"""Running loads and stores have deadlines, but a copy on a hanging device has none."""

_QUEUED_MAX = 1024
"""Queued jobs; further ones are not carried out. vLLM has a few hundred requests."""

_Job = TypeVar("_Job", LoadJob, StoreJob)


class WorkerHalf:
    """Carries out jobs with a client; ``close`` also closes the client."""

    def __init__(
        self,
        client: Client,
        copies: BlockCopier,
        rank: int = 0,
        reports: WorkerReports | None = None,
    ) -> None:
        self.counters = StatCounters()
        self.reports = reports or WorkerReports()
        self._client = client
        self._copies = copies
        self._rank = rank
        self._readers = Threads(_log, "kvtier-load", copies.num_readers, _QUEUED_MAX)
        self._writer = Threads(_log, "kvtier-store", 1, _QUEUED_MAX)

    def load(self, jobs: StepJobs) -> None:
        """Start the loads of a step, once vLLM's earlier work on their blocks is complete."""
        self._begin(self._readers, self._load, jobs.loads)

    def store(self, jobs: StepJobs) -> None:
        """Start the stores of a step, once vLLM has computed its blocks.

        A store that cannot start within the store deadline is dropped: with a long prompt on a slow
        machine, the step itself may take longer.
        """
        until_s = time.monotonic() + self._client.deadlines.store_s
        self._begin(self._writer, partial(self._store, begin_until_s=until_s), jobs.stores)

    def take_counts(self) -> Counts:
        """Take the counts since the last call."""
        return self.counters.take()

    def close(self) -> None:
        """Finish running jobs within a few seconds, and end the session."""
        ends_s = time.monotonic() + _CLOSE_S
        threads = (self._readers, self._writer)
        are_over = [each.close(ends_s - time.monotonic()) for each in threads]
        self._client.close()
        if all(are_over):
            self._copies.close()
        else:  # the copy may still write to its buffers
            _log.warning("a copy does not end; its buffers are not freed")

    def _begin(
        self,
        threads: Threads,
        work: Callable[[_Job, Fence], None],
        jobs: Sequence[_Job],
    ) -> None:
        """Pass jobs to threads, which report them; jobs that no thread takes are refused."""
        num_begun = 0
        try:
            fence = self._copies.fence() if jobs else None
            for job in jobs:
                assert fence is not None
                if not threads.submit(work, job, fence):
                    break
                num_begun += 1
        finally:
            self.reports.refuse(jobs[num_begun:])

    def _load(self, job: LoadJob, fence: Fence) -> None:
        num_filled, began_s = 0, time.monotonic()
        try:
            with TRACES.forward("load", job.traceparent) as mark:
                for num_filled in self._filled(job, fence):  # noqa: B007 - the last one counts
                    pass
                mark.set(ordered_blocks=len(job.into), loaded_blocks=num_filled)
            self.counters.add(LOAD_SECONDS, time.monotonic() - began_s)
        except DaemonUnavailable:
            pass  # already logged; vLLM computes
        finally:
            self.counters.add(MISSING_BLOCKS, len(job.into) - num_filled)
            self.reports.end_load(job, num_filled)

    def _filled(self, job: LoadJob, fence: Fence) -> Iterator[int]:
        """Copy blocks as they arrive, and yield the number of good ones."""
        left_s = min(self._client.deadlines.load_s, job.good_until_s - time.monotonic())
        if left_s <= 0 or not is_reached(fence, left_s):
            return
        self._client.wait_attached(min(left_s, _ATTACH_SOON_S))
        hashes, decision = job.chains[self._rank], job.decisions[self._rank]
        for item in self._client.load(
            job.tenant, hashes, job.first, decision=decision, is_held=True, timeout_s=left_s
        ):
            if not isinstance(item, LoadedBlock):
                return
            self._note_staged([item.payload])
            self._copies.scatter([item.payload], [job.into[item.index - job.first]])
            if time.monotonic() > item.good_until_s:
                raise DaemonSlow("the lease ran out while copying")
            self.counters.add(LOAD_BYTES, len(item.payload))
            yield item.index - job.first + 1

    def _store(self, job: StoreJob, fence: Fence, begin_until_s: float) -> None:
        def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
            self._note_staged(slots)
            blocks = [job.blocks[index - job.first] for index in indexes]
            return self._copies.gather(blocks, slots)

        kept, outcome, began_s = 0, "failed", time.monotonic()
        try:
            left_s = begin_until_s - time.monotonic()
            if left_s <= 0 or not is_reached(fence, left_s):
                return
            self._client.wait_attached(_ATTACH_S)
            with TRACES.forward("store", job.traceparent) as mark:
                kept = self._client.store(
                    job.tenant,
                    job.chains[self._rank],
                    job.first,
                    fill,
                    traits=job.traits,
                    num_prompt_blocks=job.num_prompt_blocks,
                )
                mark.set(offered_blocks=len(job.blocks), kept_blocks=kept)
            outcome = "refused"
            self.counters.add(STORE_SECONDS, time.monotonic() - began_s)
        except DaemonUnavailable:
            pass  # offered again when a later request has these blocks
        finally:
            self.counters.add(STORE_BLOCKS, kept, "kept")
            self.counters.add(STORE_BLOCKS, len(job.blocks) - kept, outcome)
            self.reports.end_store(job)

    def _note_staged(self, slots: Sequence[memoryview]) -> None:
        staged = [len(slot) for slot in slots if self._copies.is_staged(slot)]
        self.counters.add(STAGED_BYTES, sum(staged))
