"""Real kvtier processes for tests: started, watched and ended by their pid, with their logs kept.

Every wait has a deadline, and what fails says what the process wrote. Nothing is ended that was not
started here, and whatever was started is ended.
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
"""Between two looks: nothing here is worth finding out sooner, and looking costs a core."""

_START_TIMEOUT_S = 120.0
"""An engine imports torch, on a machine that other tests keep busy."""

_STOP_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 30.0
"""On a machine with ten tests for a core, what takes half a second may take ten."""

_PORTS = (10_000, 32_000)
"""Below those that Linux gives to clients, which begin at 32,768."""

_NUM_OWN_PORTS = 200

T = TypeVar("T")


def await_true(look: Callable[[], T | None], what: str, timeout_s: float = _CALL_TIMEOUT_S) -> T:
    """Return the first true result of ``look``; raises AssertionError naming ``what`` without one.

    Looks once more when the time is up, so that a busy machine alone is no failure.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() >= deadline_s
        found = look()
        if found:
            return found
        if is_last:
            raise AssertionError(f"not within {timeout_s} s: {what}; last seen: {found!r}")
        time.sleep(_PAUSE_S)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free, and that nobody else is given."""
    for port in itertools.islice(_own_ports(os.getpid()), _NUM_OWN_PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"none of this process's {_NUM_OWN_PORTS} ports is free")


@functools.cache
def _own_ports(_pid: int) -> Iterator[int]:
    """Claim ports that no other process of tests is given for as long as this one lives, in turn.

    A port that the kernel chooses may go to a client, or be chosen again, before its server starts.
    """
    for first in range(*_PORTS, _NUM_OWN_PORTS):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtier-ports-{first}")  # a name of this network only, as are the ports
        except OSError:
            claim.close()
        else:
            claim.detach()  # the kernel takes it back when the process ends
            return itertools.cycle(range(first, first + _NUM_OWN_PORTS))
    raise AssertionError(f"all ports of {_PORTS} are claimed")


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """Yield a new directory whose path is short enough for a socket; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtier-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def kvtier_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``kvtier`` in this environment."""
    return [sys.executable, "-m", "kvtier", *arguments]


class Child:
    """A process of ours; its standard error is kept in ``log_path``. Use it as a context."""

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
                start_new_session=True,  # no terminal, wherever the tests are run
            )

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Tell whether it has not ended yet."""
        return self._popen.poll() is None

    @property
    def log(self) -> str:
        """Return what it has written so far."""
        return self.log_path.read_text(errors="replace")

    def await_log(self, pattern: str, timeout_s: float = _START_TIMEOUT_S) -> re.Match[str]:
        """Return the first match of ``pattern`` in what it writes."""

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
        """Send it a signal."""
        self._popen.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Have it stand still within the context."""
        self.send(signal.SIGSTOP)
        status = psutil.Process(self.pid)
        await_true(lambda: status.status() == psutil.STATUS_STOPPED, "the process stands still")
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def wait(self, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Wait for its end and return its exit code; negative: the signal that ended it."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log}") from None

    def stop(self) -> int:
        """Tell it to stop and return its exit code."""
        if self.is_running:
            self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it as a crash would."""
        self.send(signal.SIGKILL)
        self.wait()

    def memory_bytes(self) -> tuple[int, int]:
        """Return its resident memory: all but shared mappings, and these (the arena)."""
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
