"""Ends the process: orderly on the first signal, at once on the second or after the grace period.

Theory
------
The event loop that stops everything in order may itself be stuck on a disk that does not answer or
a child that cannot be reaped. So signals are handled on a thread of their own, woken by the C level
of the interpreter, and another thread waits for the end of the grace period. Both end the process
by ``os._exit``, which cannot be blocked. The exit code is still 0: blocks reported as written are
on the disk, and the next start recovers them as after a crash.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvtier.observe.log import Log, flush_log

__all__ = ["Reaction", "Stop", "handle_signals"]

_log = Log("kvtier.daemon")

_MARGIN_SHARE = 0.1
_MARGIN_MAX_S = 1.0
"""Part of the grace period that is reserved for ending the process."""

_LAST_LINE_S = 0.3
"""Time limit for the last log line, in case standard error is blocked."""

Reaction = Callable[[signal.Signals], object]
"""Handles a signal, on the thread for signals."""


@contextlib.contextmanager
def handle_signals(reactions: Mapping[signal.Signals, Reaction]) -> Iterator[None]:
    """Handle signals with ``reactions`` on a separate thread; call it on the main thread.

    Unblocks the signals of ``reactions``, so that pending ones are delivered. If a reaction raises,
    that is logged, and later signals are still handled. On exit the signals are ignored, because
    the process is about to exit with its own code.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for number in reactions:
        signal.signal(number, lambda *_: None)
    fd_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        with receiver:
            while received := receiver.recv(1):
                _react(received[0], reactions)

    listener = threading.Thread(target=listen, name="kvtier-signals", daemon=True)
    listener.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, reactions)
    try:
        yield
    finally:
        for number in reactions:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(fd_before)
        sender.close()


def _react(number: int, reactions: Mapping[signal.Signals, Reaction]) -> None:
    try:
        received = signal.Signals(number)
        if received in reactions:
            reactions[received](received)
    except Exception:
        _log.exception("signal handler failed", signal=number)


class Stop:
    """Stops one event loop, once, and ensures that the process ends within ``grace_s``.

    ``end`` ends the process with the given exit code.
    """

    def __init__(
        self, grace_s: float, end: Callable[[int], object] = os._exit, log: Log = _log
    ) -> None:
        self._end_process = end
        self._log = log
        self.stage = "starting"
        """What the process is doing, for the last log line."""
        self.grace_s = grace_s
        """May be changed until the stop begins."""
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self.begun = threading.Event()
        """Set once the stop has begun."""
        self._wake: Callable[[], None] = lambda: None
        self.hanging: Callable[[], str] = str
        """Returns the stuck calls; called from any thread."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the stop begins; from any thread."""
        self.abandon: Callable[[], None] = lambda: None
        """Called if the process ends before the stop is complete; from any thread."""

    @property
    def left_s(self) -> float:
        """Return the time left for an orderly stop; all of it before the stop has begun."""
        margin_s = min(_MARGIN_MAX_S, _MARGIN_SHARE * self.grace_s)
        began_s = self._began_s or time.monotonic()
        return max(0.0, began_s + self.grace_s - margin_s - time.monotonic())

    @property
    def has_begun(self) -> bool:
        """Return whether the stop has begun; from any thread."""
        return self.begun.is_set()

    def request(self, number: signal.Signals) -> None:
        """Begin to stop, or end at once if a stop has begun. From any thread but the loop's."""
        if not self.request_once(number):
            self.cut(number)

    def request_once(self, number: signal.Signals) -> bool:
        """Begin to stop; returns False and changes nothing if that has begun already.

        For signals that arrive several times for one reason: when a terminal closes, both the
        kernel and the shell send SIGHUP.
        """
        if not self.begin():
            return False
        self._wake()
        self._log.info("stopping", signal=number.name, grace_s=self.grace_s)
        return True

    def cut(self, number: signal.Signals) -> None:
        """End the process immediately. From any thread."""
        self._end(f"immediate stop by {number.name}")

    def attach(self) -> asyncio.Event:
        """Return an event of the running loop that is set when the loop should stop."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stopping.set)

        self._wake = wake
        if self.has_begun:
            stopping.set()
        return stopping

    def begin(self) -> bool:
        """Start the grace period; returns False if it has started already."""
        with self._lock:
            if self._began_s is not None:
                return False
            self._began_s = time.monotonic()
            self.begun.set()
        late = threading.Timer(self.grace_s, self._end, ["end of the grace period"])
        late.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread available: a second signal ends it
            late.start()
        self.on_begin()
        return True

    def _end(self, why: str) -> None:
        """End the process now."""
        last_line = threading.Thread(target=self._log_last_line, args=(why,), daemon=True)
        for part in (last_line.start, self.abandon, partial(last_line.join, _LAST_LINE_S)):
            with contextlib.suppress(Exception):  # nothing may keep the process from ending
                part()
        self._end_process(0)

    def _log_last_line(self, why: str) -> None:
        hanging = "; ".join(part for part in (self.stage, self.hanging()) if part)
        self._log.warning("exited before the shutdown was complete", why=why, hanging=hanging)
        flush_log()
