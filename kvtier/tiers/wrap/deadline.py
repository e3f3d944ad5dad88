"""DeadlineTier: a call returns by its deadline, whatever the medium does.

A system call on a dead mount or a silent network cannot be interrupted, so each call runs on a
worker thread and the caller stops waiting at the deadline. The thread is then lost until the medium
answers. At most ``num_workers`` can be lost; after that every call fails at once, and the tier is
back by itself as soon as one of them returns.

An abandoned read may still write, and an abandoned write may still read, long after its caller has
put the memory to another use. Reads therefore go to memory of the wrapper's own and are copied on
success, which costs one more pass over the bytes; an abandoned write can at worst store a payload
that its checksum does not fit, which is a miss.
"""

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import TypeVar

from kvtier.core.identity import BlockHeader
from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import TierError, TierTimeout
from kvtier.tiers.base import BlockRead, MissReason, Tier
from kvtier.tiers.check import seconds_left
from kvtier.tiers.wrap.around import AroundTier, Call

__all__ = ["DeadlineTier"]

T = TypeVar("T")


class DeadlineTier(AroundTier):
    """Waits for ``inner`` until the deadline and no longer; loses ``num_workers`` threads at most.

    For callers that cannot keep their buffers untouched until a late call ends; one that can has no
    need of it.
    """

    def __init__(self, inner: Tier, *, num_workers: int | None = None) -> None:
        super().__init__(inner)
        self._num_workers = num_workers or inner.properties.num_workers
        self._idle = threading.BoundedSemaphore(self._num_workers)
        self._lock = threading.Lock()
        self._num_lost = 0
        self._buffers: list[mmap.mmap] = []

    @property
    def num_lost(self) -> int:
        """Return how many threads are in calls that their callers have given up."""
        return self._num_lost

    def around(self, call: Call, step: Callable[[], T]) -> T:
        """Make the call on a thread, and wait for it until the deadline."""
        name = self.properties.name
        if self._num_lost >= self._num_workers:
            raise TierError(f"{name}: stuck in {self._num_lost} calls that never ended")
        if not self._idle.acquire(timeout=seconds_left(call.deadline_ns)):
            raise TierTimeout(f"{name}: every worker is busy")
        future: Future[T] = Future()
        is_lost = threading.Event()
        threading.Thread(
            target=self._run, args=(step, future, is_lost), name=f"{name}-call", daemon=True
        ).start()
        try:
            return future.result(timeout=seconds_left(call.deadline_ns))
        except (FutureTimeout, TierTimeout):
            with self._lock:
                if future.done():
                    return future.result()
                is_lost.set()
                self._num_lost += 1
            raise TierTimeout(f"{name}: no answer to {call.operation} in time") from None

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read into the worker's own memory, and from there into the caller's in time."""
        sizes = [-(-block.payload_bytes // PAGE_BYTES) * PAGE_BYTES for block in blocks]
        buffer = self._take_buffer(max(PAGE_BYTES, sum(sizes)))
        view = memoryview(buffer)
        own: list[BlockRead] = []
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            own.append(replace(block, into=view[start : start + size]))
            start += size
        results = super().read(own, deadline_ns)
        for block, filled, result in zip(blocks, own, results, strict=True):
            if isinstance(result, BlockHeader):
                block.into[: block.payload_bytes] = filled.into[: block.payload_bytes]
        self._give_buffer(buffer)
        return results

    def _run(self, step: Callable[[], T], future: "Future[T]", is_lost: threading.Event) -> None:
        try:
            result = step()
        except BaseException as error:  # the caller's, whatever it is
            fault = error
            self._settle(is_lost, lambda: future.set_exception(fault))
        else:
            self._settle(is_lost, lambda: future.set_result(result))

    def _settle(self, is_lost: threading.Event, publish: Callable[[], None]) -> None:
        with self._lock:
            publish()
            if is_lost.is_set():
                self._num_lost -= 1
        self._idle.release()

    def _take_buffer(self, size_bytes: int) -> mmap.mmap:
        """Return a buffer nobody uses. One that was lost with its call is never given back."""
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or len(buffer) < size_bytes:
            return mmap.mmap(-1, size_bytes)
        return buffer

    def _give_buffer(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if len(self._buffers) < self._num_workers:
                self._buffers.append(buffer)
