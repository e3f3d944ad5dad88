"""Memory behind the arena: committed or told, never promised."""

import asyncio
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.daemon.tiers import memory
from kvtier.daemon.tiers.memory import MemoryFiles, Reservation
from kvtier.errors import StartError
from kvtier.tiers.base import Health, HealthState
from kvtier.tiers.host import HostArena

SLAB_BYTES = 1 << 20
MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(4, SLAB_BYTES)
    yield arena
    arena.close()


def machine(tmp_path: Path, free_bytes: int) -> MemoryFiles:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {free_bytes >> 10} kB\n")
    return MemoryFiles(tmp_path / "meminfo", tmp_path / "none", tmp_path)


def test_all_of_it(arena: HostArena, tmp_path: Path) -> None:
    reserved: list[int] = []
    reservation = Reservation(arena, reserved.append, machine(tmp_path, 1 << 30))
    asyncio.run(reservation.step())
    assert reserved == [1, 2, 3, 4]
    assert reservation.health() == Health()
    asyncio.run(reservation.step())
    assert reserved == [1, 2, 3, 4], "there is no more to do"


def test_an_arena_larger_than_a_file_may_be_is_refused_with_the_limit() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLAB_BYTES, limits[1]))
    try:
        with pytest.raises(StartError, match=r"file too large; .*LimitFSIZE") as raised:
            HostArena(4, SLAB_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.field == "cpu.capacity"


def test_a_kernel_without_memory_says_so_and_nobody_is_killed_by_it_later(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, _start: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StartError, match="out of memory for slab 1 of 4") as raised:
        arena.reserve(1)
    assert raised.value.field == "cpu.capacity"
    assert not os.fstat(arena.fd).st_blocks, "nothing was touched either"


def test_whoever_maps_the_arena_cannot_take_memory_from_under_the_others(arena: HostArena) -> None:
    for size_bytes in (0, arena.size_bytes - 1, arena.size_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)


def test_an_arena_that_no_process_can_map_is_refused_and_leaves_nothing() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StartError, match=r"cannot allocate memory; .*LimitAS"):
        HostArena(1, 1 << 47)
    assert os.listdir("/proc/self/fd") == before


def test_where_memory_runs_short_the_tier_stays_smaller_until_there_is_some(
    arena: HostArena, tmp_path: Path
) -> None:
    reserved: list[int] = []

    def use(num_slabs: int) -> None:
        reserved.append(num_slabs)
        if num_slabs == 2:
            machine(tmp_path, 10 * MIB)  # others took the rest

    reservation = Reservation(arena, use, machine(tmp_path, 1 << 30))
    asyncio.run(reservation.step())
    assert reserved == [1, 2]
    health = reservation.health()
    assert health.state is HealthState.DEGRADED
    assert health.reason == "2 of 4 MiB in use: 10 MiB of memory left, not enough for another slab"
    asyncio.run(reservation.step())
    assert reserved == [1, 2]
    machine(tmp_path, 1 << 30)
    asyncio.run(reservation.step())
    assert reserved == [1, 2, 3, 4]
    assert reservation.health() == Health()


class Refused(HostArena):
    """The kernel has none, whatever its files say."""

    def reserve(self, slab: int) -> None:
        raise StartError("cpu.capacity", f"no memory for slab {slab}", "free memory")


class Broken(HostArena):
    """An arena with a bug."""

    def reserve(self, slab: int) -> None:
        raise RuntimeError("a bug")


def test_a_refusal_and_a_bug_are_told_too(tmp_path: Path) -> None:
    for kind, part in ((Refused, "no memory for slab 0"), (Broken, "a bug")):
        arena = kind(2, SLAB_BYTES)
        reservation = Reservation(arena, lambda _num: None, machine(tmp_path, 1 << 30))
        try:
            asyncio.run(reservation.step())
        except RuntimeError:
            assert kind is Broken, "its supervisor counts it"
        assert reservation.health().state is HealthState.DEGRADED
        assert part in reservation.health().reason
        arena.close()


class Slow(HostArena):
    """The kernel takes its time."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(4, SLAB_BYTES)
        self.num_asked = 0
        self._gate = gate

    def reserve(self, slab: int) -> None:
        self.num_asked += 1
        assert self._gate.wait(30)
        super().reserve(slab)


def test_a_kernel_that_hangs_costs_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_SLAB_TIMEOUT_S", 0.01)
    reserved: list[int] = []

    async def scenario(arena: Slow, gate: threading.Event) -> None:
        reservation = Reservation(arena, reserved.append, machine(tmp_path, 1 << 30))
        for _ in range(3):
            with pytest.raises(TimeoutError, match="no memory for a slab"):
                await reservation.step()
        assert arena.num_asked == 1
        assert reservation.health().state is HealthState.DEGRADED
        gate.set()
        monkeypatch.setattr(memory, "_SLAB_TIMEOUT_S", 30.0)
        await reservation.step()
        assert reserved == [1, 2, 3, 4]

    gate = threading.Event()
    arena = Slow(gate)
    try:
        asyncio.run(scenario(arena, gate))
    finally:
        gate.set()
        arena.close()
