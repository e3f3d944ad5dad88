"""Starts, restarts and stops the engine as a child process of the daemon.

An engine survives a crash of the daemon, and computes everything itself meanwhile. The next daemon
finds it by the lock that it holds, and adopts it instead of starting a second one: the engine
reconnects, and keeps its prefix cache and its clients. An engine with other options is stopped and
replaced.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.daemon.stop import Stop
from kvtier.errors import StartError
from kvtier.lock import acquire_lock, release_lock
from kvtier.observe.log import Log

__all__ = ["Supervisor", "engine_is_running", "engine_lock"]

_log = Log("kvtier.supervisor")

_DRAIN_SHARE = 0.7
"""Share of the grace period for running requests. The rest is for writing blocks to tiers."""

_CUT_SHARE = 0.1
"""Share of the grace period for the engine to then notify the remaining clients."""

_UNWANTED_STOP_S = 20.0
"""Replaces the grace period if only the engine is stopped."""

_SUDDEN_CUT_MS = 1000
"""Time for the engine to notify its clients if the daemon ends immediately."""

_KILL_S = 2.0
"""Time for a killed process to end; one that is stuck in disk I/O is abandoned."""

_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between restarts, so that a broken engine does not keep the machine busy."""

_HEALTHY_S = 60.0
"""After an engine ran for this long, the pauses start over with the shortest."""

_HELD_PAUSE_S = 5.0
"""Time between checks of a lock whose holder is unknown."""

_START_ERROR = 2
"""Exit code of an engine that cannot start until someone fixes its settings."""


def engine_lock(socket_path: Path) -> Path:
    """Return the lock file that a supervised engine holds while it runs."""
    return socket_path.with_name(socket_path.name + ".engine")


def engine_is_running(socket_path: Path) -> bool:
    """Return whether the supervised engine of a daemon at ``socket_path`` is running."""
    lock = engine_lock(socket_path)
    if not lock.exists():
        return False
    try:
        release_lock(acquire_lock(lock, "daemon.socket", "the engine"))
    except StartError:
        return True
    return False


def _arguments_note(arguments: Sequence[str]) -> str:
    """Return the note in the engine's lock file that identifies its options."""
    digest = hashlib.sha256("\0".join(arguments).encode()).hexdigest()
    return f"with options {digest[:16]}"


