"""Threads for calls that block: bounded, watched, and never waited for.

A system call on a dead disk cannot be interrupted. Its thread is then lost until the disk answers,
so every thread here is a daemon thread, which no exit of the process waits for, and the number of
calls that are late can be asked for at any time.
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
"""Past its limit by this much a call hangs: one that just misses it comes back by itself."""


@dataclass(frozen=True, slots=True)
class LateCall:
    """A call that should have come back by now."""

    name: str
    seconds: float
    """Since it began."""


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    name: str
    limit_ns: int


class WorkerPool:
    """Up to ``num_threads`` threads, started as they are needed, and a queue before them."""

    def __init__(self, name: str, num_threads: int, queued_max: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: queue.Queue[_Work | None] = queue.Queue(queued_max)
        self._lock = threading.Lock()
        self._num_started = 0
        self._running: dict[int, tuple[_Work, int]] = {}
        """By thread: what it does, and since when."""
        self.num_calls = 0
        """Those under way, or waiting."""
        self._is_stopped = False

    def submit(self, run: Callable[[], None], name: str, limit_ns: int) -> bool:
        """Have a thread do ``run``, which raises nothing; False where too much waits already.

        It hangs once it has taken longer than ``limit_ns``, its wait not counted.
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
                with contextlib.suppress(RuntimeError):  # none is to be had: the others do it
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                    self._num_started += 1
            if not self._num_started:
                self._queue.get_nowait()  # nobody would come for it
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
        """Take nothing more; what waits is still done, and then the threads end."""
        with self._lock:
            self._is_stopped = True
            with contextlib.suppress(queue.Full):  # then nobody is idle, who would have to be told
                self._queue.put_nowait(None)

    def stop(self) -> None:
        """Begin nothing more; what is being done goes on, and its threads end after it."""
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
            except Exception:  # a bug; the thread is not to be lost by it
                _log.exception("a call broke", call=work.name, thread=self._name)
            finally:
                with self._lock:
                    del self._running[me]
                    self.num_calls -= 1
        # The others are told too, where there are more of them than fit into the queue.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)


def run_in_thread(call: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Make a call on a thread that no exit waits for; wait for the result with a deadline.

    Unlike asyncio's own executor, whose threads are joined when the loop ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(publish: Callable[[], None]) -> None:
        if not future.done():  # else nobody waits any more
            publish()

    def run() -> None:
        try:
            publish = partial(future.set_result, call())
        except BaseException as error:  # the caller's, whatever it is
            publish = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, publish)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
