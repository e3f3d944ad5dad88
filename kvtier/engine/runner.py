"""Runs the engine on its own thread, which steps while there is work and sleeps otherwise.

Only this thread touches the engine; other threads queue commands for it. Every wait has a deadline,
and every request gets its last output, whatever fails.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvtier.engine.engine import Engine
from kvtier.engine.request import (
    Deliver,
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    RequestRefused,
)
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["EngineRunner"]

_log = Log("kvtier.engine")

_Result = TypeVar("_Result")

_SLEEP_MAX_S = 0.25
"""Longest sleep: a missed wake-up costs this much instead of a hang."""

_STUCK_AFTER_NS = 60_000_000_000
"""Several times the duration of a step of 512 tokens on a slow CPU, or a port's deadlines: seconds
each."""

_COMMANDS_MAX = 4096
"""Far more commands than arrive between two steps; more are rejected."""

_STOPPING = "the engine is stopping"


class EngineRunner:
    """Runs an engine on its own thread, for callers on any thread."""

    def __init__(self, engine: Engine, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.engine = engine
        self._clock_ns = clock_ns
        self._faults = RateLimitedLog(_log)
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[object, tuple[str, Deliver]] = {}
        """Requests whose last output is still to come, by a unique key."""
        self._changed = threading.Condition()
        self._is_woken = False
        self._is_draining = False
        self._is_stopping = False
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)
        self.last_progress_ns = clock_ns()
        engine.port.bind(self.wake)

    # From any thread

    @property
    def is_ready(self) -> bool:
        """Return whether requests are accepted."""
        return self._thread.is_alive() and not (self._is_draining or self._is_stopping)

    @property
    def is_stuck(self) -> bool:
        """Return whether there was work but no progress for a minute."""
        is_late = self._clock_ns() - self.last_progress_ns > _STUCK_AFTER_NS
        return not self._idle.is_set() and is_late

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Accept a request; raises RequestRefused or QueueFull, and then delivers nothing.

        ``deliver`` is called on the engine's thread, the last time with a finish reason. If the
        engine's thread hangs, ``stop`` makes that last call.
        """
        self.engine.check_request(request)
        key = object()

        def deliver_open(output: Output) -> None:
            has_more = output.finish is None
            if (self._open.get(key) if has_more else self._open.pop(key, None)) is not None:
                deliver(output)

        def command() -> None:
            try:
                self.engine.submit(request, deliver_open, self._clock_ns())
            except (QueueFull, RequestRefused) as refusal:
                deliver_open(_error(request.request_id, str(refusal)))

        with self._changed:
            if not self.is_ready:
                raise QueueFull(_STOPPING)
            waiting = self.engine.num_waiting + len(self._commands)
            if waiting >= min(_COMMANDS_MAX, self.engine.settings.max_num_waiting):
                raise QueueFull(f"too many requests are waiting ({waiting})")
            self._open[key] = (request.request_id, deliver)
            self._push(command)

    def abort(self, request_id: str) -> None:
        """End a request soon, if it is still present; it gets its last output."""
        with self._changed:
            self._push(lambda: self._abort(request_id))

    def call(self, function: Callable[[Engine], _Result], deadline_s: float = 10.0) -> _Result:
        """Run ``function`` between two steps and return its result; raises TimeoutError."""
        future: Future[_Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self.engine))
            except Exception as error:  # raised on the caller's thread
                future.set_exception(error)

        with self._changed:
            self._push(command)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise

    def wake(self) -> None:
        """Make the engine poll its port."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def drain(self) -> None:
        """Accept no more requests; accepted ones continue."""
        with self._changed:  # afterwards no call of submit is in progress
            self._is_draining = True

    def await_idle(self, timeout_s: float) -> bool:
        """Wait until all requests and their stores have ended; returns False on timeout."""
        return self._idle.wait(timeout_s)

    def stop(self, deadline_s: float = 10.0) -> bool:
        """End all requests and the thread; returns False if a step still runs at the deadline.

        Requests get their last output in either case.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        for key in list(self._open):
            if (left := self._open.pop(key, None)) is not None:  # otherwise the engine was faster
                request_id, deliver = left
                deliver(_error(request_id, _STOPPING))
        return not self._thread.is_alive()

    # On the engine's thread

    def _push(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._idle.clear()
        self._changed.notify()

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def _run(self) -> None:
        while not self._is_stopping:
            has_moved = self._run_commands()
            try:
                has_moved |= self.engine.step(self._clock_ns())
            except Exception as error:  # a bug in kvtier: no request may hang because of it
                self._faults.exception("engine failed between steps")
                self.engine.fail_all(f"engine failed: {error}")
            if has_moved:
                self.last_progress_ns = self._clock_ns()
                continue
            self._sleep()
        self._run_commands()
        self.engine.fail_all(_STOPPING)
        self._idle.set()
        self.engine.port.close()

    def _run_commands(self) -> bool:
        """Run the queued commands; returns whether there were any."""
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            self._is_woken = False
        for command in commands:
            try:
                command()
            except Exception:  # commands report errors to their caller: the rest are bugs
                self._faults.exception("engine command failed")
        return bool(commands)

    def _sleep(self) -> None:
        with self._changed:
            if self.engine.is_idle and not self._commands:
                self._idle.set()
                self.last_progress_ns = self._clock_ns()
            else:
                self._idle.clear()
            if not (self._is_woken or self._commands or self._is_stopping):
                self._changed.wait(_SLEEP_MAX_S)


def _error(request_id: str, problem: str) -> Output:
    return Output(request_id, (), FinishReason.ERROR, error=problem)
