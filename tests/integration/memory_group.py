"""A control group whose memory is limited, as a container's is: by the kernel, for real."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.testing.child import await_true

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """Processes that are started with ``enter`` in front have no more than its limit."""

    folder: Path
    used_name: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("sh", "-c", f'echo $$ > "{self.folder}/cgroup.procs"; exec "$@"', "enter")

    @property
    def used_bytes(self) -> int:
        return int((self.folder / self.used_name).read_text())

    @property
    def num_killed(self) -> int:
        """How many processes the kernel ended for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                words = (self.folder / name).read_text().split()
                return int(words[words.index("oom_kill") + 1])
        raise AssertionError(f"{self.folder} does not tell")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make one; skips where this machine does not allow it."""
    own = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    old = next((path for names, path in own if "memory" in names.split(",")), None)
    if old is None:
        home, limit_name, used_name = _ROOT, "memory.max", "memory.current"
        with suppress(OSError):  # it is on already, or may not be put on
            (home / "cgroup.subtree_control").write_text("+memory")
    else:
        home, limit_name = _ROOT / "memory" / old.lstrip("/"), "memory.limit_in_bytes"
        used_name = "memory.usage_in_bytes"
        home = home if home.exists() else _ROOT / "memory"
    folder = home / f"kvtier-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit_name).write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    try:
        yield MemoryGroup(folder, used_name)
    finally:
        await_true(lambda: _removed(folder), "the control group is empty and gone")


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
