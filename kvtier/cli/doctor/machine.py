"""The machine: its kernel, what is installed, its clock, its limits, and what it is part of."""

import ctypes
import os
import platform
import re
from importlib import metadata, util

from kvtier import __version__
from kvtier.cli.doctor.check import Finding, fail, ok, warn
from kvtier.cli.doctor.subject import Subject
from kvtier.cli.shown import shown_bytes
from kvtier.core.limits import OPEN_FILES_LEAST

__all__ = [
    "look_at_clock",
    "look_at_descriptors",
    "look_at_gpu",
    "look_at_kernel",
    "look_at_locking",
    "look_at_nodes",
    "look_at_service",
    "look_at_versions",
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


def look_at_kernel(subject: Subject) -> Finding:
    """Look whether the kernel has what is called."""
    release = subject.read("proc/sys/kernel/osrelease")
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


def look_at_versions(subject: Subject) -> Finding:
    """Look which versions are installed; an engine's may be in another environment."""
    shown = [f"kvtier {__version__}", f"Python {platform.python_version()}"]
    for name in ("grpcio", "numpy", "redis", *_EXTRAS):
        try:
            shown.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if subject.config.engine.model is not None and util.find_spec("torch") is None:
        return fail("engine.model is set, and torch is missing", "pip install 'kvtier[engine]'")
    return ok(", ".join(shown))


def look_at_service(subject: Subject) -> Finding:
    """Tell what starts and watches processes here."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return ok("a pod of Kubernetes")
    if (subject.root / "run/systemd/system").is_dir():
        return ok("systemd; deploy/systemd has a unit")
    if any((subject.root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return ok("a container, without systemd")
    return ok("neither systemd nor Kubernetes: nothing starts the daemon again")


def look_at_clock(subject: Subject) -> Finding:
    """Look whether the clock is kept right, and is cheap to read."""
    source = subject.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _SLOW_CLOCKS:
        return warn(f"the clock is read from {source}, which is slow", "boot with clocksource=tsc")
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _TIME_ERROR:
        return warn(
            "nobody keeps the clock right, by which ages and times to live are told",
            "run chrony or systemd-timesyncd",
        )
    return ok(f"{source or 'unknown'}, kept right" if state >= 0 else source or "unknown")


def look_at_nodes(subject: Subject) -> Finding:
    """Tell how many NUMA nodes there are."""
    nodes = subject.read("sys/devices/system/node/online") or "0"
    if nodes == "0":
        return ok(f"{os.cpu_count()} CPUs, one NUMA node")
    return ok(
        f"{os.cpu_count()} CPUs, NUMA nodes {nodes}; one daemon serves all: NUMAPolicy=, NUMAMask= "
        "and CPUAffinity= in its unit bind it to the GPUs' and the drive's"
    )


def look_at_gpu(subject: Subject) -> Finding:
    """Look which GPUs there are, and whether an engine of ours could use them."""
    driver = re.search(r"Kernel Module\s+(\S+)", subject.read("proc/driver/nvidia/version"))
    device = subject.config.engine.device
    if driver is not None:
        return ok(f"NVIDIA, driver {driver[1]}; the daemon itself uses none")
    if (subject.root / "dev/kfd").exists():
        return ok("AMD; the daemon itself uses none")
    if subject.config.engine.model is not None and device != "cpu":
        return fail(
            f"engine.device is {device}, and no driver is loaded", "load it, or set it to cpu"
        )
    return ok("none, and the daemon needs none")


def look_at_descriptors(subject: Subject) -> Finding:
    """Check how many files and connections may be open."""
    limit, whose = subject.hard_limit("Max open files")  # kvtier raises the soft one to it
    found = f"{limit:,.0f} open files, {whose} limit"
    remedy = "set LimitNOFILE=65536 in the unit, or ulimit -n 65536"
    if limit < OPEN_FILES_LEAST:
        return fail(found, remedy)
    return warn(found, remedy) if limit < _DESCRIPTORS_GOOD else ok(found)


def look_at_locking(subject: Subject) -> Finding:
    """Look whether the arena may be pinned for a device; without one nothing is."""
    limit, whose = subject.limit("Max locked memory")
    found = f"{shown_bytes(limit)}, {whose} limit" if limit < float("inf") else "no limit"
    has_gpu = any((subject.root / name).exists() for name in ("dev/nvidiactl", "dev/kfd"))
    if has_gpu and limit < subject.config.cpu.capacity_bytes:
        return warn(
            f"{found}: an engine may not get to pin the arena, and copies are slower",
            "set LimitMEMLOCK=infinity in the engine's unit, or ulimit -l unlimited",
        )
    return ok(found if has_gpu else f"{found}; nothing is locked without a GPU")
