"""Checks of the machine: kernel, versions, clock, GPU, limits and memory."""

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
"""The first with pidfds, which the daemon uses to watch its engine."""

_KERNEL_GOOD = (5, 14)
"""The first that can populate the arena's page tables in advance; before, first uses are slow."""

_DESCRIPTORS_GOOD = 4096
"""An engine needs three, a scrape one, a stuck disk a few; the rest is for many clients."""

_SLOW_CLOCKS = frozenset({"acpi_pm", "hpet", "jiffies"})
_TIMEX_BYTES = 208
_TIME_ERROR = 5
"""Returned by adjtimex(2) if the clock is not synchronized."""

_EXTRAS = ("torch", "transformers", "vllm", "cupy-cuda12x", "cupy-cuda13x")

_SHM_GOOD_BYTES = 1 << 30
"""Enough for engines with several workers; containers have 64 MiB by default."""

_NEVER_MORE = "2"
"""Value of vm.overcommit_memory that forbids overcommit."""


def inspect_kernel(context: CheckContext) -> Finding:
    """Check for the kernel features that kvtier uses."""
    release = context.read("proc/sys/kernel/osrelease")
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return fail(
            f"{platform.system()} is not supported", "run the daemon on Linux 5.14 or newer"
        )
    version = (int(match[1]), int(match[2]))
    if version < _KERNEL_LEAST:
        return fail(f"Linux {release} is too old", "use Linux 5.14 or newer")
    if version < _KERNEL_GOOD:
        return warn(
            f"Linux {release} cannot populate the arena in advance: first uses of pages are slow",
            "use Linux 5.14 or newer",
        )
    return ok(f"Linux {release}, {platform.machine()}")


def inspect_versions(context: CheckContext) -> Finding:
    """List installed versions; an engine may have another environment."""
    shown = [f"kvtier {__version__}", f"Python {platform.python_version()}"]
    for name in ("grpcio", "numpy", "redis", *_EXTRAS):
        try:
            shown.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if context.config.engine.model is not None and util.find_spec("torch") is None:
        return fail("engine.model is set, but torch is missing", "pip install 'kvtier[engine]'")
    return ok(", ".join(shown))


