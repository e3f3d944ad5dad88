"""Threads for calls that may never end: no exit of Python waits for them.

A file system that hangs, or a device, keeps its caller for ever. Python joins the threads of its
own executors before it exits, so that vLLM would not end either.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["Threads"]


class Threads:
    """Up to ``num_threads``, started as they are needed, and a queue of ``queued_max`` calls."""

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
        """Have a thread call ``call(*of)``; what that raises is logged.

        False where nobody will: too much waits, no thread is to be had, or it is closed.
        """
        with self._lock, suppress(queue.Full):
            if not self._is_closed and self._has_threads():
                self._queue.put_nowait(partial(call, *of))
                return True
        return False

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more, and tell whether what was begun has ended in time."""
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
            with suppress(RuntimeError):  # no more are to be had: those that are there do it
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                self._faults.exception("a thread of the connector failed")
            del call  # with what it holds
