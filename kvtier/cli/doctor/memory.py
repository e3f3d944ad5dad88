"""Memory: whether the arena fits, and where it must not go."""

import os

from kvtier.cli.doctor.check import Finding, fail, ok, warn
from kvtier.cli.doctor.subject import Subject
from kvtier.cli.preflight import check_memory
from kvtier.cli.shown import shown_bytes
from kvtier.config.units import format_size
from kvtier.daemon.tiers.memory import available_memory_bytes
from kvtier.tiers.host import HostArena

__all__ = ["look_at_arena", "look_at_memory", "look_at_overcommit", "look_at_shm", "look_at_swap"]

_SHM_GOOD_BYTES = 1 << 30
"""What engines of several workers share among themselves; containers have 64 MiB by default."""

_NEVER_MORE = "2"
"""Of vm.overcommit_memory: no more is promised than there is."""


def look_at_memory(subject: Subject) -> Finding:
    """Look whether there is room for the CPU tier, in the machine and in each control group."""
    wanted = format_size(subject.config.cpu.capacity_bytes)
    available = available_memory_bytes(subject.memory_files)
    left = "unknown" if available is None else shown_bytes(available)
    if subject.running:
        return ok(f"{left} available beside the running daemon")
    check_memory(subject.config, subject.memory_files)
    return ok(f"{left} available, cpu.capacity is {wanted}")


def look_at_arena(subject: Subject) -> Finding:
    """Make an arena of the size wanted, without memory behind it."""
    cpu = subject.config.cpu
    HostArena(max(1, cpu.capacity_bytes // cpu.slab_bytes), cpu.slab_bytes).close()
    return ok("its file and its mapping can be made")


def look_at_overcommit(subject: Subject) -> Finding:
    """Look whether the kernel promises memory only against what it has."""
    if subject.read("proc/sys/vm/overcommit_memory") != _NEVER_MORE:
        return ok("memory is promised as usual")
    lines = [line.split(":") for line in subject.read("proc/meminfo").splitlines()]
    sizes = {line[0]: int(line[1].split()[0]) << 10 for line in lines if len(line) == 2}
    left = sizes.get("CommitLimit", 0) - sizes.get("Committed_AS", 0)
    found = f"vm.overcommit_memory is 2, and {shown_bytes(left)} may still be promised"
    if left < subject.config.cpu.capacity_bytes and not subject.running:
        return fail(found, "set vm.overcommit_memory=0, or raise vm.overcommit_ratio")
    return ok(found)


def look_at_swap(subject: Subject) -> Finding:
    """Look whether what users wrote may end up on a disk as it is."""
    areas = subject.read("proc/swaps").splitlines()[1:]
    if not areas:
        return ok("none")
    folder = f"proc/{subject.running.pid if subject.running else 'self'}/cgroup"
    for line in subject.read(folder).splitlines():
        group = line.removeprefix("0::/")
        if group != line and subject.read(f"sys/fs/cgroup/{group}/memory.swap.max") == "0":
            return ok("there is some, and the daemon's control group gets none")
    return warn(
        "there is some: the arena may be written to it, slow to come back and in the clear",
        "set MemorySwapMax=0 in the unit (it is in ours), or swapoff -a",
    )


def look_at_shm(subject: Subject) -> Finding:
    """Look at /dev/shm, which kvtier leaves alone and engines use."""
    try:
        volume = os.statvfs(subject.root / "dev/shm")
    except OSError:
        return warn("there is no /dev/shm, which engines of several workers use", "mount a tmpfs")
    size = volume.f_frsize * volume.f_blocks
    if size < _SHM_GOOD_BYTES:
        return warn(
            f"{shown_bytes(size)}: few for an engine of several workers",
            "docker --shm-size, or an emptyDir of medium Memory (the daemon uses none of it)",
        )
    return ok(f"{shown_bytes(size)}; the daemon uses none of it")