class Supervisor:
    """Keeps one engine running beside the daemon at ``socket_path``."""

    def __init__(self, socket_path: Path, arguments: Sequence[str], stop: Stop) -> None:
        self._socket_path = socket_path
        self._stop = stop
        self._descriptor = -1
        """pidfd of the running engine, for ``kill``."""
        self._note = _arguments_note(arguments)
        self._command = [
            *(sys.executable, "-m", "kvtier", "engine"),
            *("--supervised", self._note, *arguments),
        ]

    def kill(self) -> None:
        """End the engine within a second, in which it notifies its clients; from any thread."""
        with contextlib.suppress(OSError):  # no engine is running
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)  # if it is still loading
            signal.pidfd_send_signal(self._descriptor, signal.SIGQUIT)
            ending = select.poll()  # select() does not support descriptors beyond 1023
            ending.register(self._descriptor, select.POLLIN)
            ending.poll(_SUDDEN_CUT_MS)
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def run(self, stopping: asyncio.Event) -> int:
        """Keep the engine running until ``stopping`` is set; returns the exit code to end with."""
        num_failures = 0
        while not stopping.is_set():
            pid, is_same = self._running()
            if pid:
                if not await self._take_over(pid, stopping, is_same=is_same):
                    remedy = "end the process that an engine has left behind"
                    _log.error(
                        "the engine's lock is held by an unknown process", pid=pid, remedy=remedy
                    )
                    await _wait_for(stopping, _HELD_PAUSE_S)
                continue
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            code = await self._run_child(stopping)
            if stopping.is_set():
                return 0
            if code == _START_ERROR:
                return _START_ERROR  # it has printed the reason to standard error
            num_failures = 0 if loop.time() - started_s > _HEALTHY_S else num_failures + 1
            pause_s = _PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)]
            _log.error("engine ended", code=code, restart_in_s=pause_s)
            await _wait_for(stopping, pause_s)
        return 0

    async def _run_child(self, stopping: asyncio.Event) -> int | None:
        """Run an engine until it ends; returns its exit code, or None."""
        # SIGHUP stays blocked in the engine: one sent to the process group is for the daemon.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            child = await asyncio.create_subprocess_exec(*self._command)
        except (
            OSError,
            RuntimeError,
        ) as error:  # out of memory, descriptors or threads
            _log.error("cannot start the engine", error=error)
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        _log.info("engine started", pid=child.pid)
        with self._watched(child.pid):
            return await self._attend(child, stopping)

    async def _take_over(self, pid: int, stopping: asyncio.Event, *, is_same: bool) -> bool:
        """Adopt an engine of an earlier daemon, or stop it if its options differ.

        Returns False if the process has ended, or its pid belongs to another process.
        """
        with self._watched(pid) as descriptor:
            if descriptor is None or not _has_open(pid, engine_lock(self._socket_path)):
                return False
            if is_same:
                _log.info("adopted the engine of an earlier daemon", pid=pid)
                await self._await_end(pid, descriptor, stopping, lambda: self._stop.left_s)
                return True
            _log.info("stopping an engine with other options", pid=pid)
            unwanted = asyncio.Event()
            unwanted.set()
            grace_s = min(_UNWANTED_STOP_S, self._stop.left_s)
            await self._await_end(pid, descriptor, unwanted, lambda: grace_s)
        return True

    async def _attend(
        self, child: asyncio.subprocess.Process, stopping: asyncio.Event
    ) -> int | None:
        """Wait for the child's end, or stop it."""
        ended = asyncio.create_task(child.wait())
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ended.done():
            self._stop.stage = "waiting for the engine to end"
            for number, timeout_s in _stop_signals(child.pid, self._stop.left_s):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    child.send_signal(number)
                await asyncio.wait({ended}, timeout=timeout_s)
                if ended.done():
                    break
        if ended.done():
            return ended.result()
        ended.cancel()
        return None

    async def _await_end(
        self, pid: int, descriptor: int, stopping: asyncio.Event, grace_s: Callable[[], float]
    ) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            tasks = [asyncio.create_task(event.wait()) for event in (ended, stopping)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            if ended.is_set():
                return
            for number, timeout_s in _stop_signals(pid, grace_s()):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    signal.pidfd_send_signal(descriptor, number)
                await _wait_for(ended, timeout_s)
                if ended.is_set():
                    return
        finally:
            loop.remove_reader(descriptor)

    @contextlib.contextmanager
    def _watched(self, pid: int) -> Iterator[int | None]:
        """Yield a pidfd, which refers to the process even if its pid is reused.

        Yields None if there is no such process, or no free descriptor.
        """
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            yield None
            return
        self._descriptor = descriptor
        try:
            yield descriptor
        finally:
            self._descriptor = -1
            os.close(descriptor)

    def _running(self) -> tuple[int, bool]:
        """Return the holder of the engine's lock, or 0, and whether its options are ours."""
        try:
            release_lock(
                acquire_lock(engine_lock(self._socket_path), "daemon.socket", "the engine")
            )
        except StartError as held:
            match = re.search(r"held by pid (\d+)", held.problem)
            return int(match.group(1)) if match else 0, held.problem.endswith(self._note)
        return 0, False


def _stop_signals(pid: int, grace_s: float) -> Iterator[tuple[signal.Signals, float]]:
    """Yield the signals that end an engine, with the time to wait for its end after each.

    The second signal is not SIGTERM again: an engine may also get SIGTERM from systemd or a
    terminal, so a repeated SIGTERM does not make it end at once.
    """
    yield signal.SIGTERM, _DRAIN_SHARE * grace_s
    yield signal.SIGQUIT, _CUT_SHARE * grace_s
    _log.error("engine did not stop in time and is killed", pid=pid)
    yield signal.SIGKILL, _KILL_S


async def _wait_for(event: asyncio.Event, most_s: float) -> None:
    """Wait for an event, at most ``most_s`` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await event.wait()


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not accessible
            if link.samefile(path):
                return True
    return False
