"""Runs the checks of ``kvtier doctor`` at the same time, each with a deadline."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from kvtier.config import Config
from kvtier.daemon.tiers.memory import MemoryFiles
from kvtier.errors import KvtierError, StartError, reason_of
from kvtier.tiers.finding import CheckVerdict, Finding, KernelFiles, fail, ok, warn

__all__ = [
    "Check",
    "CheckContext",
    "CheckVerdict",
    "Finding",
    "RunningDaemon",
    "fail",
    "ok",
    "run_checks",
    "warn",
]


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that listens on the configured socket."""

    pid: int
    """Its process id; 0 if it is in another container or does not accept connections."""

    uid: int | None = None
    """Its user; None if unknown."""


@dataclass(frozen=True)
class CheckContext(KernelFiles):
    """The machine and the configuration to check."""

    config: Config = field(default_factory=Config)
    running: RunningDaemon | None = None

    @property
    def memory_files(self) -> MemoryFiles:
        """Kernel files with the available memory."""
        root = self.root
        return MemoryFiles(root / "proc/meminfo", root / "proc/self/cgroup", root / "sys/fs/cgroup")

    def limit(self, name: str) -> tuple[float, str]:
        """Return a soft resource limit, such as ``Max locked memory``, and whose it is.

        It is the running daemon's, if there is one: a shell and a service have different limits.
        """
        return self._limit(name, 0)

    def hard_limit(self, name: str) -> tuple[float, str]:
        """Return a hard resource limit, and whose it is, like ``limit``."""
        return self._limit(name, 1)

    def _limit(self, name: str, column: int) -> tuple[float, str]:
        whose, folder = ("this shell's", "self")
        if self.running and self.read(f"proc/{self.running.pid}/limits"):
            whose, folder = "the running daemon's", str(self.running.pid)
        for line in self.read(f"proc/{folder}/limits").splitlines():
            if line.startswith(name):
                limit = line.removeprefix(name).split()[column]
                return (float("inf") if limit == "unlimited" else float(limit)), whose
        return float("inf"), whose


@dataclass(frozen=True, slots=True)
class Check:
    """A check; ``inspect`` may raise or hang."""

    name: str
    inspect: Callable[[], Finding]
    deadline_s: float = 3.0
    if_hung: str = "find what is stuck, with dmesg and /proc/PID/stack"


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[str, Finding]]:
    """Run all checks in parallel, and yield their names and findings in order."""
    started_s = time.monotonic()
    begun = [(check, _begin(check)) for check in checks]
    for check, future in begun:
        left_s = started_s + check.deadline_s - time.monotonic()
        try:
            yield check.name, future.result(max(0.0, left_s))
        except FutureTimeout:
            yield check.name, fail(f"no answer within {check.deadline_s:.0f} s", check.if_hung)


def _begin(check: Check) -> "Future[Finding]":
    future: Future[Finding] = Future()
    run = threading.Thread(
        target=lambda: future.set_result(_outcome(check)), name=check.name, daemon=True
    )
    run.start()
    return future


def _outcome(check: Check) -> Finding:
    """Return the finding of a check; an exception is a finding, too."""
    try:
        return check.inspect()
    except StartError as error:
        return fail(f"{error.field}: {error.problem}", error.remedy)
    except KvtierError as error:
        return fail(str(error), "fix this")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{reason_of(error)}", "fix this")
    except Exception as error:
        return fail(f"the check itself failed: {error!r}", "please report this as a bug")
