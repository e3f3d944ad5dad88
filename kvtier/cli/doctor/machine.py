"""The machine: its kernel, what is installed, its clock, its limits, and what it is part of."""

import ctypes
import os
import platform
import re
from importlib import metadata, util

from kvtier import __version__
from kvtier.cli.doctor.check import CheckContext, Finding, fail, ok, warn
from kvtier.cli.formatting import format_bytes
from kvtier.cli.preflight import check_memory
from kvtier.config.units import format_size
from kvtier.core.limits import OPEN_FILES_LEAST
from kvtier.daemon.tiers.memory import available_memory_bytes
from kvtier.tiers.host import HostArena

__all__ = [
    "inspect_arena",
    "inspect_clock",
    "inspect_descriptors",
    "inspect_gpu",
    "inspect_kernel",
    "inspect_locking",
    "inspect_memory",
    "inspect_numa_nodes",
    "inspect_overcommit",
    "inspect_service",
    "inspect_shm",
    "inspect_swap",
    "inspect_versions",
]

_KERNEL_LEAST = (5, 4)
"""Has pidfds, with which the daemon watches its engine."""

_KERNEL_GOOD = (5, 14)
"""Can fill the arena's page tables in advance, so that the first use of a page is not slower."""

_DESCRIPTORS_GOOD = 4096
"""An engine takes three, a scrape one, a hung disk a few; the others are for many clients."""

_SLOW_CLOCKS = frozenset({"acpi_pm", "hpet", "jiffies"})
_TIMEX_BYTES = 208
_TIME_ERROR = 5
"""What adjtimex(2) answers where nobody keeps the clock right."""

_EXTRAS = ("torch", "transformers", "vllm", "cupy-cuda12x", "cupy-cuda13x")


def inspect_kernel(context: CheckContext) -> Finding:
    """Look whether the kernel has what is called."""
    release = context.read("proc/sys/kernel/osrelease")
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return fail(f"{platform.system()} is no Linux", "run the daemon on Linux 5.14 or newer")
    version = (int(match[1]), int(match[2]))
    if version < _KERNEL_LEAST:
        return fail(f"Linux {release} is too old", "use Linux 5.14 or newer")
    if version < _KERNEL_GOOD:
        return warn(
            f"Linux {release} cannot map the arena ahead: the first use of a page is slower",
            "use Linux 5.14 or newer",
        )
    return ok(f"Linux {release}, {platform.machine()}")


def inspect_versions(context: CheckContext) -> Finding:
    """Look which versions are installed; an engine's may be in another environment."""
    shown = [f"kvtier {__version__}", f"Python {platform.python_version()}"]
    for name in ("grpcio", "numpy", "redis", *_EXTRAS):
        try:
            shown.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if context.config.engine.model is not None and util.find_spec("torch") is None:
        return fail("engine.model is set, and torch is missing", "pip install 'kvtier[engine]'")
    return ok(", ".join(shown))


