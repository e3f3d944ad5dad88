"""The worker half: copies between vLLM's tensors and the arena, on threads of its own.

Rules
-----
* vLLM keeps the blocks of an open store, and of an open load, until their result is told: nothing
  here has to hurry, and nothing is waited for in a step.
* Whatever does not come in time is reported as blocks that are not there; vLLM computes them.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvtier.client import Client, LoadedBlock
from kvtier.connectors.kit.copies import BlockCopier
from kvtier.connectors.kit.device import Fence, is_reached
from kvtier.connectors.kit.threads import Threads
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
"""The scheduler half may be attached to a new daemon before this one is. A store can wait for that,
a request only a little."""

_CLOSE_S = 5.0
"""Loads and stores under way have deadlines; a copy on a device that hangs has none."""

_QUEUED_MAX = 1024
"""Orders, each with blocks of vLLM's; what is more is not done. vLLM has some hundred requests."""

_Order = TypeVar("_Order", LoadJob, StoreJob)


class WorkerHalf:
    """Carries out orders with a client, which it closes with itself."""

    def __init__(
        self,
        client: Client,
        copies: BlockCopier,
        rank: int = 0,
        reports: WorkerReports | None = None,
    ) -> None:
        self.tally = StatCounters()
        self.reports = reports or WorkerReports()
        self._client = client
        self._copies = copies
        self._rank = rank
        self._readers = Threads(_log, "kvtier-load", copies.num_readers, _QUEUED_MAX)
        self._writer = Threads(_log, "kvtier-store", 1, _QUEUED_MAX)

    def load(self, orders: StepJobs) -> None:
        """Begin the loads of a step, once what vLLM has begun on their blocks is over."""
        self._begin(self._readers, self._load, orders.loads)

    def store(self, orders: StepJobs) -> None:
        """Begin the stores of a step, once its blocks, which vLLM has begun on, are computed.

        What cannot begin within the time of a store from now on is left: the step itself may have
        taken longer than that, with a long prompt on a slow machine.
        """
        until_s = time.monotonic() + self._client.deadlines.store_s
        self._begin(self._writer, partial(self._store, begin_until_s=until_s), orders.stores)

    def take_counts(self) -> Counts:
        """Take what was counted since the last call."""
        return self.tally.take()

    def close(self) -> None:
        """Finish what is under way, within some seconds, and end the session."""
        ends_s = time.monotonic() + _CLOSE_S
        threads = (self._readers, self._writer)
        are_over = [each.close(ends_s - time.monotonic()) for each in threads]
        self._client.close()
        if all(are_over):
            self._copies.close()
        else:  # it may write to its buffers still
            _log.warning("a copy does not end, and is left to itself")

    def _begin(
        self,
        threads: Threads,
        work: Callable[[_Order, Fence], None],
        orders: Sequence[_Order],
    ) -> None:
        """Hand orders to threads, which report them; of those that none takes nothing comes."""
        num_begun = 0
        try:
            fence = self._copies.fence() if orders else None
            for order in orders:
                assert fence is not None
                if not threads.submit(work, order, fence):
                    break
                num_begun += 1
        finally:
            self.reports.refuse(orders[num_begun:])

    def _load(self, order: LoadJob, fence: Fence) -> None:
        num_filled, began_s = 0, time.monotonic()
        try:
            with TRACES.forward("load", order.traceparent) as mark:
                for num_filled in self._filled(order, fence):  # noqa: B007 - the last one counts
                    pass
                mark.set(ordered_blocks=len(order.into), loaded_blocks=num_filled)
            self.tally.add(LOAD_SECONDS, time.monotonic() - began_s)
        except DaemonUnavailable:
            pass  # the client has said so, and vLLM computes
        finally:
            self.tally.add(MISSING_BLOCKS, len(order.into) - num_filled)
            self.reports.end_load(order, num_filled)

    def _filled(self, order: LoadJob, fence: Fence) -> Iterator[int]:
        """Copy blocks as they come, and yield how many are good."""
        left_s = min(self._client.deadlines.load_s, order.good_until_s - time.monotonic())
        if left_s <= 0 or not is_reached(fence, left_s):
            return
        self._client.wait_attached(min(left_s, _ATTACH_SOON_S))
        hashes, decision = order.chains[self._rank], order.decisions[self._rank]
        for item in self._client.load(
            order.tenant, hashes, order.first, decision=decision, is_held=True, timeout_s=left_s
        ):
            if not isinstance(item, LoadedBlock):
                return
            self._note_staged([item.payload])
            self._copies.scatter([item.payload], [order.into[item.index - order.first]])
            if time.monotonic() > item.good_until_s:
                raise DaemonSlow("the lease ran out while copying")
            self.tally.add(LOAD_BYTES, len(item.payload))
            yield item.index - order.first + 1

    def _store(self, order: StoreJob, fence: Fence, begin_until_s: float) -> None:
        def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
            self._note_staged(slots)
            blocks = [order.blocks[index - order.first] for index in indexes]
            return self._copies.gather(blocks, slots)

        kept, outcome, began_s = 0, "failed", time.monotonic()
        try:
            left_s = begin_until_s - time.monotonic()
            if left_s <= 0 or not is_reached(fence, left_s):
                return
            self._client.wait_attached(_ATTACH_S)
            with TRACES.forward("store", order.traceparent) as mark:
                kept = self._client.store(
                    order.tenant,
                    order.chains[self._rank],
                    order.first,
                    fill,
                    traits=order.traits,
                    num_prompt_blocks=order.num_prompt_blocks,
                )
                mark.set(offered_blocks=len(order.blocks), kept_blocks=kept)
            outcome = "refused"
            self.tally.add(STORE_SECONDS, time.monotonic() - began_s)
        except DaemonUnavailable:
            pass  # offered again when a later request has these blocks
        finally:
            self.tally.add(STORE_BLOCKS, kept, "kept")
            self.tally.add(STORE_BLOCKS, len(order.blocks) - kept, outcome)
            self.reports.end_store(order)

    def _note_staged(self, slots: Sequence[memoryview]) -> None:
        staged = [len(slot) for slot in slots if self._copies.is_staged(slot)]
        self.tally.add(STAGED_BYTES, sum(staged))
