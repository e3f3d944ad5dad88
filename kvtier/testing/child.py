"""Starts, watches and stops kvtier processes in tests, and keeps their logs.

Every wait has a deadline, and failures include the log. A test only ends processes that it started,
and it ends all of them.
"""

import contextlib
import functools
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import psutil

__all__ = ["Child", "await_true", "free_port", "kvtier_command", "work_directory"]

_PAUSE_S = 0.01
"""Pause between two polls: nothing here must be known sooner, and polling costs a core."""

_START_TIMEOUT_S = 120.0
"""An engine imports torch, on a machine busy with other tests."""

_STOP_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 30.0
"""On a machine with ten tests per core, what takes half a second may take ten."""

_PORTS = (10_000, 32_000)
"""Below the ports that Linux assigns to clients, which begin at 32,768."""

_NUM_OWN_PORTS = 200

T = TypeVar("T")


def await_true(look: Callable[[], T | None], what: str, timeout_s: float = _CALL_TIMEOUT_S) -> T:
    """Return the first true result of ``look``. Raises AssertionError naming ``what`` without one.

    Polls once more after the time is up, so that a busy machine alone causes no failure.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() >= deadline_s
        found = look()
        if found:
            return found
        if is_last:
            raise AssertionError(
                f"timed out after {timeout_s} s waiting for: {what}; last result: {found!r}"
            )
        time.sleep(_PAUSE_S)


def free_port() -> int:
    """Return a free TCP port of the loopback interface that no other test process gets."""
    for port in itertools.islice(_own_ports(os.getpid()), _NUM_OWN_PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"none of this process's {_NUM_OWN_PORTS} ports is free")


@functools.cache
def _own_ports(_pid: int) -> Iterator[int]:
    """Yield ports that no other test process uses as long as this one lives, cyclically.

    A port chosen by the kernel may go to a client, or be chosen again, before its server starts.
    """
    for first in range(*_PORTS, _NUM_OWN_PORTS):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(
                f"\0kvtier-ports-{first}"
            )  # a name in this network namespace, as are the ports
        except OSError:
            claim.close()
        else:
            claim.detach()  # the kernel takes it back when the process ends
            return itertools.cycle(range(first, first + _NUM_OWN_PORTS))
    raise AssertionError(f"all ports of {_PORTS} are claimed")


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """Yield a new directory whose path is short enough for a socket; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtier-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def kvtier_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``kvtier`` in this environment."""
    return [sys.executable, "-m", "kvtier", *arguments]


class Child:
    """A child process; its output goes to ``log_path``. Use it as a context manager."""

    def __init__(
        self, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log_path = log_path
        self.started_s = time.monotonic()
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(  # noqa: S603 - the test that calls says what runs
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
                start_new_session=True,  # without a terminal
            )

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self._popen.poll() is None

    @property
    def log(self) -> str:
        """Return the output so far."""
        return self.log_path.read_text(errors="replace")

    def await_log(self, pattern: str, timeout_s: float = _START_TIMEOUT_S) -> re.Match[str]:
        """Return the first match of ``pattern`` in the output."""

        def look() -> re.Match[str] | None:
            is_running = self.is_running
            found = re.search(pattern, self.log)
            if not found and not is_running:
                raise AssertionError(f"ended with {self._popen.returncode}:\n{self.log}")
            return found

        try:
            return await_true(look, f"{pattern!r} in the log", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._popen.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the process within the context."""
        self.send(signal.SIGSTOP)
        status = psutil.Process(self.pid)
        await_true(lambda: status.status() == psutil.STATUS_STOPPED, "the process stands still")
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def wait(self, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Wait for the end and return the exit code; negative: the signal that ended it."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log}") from None

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        if self.is_running:
            self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        self.send(signal.SIGKILL)
        self.wait()

    def memory_bytes(self) -> tuple[int, int]:
        """Return resident memory: private, and shared mappings (the arena)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        total, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem"))
        return total - shared, shared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            error.add_note(f"log of pid {self.pid}:\n{self.log[-4000:]}")
        if self.is_running:
            self.kill()
