"""How much memory there is, and its way behind the arena."""

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
"""Left free behind each slab. Where a cgroup is full the kernel does not refuse memory: it ends a
process, and ours is the largest."""

_SLAB_TIMEOUT_S = 60.0
"""A slab of 16 GiB takes 5 s; the kernel may have to write out others' pages first."""


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Where the kernel tells how much memory there is; tests give files of their own."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")


def available_memory_bytes(files: MemoryFiles | None = None) -> int | None:
    """Return the memory that may still be taken: the machine's, or less where a cgroup limits it.

    None where the kernel tells nothing (no Linux).
    """
    files = files or MemoryFiles()
    rooms = [_machine_bytes(files.meminfo), *_cgroup_rooms(files)]
    return min((room for room in rooms if room is not None), default=None)


class Reservation:
    """Puts memory behind ``arena``, slab by slab, while blocks are served from what is there.

    Memory is committed, not promised: a shortage is told here, and no signal ends the process
    later. Where there is one the tier stays smaller, says so, and grows once there is room.
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
        """On its thread, perhaps for ever: there is one at a time."""
        self._problem = ""

    def health(self) -> Health:
        """Return degraded, and why, while the arena is smaller than it was to be."""
        if not self._problem:
            return Health()
        return Health(HealthState.DEGRADED, self._problem)

    async def step(self) -> None:
        """Reserve what is missing, or as much of it as there is memory for."""
        while self._num_reserved < self._arena.num_slabs:
            try:
                self._check_room()
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
        """Put memory behind the next slab: one thread, however often it is too slow for that."""
        if self._reserving is None:
            reserve = partial(self._arena.reserve, self._num_reserved)
            self._reserving = run_in_thread(reserve, "kvtier-reserve")
        await asyncio.wait({self._reserving}, timeout=_SLAB_TIMEOUT_S)
        if not self._reserving.done():
            raise TimeoutError(f"the kernel has not given a slab within {_SLAB_TIMEOUT_S:.0f} s")
        reserved, self._reserving = self._reserving, None
        reserved.result()

    def _check_room(self) -> None:
        room = available_memory_bytes(self._files)
        if room is not None and room < self._arena.slab_bytes + _SPARE_BYTES:
            raise StartError(
                "cpu.capacity",
                f"{room >> 20}MiB of memory are left, too few for another slab",
                "lower cpu.capacity or free memory",
            )

    def _note(self, problem: str) -> None:
        arena = self._arena
        have, want = (n * arena.slab_bytes >> 20 for n in (self._num_reserved, arena.num_slabs))
        if not self._problem:
            _log.error("the arena stays smaller than it was to be", problem=problem)
        self._problem = f"{have} of {want} MiB in use: {problem}"


def _machine_bytes(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None


def _cgroup_rooms(files: MemoryFiles) -> Iterator[int | None]:
    """Yield what is left in each cgroup from ours up to the root; any of them may be the limit."""
    for line in _read(files.cgroup).splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2 has one line, "0::/path"
            root, used_name = files.cgroup_root, "memory.current"
            # Beyond the second one the kernel does not end a process, it makes it stand still.
            limit_names = ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            root, used_name = files.cgroup_root / "memory", "memory.usage_in_bytes"
            limit_names = ["memory.limit_in_bytes"]
        else:
            continue
        group = root / name.lstrip("/")
        # In a container the path may be the host's, which is not mounted: then its root is ours.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield from (_room(folder, name, used_name) for name in limit_names)


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # "max", or not told here
    # Page cache counts as used though the kernel gives it back; memory.stat tells how much.
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    cached = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
    return max(0, int(limit) - int(used) + cached)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
