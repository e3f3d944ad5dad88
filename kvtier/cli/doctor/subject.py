"""Subject: the machine and the configuration that are looked at."""

from dataclasses import dataclass
from pathlib import Path

from kvtier.config import Config
from kvtier.daemon.tiers.memory import MemoryFiles

__all__ = ["Running", "Subject"]


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that answers at the configuration's socket."""

    pid: int
    """As it is known here; 0 where it is in another container, or does not let us in."""
    uid: int | None = None
    """Its user; None where that cannot be seen."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at; tests give a ``root`` with kernel files of their own."""

    config: Config
    running: Running | None = None
    root: Path = Path("/")

    def read(self, name: str) -> str:
        """Return a file of the kernel, such as ``proc/swaps``; empty where there is none."""
        try:
            return (self.root / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    @property
    def memory_files(self) -> MemoryFiles:
        """Return where the kernel tells how much memory there is."""
        root = self.root
        return MemoryFiles(root / "proc/meminfo", root / "proc/self/cgroup", root / "sys/fs/cgroup")

    def limit(self, name: str) -> tuple[float, str]:
        """Return a soft resource limit, such as ``Max locked memory``, and whose it is.

        If a daemon is running, it is the daemon's: a shell and a service have different limits.
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
