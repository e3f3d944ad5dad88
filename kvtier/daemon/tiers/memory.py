"""Determines the available memory, and reserves memory for the arena."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.errors import StartError
from kvtier.observe.log import Log
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.tiers.base import Health, HealthState
from kvtier.tiers.host import HostArena

__all__ = ["MemoryFiles", "Reservation", "available_memory_bytes"]

_log = Log("kvtier.daemon")

_SPARE_BYTES = 64 << 20
"""Memory left free after each slab. In a full cgroup the kernel does not refuse memory but kills a
process, and ours is the largest."""

_SLAB_TIMEOUT_S = 60.0
"""A slab of 16 GiB takes 5 s; the kernel may have to write out other pages first."""


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """The kernel's files about memory; tests use files of their own."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")


def available_memory_bytes(files: MemoryFiles | None = None) -> int | None:
    """Return the available memory of the machine, or of a cgroup that allows less.

    None if it is unknown (not on Linux).
    """
    files = files or MemoryFiles()
    amounts = [_machine_bytes(files.meminfo), *_cgroup_bytes(files)]
    return min((each for each in amounts if each is not None), default=None)


class Reservation:
    """Reserves the memory of ``arena`` slab by slab, while blocks are served from reserved slabs.

    Memory is really allocated, so a shortage shows here and not as a signal that kills the process
    later. If memory is short, the tier stays smaller, reports it, and grows once there is memory.
    """

    def __init__(
        self,
        arena: HostArena,
        on_reserved: Callable[[int], None],
        files: MemoryFiles | None = None,
    ) -> None:
        self._arena = arena
        self._on_reserved = on_reserved
        self._files = files or MemoryFiles()
        self._num_reserved = 0
        self._reserving: asyncio.Future[None] | None = None
        """The reservation in progress, which may hang; there is at most one."""
        self._problem = ""

    def health(self) -> Health:
        """Return degraded with a reason while the arena is smaller than configured."""
        if not self._problem:
            return Health()
        return Health(HealthState.DEGRADED, self._problem)

    async def step(self) -> None:
        """Reserve the missing slabs, or as many as there is memory for."""
        while self._num_reserved < self._arena.num_slabs:
            try:
                self._check_available()
                await self._reserve()
            except StartError as error:
                self._note(error.problem)
                return
            except Exception as error:
                self._note(repr(error))
                raise
            self._num_reserved += 1
            self._on_reserved(self._num_reserved)
            if self._num_reserved == self._arena.num_slabs:
                self._problem = ""
                _log.info("arena reserved", bytes=self._arena.capacity_bytes)

    async def _reserve(self) -> None:
        """Reserve the next slab, on one thread even if earlier attempts timed out."""
        if self._reserving is None:
            reserve = partial(self._arena.reserve, self._num_reserved)
            self._reserving = run_in_thread(reserve, "kvtier-reserve")
        await asyncio.wait({self._reserving}, timeout=_SLAB_TIMEOUT_S)
        if not self._reserving.done():
            raise TimeoutError(f"no memory for a slab within {_SLAB_TIMEOUT_S:.0f} s")
        reserved, self._reserving = self._reserving, None
        reserved.result()

    def _check_available(self) -> None:
        available = available_memory_bytes(self._files)
        if available is not None and available < self._arena.slab_bytes + _SPARE_BYTES:
            raise StartError(
                "cpu.capacity",
                f"{available >> 20} MiB of memory left, not enough for another slab",
                "lower cpu.capacity or free memory",
            )

    def _note(self, problem: str) -> None:
        arena = self._arena
        have, want = (n * arena.slab_bytes >> 20 for n in (self._num_reserved, arena.num_slabs))
        if not self._problem:
            _log.error("arena smaller than configured", problem=problem)
        self._problem = f"{have} of {want} MiB in use: {problem}"


def _machine_bytes(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None


def _cgroup_bytes(files: MemoryFiles) -> Iterator[int | None]:
    """Yield the bytes left in each cgroup from ours up to the root; any may be the limit."""
    for line in _read(files.cgroup).splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2 has one line, "0::/path"
            root, used_name = files.cgroup_root, "memory.current"
            # Above memory.high the kernel does not kill a process, but throttles it.
            limit_names = ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            root, used_name = files.cgroup_root / "memory", "memory.usage_in_bytes"
            limit_names = ["memory.limit_in_bytes"]
        else:
            continue
        group = root / name.lstrip("/")
        # In a container the path may be that of the host, which is not mounted: use the root then.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield from (_left_bytes(folder, name, used_name) for name in limit_names)


def _left_bytes(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # "max", or unknown
    # Page cache counts as used although it can be reclaimed; memory.stat has its size.
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    cached = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
    return max(0, int(limit) - int(used) + cached)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