def inspect_service(context: CheckContext) -> Finding:
    """Tell what starts and watches processes here."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return ok("a pod of Kubernetes")
    if (context.root / "run/systemd/system").is_dir():
        return ok("systemd; deploy/systemd has a unit")
    if any((context.root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return ok("a container, without systemd")
    return ok("neither systemd nor Kubernetes: nothing starts the daemon again")


def inspect_clock(context: CheckContext) -> Finding:
    """Look whether the clock is kept right, and is cheap to read."""
    source = context.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _SLOW_CLOCKS:
        return warn(f"the clock is read from {source}, which is slow", "boot with clocksource=tsc")
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _TIME_ERROR:
        return warn(
            "nobody keeps the clock right, by which ages and times to live are told",
            "run chrony or systemd-timesyncd",
        )
    return ok(f"{source or 'unknown'}, kept right" if state >= 0 else source or "unknown")


def inspect_numa_nodes(context: CheckContext) -> Finding:
    """Tell how many NUMA nodes there are."""
    nodes = context.read("sys/devices/system/node/online") or "0"
    if nodes == "0":
        return ok(f"{os.cpu_count()} CPUs, one NUMA node")
    return ok(
        f"{os.cpu_count()} CPUs, NUMA nodes {nodes}; one daemon serves all: NUMAPolicy=, NUMAMask= "
        "and CPUAffinity= in its unit bind it to the GPUs' and the drive's"
    )


def inspect_gpu(context: CheckContext) -> Finding:
    """Look which GPUs there are, and whether an engine of ours could use them."""
    driver = re.search(r"Kernel Module\s+(\S+)", context.read("proc/driver/nvidia/version"))
    device = context.config.engine.device
    if driver is not None:
        return ok(f"NVIDIA, driver {driver[1]}; the daemon itself uses none")
    if (context.root / "dev/kfd").exists():
        return ok("AMD; the daemon itself uses none")
    if context.config.engine.model is not None and device != "cpu":
        return fail(
            f"engine.device is {device}, and no driver is loaded", "load it, or set it to cpu"
        )
    return ok("none, and the daemon needs none")


def inspect_descriptors(context: CheckContext) -> Finding:
    """Check how many files and connections may be open."""
    limit, whose = context.hard_limit("Max open files")  # kvtier raises the soft one to it
    found = f"{limit:,.0f} open files, {whose} limit"
    remedy = "set LimitNOFILE=65536 in the unit, or ulimit -n 65536"
    if limit < OPEN_FILES_LEAST:
        return fail(found, remedy)
    return warn(found, remedy) if limit < _DESCRIPTORS_GOOD else ok(found)


def inspect_locking(context: CheckContext) -> Finding:
    """Look whether the arena may be pinned for a device; without one nothing is."""
    limit, whose = context.limit("Max locked memory")
    found = f"{format_bytes(limit)}, {whose} limit" if limit < float("inf") else "no limit"
    has_gpu = any((context.root / name).exists() for name in ("dev/nvidiactl", "dev/kfd"))
    if has_gpu and limit < context.config.cpu.capacity_bytes:
        return warn(
            f"{found}: an engine may not get to pin the arena, and copies are slower",
            "set LimitMEMLOCK=infinity in the engine's unit, or ulimit -l unlimited",
        )
    return ok(found if has_gpu else f"{found}; nothing is locked without a GPU")


_SHM_GOOD_BYTES = 1 << 30
"""What engines of several workers share among themselves; containers have 64 MiB by default."""

_NEVER_MORE = "2"
"""Of vm.overcommit_memory: no more is promised than there is."""


def inspect_memory(context: CheckContext) -> Finding:
    """Look whether there is room for the CPU tier, in the machine and in each control group."""
    wanted = format_size(context.config.cpu.capacity_bytes)
    available = available_memory_bytes(context.memory_files)
    left = "unknown" if available is None else format_bytes(available)
    if context.running:
        return ok(f"{left} available beside the running daemon")
    check_memory(context.config, context.memory_files)
    return ok(f"{left} available, cpu.capacity is {wanted}")


def inspect_arena(context: CheckContext) -> Finding:
    """Make an arena of the size wanted, without memory behind it."""
    cpu = context.config.cpu
    HostArena(max(1, cpu.capacity_bytes // cpu.slab_bytes), cpu.slab_bytes).close()
    return ok("its file and its mapping can be made")


def inspect_overcommit(context: CheckContext) -> Finding:
    """Look whether the kernel promises memory only against what it has."""
    if context.read("proc/sys/vm/overcommit_memory") != _NEVER_MORE:
        return ok("memory is promised as usual")
    lines = [line.split(":") for line in context.read("proc/meminfo").splitlines()]
    sizes = {line[0]: int(line[1].split()[0]) << 10 for line in lines if len(line) == 2}
    left = sizes.get("CommitLimit", 0) - sizes.get("Committed_AS", 0)
    found = f"vm.overcommit_memory is 2, and {format_bytes(left)} may still be promised"
    if left < context.config.cpu.capacity_bytes and not context.running:
        return fail(found, "set vm.overcommit_memory=0, or raise vm.overcommit_ratio")
    return ok(found)


def inspect_swap(context: CheckContext) -> Finding:
    """Look whether what users wrote may end up on a disk as it is."""
    areas = context.read("proc/swaps").splitlines()[1:]
    if not areas:
        return ok("none")
    folder = f"proc/{context.running.pid if context.running else 'self'}/cgroup"
    for line in context.read(folder).splitlines():
        group = line.removeprefix("0::/")
        if group != line and context.read(f"sys/fs/cgroup/{group}/memory.swap.max") == "0":
            return ok("there is some, and the daemon's control group gets none")
    return warn(
        "there is some: the arena may be written to it, slow to come back and in the clear",
        "set MemorySwapMax=0 in the unit (it is in ours), or swapoff -a",
    )


def inspect_shm(context: CheckContext) -> Finding:
    """Look at /dev/shm, which kvtier leaves alone and engines use."""
    try:
        volume = os.statvfs(context.root / "dev/shm")
    except OSError:
        return warn("there is no /dev/shm, which engines of several workers use", "mount a tmpfs")
    size = volume.f_frsize * volume.f_blocks
    if size < _SHM_GOOD_BYTES:
        return warn(
            f"{format_bytes(size)}: few for an engine of several workers",
            "docker --shm-size, or an emptyDir of medium Memory (the daemon uses none of it)",
        )
    return ok(f"{format_bytes(size)}; the daemon uses none of it")