def inspect_service(context: CheckContext) -> Finding:
    """Report what supervises processes here."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return ok("Kubernetes pod")
    if (context.root / "run/systemd/system").is_dir():
        return ok("systemd; for a unit see deploy/systemd")
    if any((context.root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return ok("container without systemd")
    return ok("neither systemd nor Kubernetes: nothing restarts the daemon")


def inspect_clock(context: CheckContext) -> Finding:
    """Check that the clock is synchronized and cheap to read."""
    source = context.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _SLOW_CLOCKS:
        return warn(f"the clock source is {source}, which is slow", "boot with clocksource=tsc")
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _TIME_ERROR:
        return warn(
            "no time synchronization service is running; block ages and TTLs depend on the clock",
            "run chrony or systemd-timesyncd",
        )
    return ok(f"{source or 'unknown'}, synchronized" if state >= 0 else source or "unknown")


def inspect_numa_nodes(context: CheckContext) -> Finding:
    """Report CPUs and NUMA nodes."""
    nodes = context.read("sys/devices/system/node/online") or "0"
    if nodes == "0":
        return ok(f"{os.cpu_count()} CPUs, one NUMA node")
    return ok(
        f"{os.cpu_count()} CPUs, NUMA nodes {nodes}; to bind the daemon to those of GPUs and "
        "drive, set NUMAPolicy=, NUMAMask= and CPUAffinity= in its unit"
    )


def inspect_gpu(context: CheckContext) -> Finding:
    """Check whether the configured device can be used."""
    driver = re.search(r"Kernel Module\s+(\S+)", context.read("proc/driver/nvidia/version"))
    device = context.config.engine.device
    if driver is not None:
        return ok(f"NVIDIA, driver {driver[1]}; not used by the daemon itself")
    if (context.root / "dev/kfd").exists():
        return ok("AMD; not used by the daemon itself")
    if context.config.engine.model is not None and device != "cpu":
        return fail(
            f"engine.device is {device}, but no GPU driver is loaded", "load it, or use cpu"
        )
    return ok("none; the daemon does not need one")


def inspect_descriptors(context: CheckContext) -> Finding:
    """Check the limit of open files."""
    limit, whose = context.hard_limit("Max open files")  # kvtier raises the soft limit to it
    found = f"{limit:,.0f} open files, {whose} limit"
    remedy = "set LimitNOFILE=65536 in the unit, or ulimit -n 65536"
    if limit < OPEN_FILES_LEAST:
        return fail(found, remedy)
    return warn(found, remedy) if limit < _DESCRIPTORS_GOOD else ok(found)


def inspect_locking(context: CheckContext) -> Finding:
    """Check whether an engine with a GPU may pin the arena."""
    limit, whose = context.limit("Max locked memory")
    found = f"{format_bytes(limit)}, {whose} limit" if limit < float("inf") else "no limit"
    has_gpu = any((context.root / name).exists() for name in ("dev/nvidiactl", "dev/kfd"))
    if has_gpu and limit < context.config.cpu.capacity_bytes:
        return warn(
            f"{found}: too low to pin the arena, so copies to the GPU are slower",
            "set LimitMEMLOCK=infinity in the engine's unit, or ulimit -l unlimited",
        )
    return ok(found if has_gpu else f"{found}; not needed without a GPU")


def inspect_memory(context: CheckContext) -> Finding:
    """Check that the CPU tier fits into memory, also in each control group."""
    wanted = format_size(context.config.cpu.capacity_bytes)
    available = available_memory_bytes(context.memory_files)
    left = "unknown" if available is None else format_bytes(available)
    if context.running:
        return ok(f"{left} available in addition to the running daemon")
    check_memory(context.config, context.memory_files)
    return ok(f"{left} available, cpu.capacity is {wanted}")


def inspect_arena(context: CheckContext) -> Finding:
    """Create and map an arena of the configured size, without allocating memory."""
    cpu = context.config.cpu
    HostArena(max(1, cpu.capacity_bytes // cpu.slab_bytes), cpu.slab_bytes).close()
    return ok("can be created and mapped")


def inspect_overcommit(context: CheckContext) -> Finding:
    """Check whether the overcommit policy allows the arena."""
    if context.read("proc/sys/vm/overcommit_memory") != _NEVER_MORE:
        return ok("default policy")
    lines = [line.split(":") for line in context.read("proc/meminfo").splitlines()]
    sizes = {line[0]: int(line[1].split()[0]) << 10 for line in lines if len(line) == 2}
    left = sizes.get("CommitLimit", 0) - sizes.get("Committed_AS", 0)
    found = f"vm.overcommit_memory is 2, {format_bytes(left)} can still be committed"
    if left < context.config.cpu.capacity_bytes and not context.running:
        return fail(found, "set vm.overcommit_memory=0, or raise vm.overcommit_ratio")
    return ok(found)


def inspect_swap(context: CheckContext) -> Finding:
    """Check whether KV blocks may be swapped to disk."""
    areas = context.read("proc/swaps").splitlines()[1:]
    if not areas:
        return ok("none")
    folder = f"proc/{context.running.pid if context.running else 'self'}/cgroup"
    for line in context.read(folder).splitlines():
        group = line.removeprefix("0::/")
        if group != line and context.read(f"sys/fs/cgroup/{group}/memory.swap.max") == "0":
            return ok("disabled for the daemon's control group")
    return warn(
        "enabled: KV blocks may be swapped out, slow to read and unencrypted",
        "set MemorySwapMax=0 in the unit (as deploy/systemd does), or run swapoff -a",
    )


def inspect_shm(context: CheckContext) -> Finding:
    """Check the size of /dev/shm, which engines use and kvtier does not."""
    try:
        volume = os.statvfs(context.root / "dev/shm")
    except OSError:
        return warn("missing; engines with several workers need it", "mount a tmpfs")
    size = volume.f_frsize * volume.f_blocks
    if size < _SHM_GOOD_BYTES:
        return warn(
            f"{format_bytes(size)}: too small for engines with several workers",
            "use docker --shm-size, or an emptyDir with medium: Memory (not used by the daemon)",
        )
    return ok(f"{format_bytes(size)}; not used by the daemon")
