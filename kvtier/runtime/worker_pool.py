"""Threads for blocking calls: bounded, watched, and never joined.

A system call on a dead disk cannot be interrupted: its thread is lost until the disk answers. So
every thread here is a daemon thread, which never delays the exit of the process, and the pool
reports the calls that are late.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvtier.observe.log import Log

__all__ = ["LateCall", "WorkerPool", "run_in_thread"]

_log = Log("kvtier.node")

T = TypeVar("T")

_LATE_NS = 500_000_000
"""A call this long past its limit hangs; one that just misses its limit returns by itself."""


@dataclass(frozen=True, slots=True)
class LateCall:
    """A call that should have returned already."""

    name: str
    seconds: float
    """Seconds since it started."""


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    name: str
    limit_ns: int


class WorkerPool:
    """Up to ``num_threads`` threads, started on demand, with a bounded queue."""

    def __init__(self, name: str, num_threads: int, queued_max: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: queue.Queue[_Work | None] = queue.Queue(queued_max)
        self._lock = threading.Lock()
        self._num_started = 0
        self._running: dict[int, tuple[_Work, int]] = {}
        """By thread, its call and when it started."""
        self.num_calls = 0
        """Calls running or queued."""
        self._is_stopped = False

    def submit(self, run: Callable[[], None], name: str, limit_ns: int) -> bool:
        """Run ``run``, which raises nothing, on a thread; False if too many calls are queued.

        It hangs once it has run longer than ``limit_ns``; time in the queue does not count.
        """
        with self._lock:
            if self._is_stopped:
                return False
            try:
                self._queue.put_nowait(_Work(run, name, limit_ns))
            except queue.Full:
                return False
            self.num_calls += 1
            if self._num_started < min(self.num_calls, self._num_threads):
                with contextlib.suppress(RuntimeError):  # no new thread: existing ones do it
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                    self._num_started += 1
            if not self._num_started:
                self._queue.get_nowait()  # no thread would take it
                self.num_calls -= 1
                return False
        return True

    def late(self, now_ns: int) -> list[LateCall]:
        """Return the calls that hang, the longest first."""
        with self._lock:
            hanging = [
                LateCall(work.name, (now_ns - since_ns) / 1e9)
                for work, since_ns in self._running.values()
                if now_ns - since_ns > work.limit_ns + _LATE_NS
            ]
        return sorted(hanging, key=lambda call: -call.seconds)

    def retire(self) -> None:
        """Take no more calls; queued calls are still made, and then the threads end."""
        with self._lock:
            self._is_stopped = True
            with contextlib.suppress(queue.Full):  # then no thread is idle, waiting for a stop
                self._queue.put_nowait(None)

    def stop(self) -> None:
        """Start nothing more; running calls go on, and their threads end after them."""
        with self._lock:
            self._is_stopped = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self.num_calls -= self._queue.get_nowait() is not None
            for _ in range(min(self._num_started, self._queue.maxsize)):
                self._queue.put_nowait(None)

    def _work(self) -> None:
        me = threading.get_ident()
        while not (self._is_stopped and self._queue.empty()):
            work = self._queue.get()
            if work is None:
                break
            with self._lock:
                self._running[me] = (work, time.monotonic_ns())
            try:
                work.run()
            except Exception:  # a bug; keep the thread
                _log.exception(
                    "unexpected error in a worker thread", call=work.name, thread=self._name
                )
            finally:
                with self._lock:
                    del self._running[me]
                    self.num_calls -= 1
        # Pass the stop on, in case there are more threads than queue entries.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)


def run_in_thread(call: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Run a call on a thread that does not delay the exit; await the result with a deadline.

    Unlike asyncio's executor, whose threads are joined when the loop ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(publish: Callable[[], None]) -> None:
        if not future.done():  # otherwise nothing waits any more
            publish()

    def run() -> None:
        try:
            publish = partial(future.set_result, call())
        except BaseException as error:  # passed on to the caller
            publish = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, publish)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
