"""Keeps faults out of the engine: hooks that do not raise, threads that do not delay its exit.

A hanging file system or device blocks its caller forever. Python joins the threads of its own
executors before it exits, so the engine would never exit either; ``Threads`` are not joined.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar, cast

from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["Threads", "guarded", "note_fault"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def guarded(log: Log, otherwise: Callable[[], object]) -> Callable[[_Hook], _Hook]:
    """Make a hook return ``otherwise()`` instead of raising into the engine."""

    def decorate(hook: _Hook) -> _Hook:
        faults = RateLimitedLog(log)  # hooks are called at every step

        @wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                faults.exception("a hook of the connector failed", hook=hook.__name__)
                return otherwise()

        return cast("_Hook", call)

    return decorate


def note_fault(faults: RateLimitedLog, done: Future[Any]) -> None:
    """Log the exception of a thread's work, which would be lost otherwise."""
    if done.cancelled():
        return
    try:
        done.result()
    except Exception:
        faults.exception("a thread of the connector failed")


class Threads:
    """Up to ``num_threads`` threads, started on demand, and a queue of ``queued_max`` calls."""

    def __init__(self, log: Log, name: str, num_threads: int, queued_max: int) -> None:
        assert queued_max >= num_threads, "close tells each thread by the queue"
        self._name = name
        self._num_threads = num_threads
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(queued_max)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._faults = RateLimitedLog(log)

    def submit(self, call: Callable[..., object], *of: object) -> bool:
        """Queue ``call(*of)`` for a thread; its exceptions are logged.

        Returns False if it will not run: the queue is full, no thread can be started, or closed.
        """
        with self._lock, suppress(queue.Full):
            if not self._is_closed and self._has_threads():
                self._queue.put_nowait(partial(call, *of))
                return True
        return False

    def close(self, timeout_s: float) -> bool:
        """Start no more calls; returns whether the running ones ended in time."""
        with self._lock:
            self._is_closed = True
            with suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            for _ in self._threads:
                self._queue.put_nowait(None)
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _has_threads(self) -> bool:
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):  # no more can be started: the existing ones do the work
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                self._faults.exception("a thread of the connector failed")
            del call  # and the objects that it refers to
