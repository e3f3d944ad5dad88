"""Checks of the SSD tier's directory, its volume and its drive for ``kvtier doctor``."""

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kvtier.config.units import format_bytes, format_size
from kvtier.core.limits import PAGE_BYTES
from kvtier.permissions import check_parents
from kvtier.tiers.finding import Finding, KernelFiles, TierCheck, fail, ok, warn
from kvtier.tiers.ssd.settings import SsdConfig
from kvtier.tiers.ssd.space import check_space, floor_beside_system

__all__ = [
    "inspect_direct_io",
    "inspect_directory",
    "inspect_drive",
    "inspect_file_system",
    "inspect_inodes",
    "inspect_space",
    "inspect_speed",
    "ssd_checks",
]

_Inspect = Callable[[SsdConfig, KernelFiles], Finding]

_REMOTE_KINDS = ("nfs", "cifs", "smb", "ceph", "fuse", "9p", "lustre", "gluster", "afs")
_VIRTUAL = ("vd", "xvd")
"""Prefixes of virtual drives, which report themselves as rotational by default."""

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})

_MEASURE_S = 60.0
_MEASURED_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20
_SLOW_BYTES = 100 << 20
"""Bytes per second; below this, recomputing is faster on any GPU."""


def ssd_checks(settings: SsdConfig) -> Sequence[TierCheck]:
    """Return the checks in the order of a report."""
    hung = "check the mount (dmesg, findmnt), or use another ssd.directory"

    def check(name: str, inspect: _Inspect) -> TierCheck:
        return TierCheck(name, partial(inspect, settings), hung, is_private=True)

    speed = partial(inspect_speed, settings)
    return (
        check("ssd", inspect_directory),
        check("space", inspect_space),
        check("inodes", inspect_inodes),
        check("mount", inspect_file_system),
        check("drive", inspect_drive),
        check("direct-io", inspect_direct_io),
        TierCheck("speed", speed, hung, _MEASURE_S, is_private=True, is_measurement=True),
    )


def inspect_directory(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Check that the directory is private to the daemon's user, or can be created."""
    wanted = settings.directory
    found = _nearest(wanted)
    remedy = f"run mkdir -p {wanted}, and chown it to the daemon's user with mode 0700"
    if not found.is_dir():
        return fail(f"{found} is not a directory", "remove it, or use another ssd.directory")
    if not os.access(found, os.W_OK | os.X_OK):
        return fail(f"user {os.geteuid()} cannot write to {found}", remedy)
    # Root checks on behalf of the daemon's user, the presumed owner of the directory.
    check_parents(wanted, "ssd.directory", os.geteuid() or found.stat().st_uid)
    if found != wanted:
        return ok(f"{wanted} will be created")
    mode = found.stat().st_mode & 0o777
    if mode & 0o077:
        return warn(f"others can access {wanted} (mode {mode:04o})", f"chmod 700 {wanted}")
    return ok(str(wanted))


def inspect_space(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Check that the tier fits into the free space."""
    place = _nearest(settings.directory)
    check_space(settings, place)
    free = os.statvfs(place)
    left = format_bytes(free.f_bavail * free.f_frsize)
    found = f"{left} free, ssd.capacity is {format_size(settings.capacity_bytes)}"
    if floor_bytes := floor_beside_system(settings, place, kernel.root):
        return warn(
            f"{found}: once full, less than 15 % of the system drive stays free",
            "use another drive, a smaller ssd.capacity, or ssd.free_space_floor = "
            f"{format_size(floor_bytes)}",
        )
    return ok(found)


def inspect_inodes(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Check that there are inodes for all segments, if the file system has a limit."""
    volume = os.statvfs(_nearest(settings.directory))
    if not volume.f_files:
        return ok("allocated dynamically")
    wanted = settings.capacity_bytes // settings.segment_bytes + settings.free_inodes_floor
    found = f"{volume.f_favail:,} free, {wanted:,} needed, including ssd.free_inodes_floor"
    if volume.f_favail < wanted:
        return fail(found, "remove small files there, lower the floor, or use larger segments")
    return ok(found)


def inspect_file_system(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Check the type of the file system."""
    kind, mounted = _mount(kernel, _nearest(settings.directory).resolve())
    found = f"{kind} at {mounted}"
    if kind in _MEMORY_KINDS:
        return fail(f"{found} is memory, not a disk", "use an ssd.directory on a drive")
    if kind == "overlay":
        return warn(f"{found} is lost with its container", "mount a volume for ssd.directory")
    if kind.startswith(_REMOTE_KINDS):
        return warn(f"{found} may be slow or hang", "use a local drive")
    return ok(found)


def inspect_direct_io(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Write and read a page with direct I/O, in an unnamed file."""
    mode = settings.direct_io
    with _scratch(_nearest(settings.directory)) as fd:
        is_direct = _go_direct(fd) and _keeps_a_page(fd)
    if mode == "off":
        return ok("off (would work)" if is_direct else "off")
    if is_direct:
        return ok("works")
    if mode == "on":
        return fail(
            "the file system does not support it", 'set ssd.direct_io = "auto", or use ext4 or XFS'
        )
    return warn(
        "the file system does not support it: blocks also occupy the page cache",
        "use ext4 or XFS on a local drive",
    )


def inspect_drive(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Check that the drive is solid-state."""
    device = os.stat(_nearest(settings.directory)).st_dev
    folder = kernel.root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    folder = folder.resolve()
    for drive in (folder, folder.parent):  # the drive is the parent of a partition
        if rotates := kernel.read(str((drive / "queue/rotational").relative_to(kernel.root))):
            model = kernel.read(str((drive / "device/model").relative_to(kernel.root)))
            found = " ".join(filter(None, (drive.name, model)))
            if rotates == "1" and drive.name.startswith(_VIRTUAL):
                return ok(f"{found} is virtual; the underlying hardware is unknown")
            if rotates == "1":
                return warn(f"{found} is a hard disk", "use an SSD, or ssd.enabled = false")
            return ok(f"{found}, solid state")
    return ok("unknown")


def inspect_speed(settings: SsdConfig, kernel: KernelFiles) -> Finding:
    """Measure with a temporary file that is larger than the caches of drives."""
    place = _nearest(settings.directory)
    free = os.statvfs(place)
    if free.f_bavail * free.f_frsize < _MEASURED_BYTES + settings.free_space_floor_bytes:
        return warn("not measured: the volume is too full", "free some space")
    with _scratch(place) as fd:
        is_direct = _go_direct(fd)
        write, read = _rates(fd)
    found = f"writes {format_bytes(write)}/s, reads {format_bytes(read)}/s"
    found += "" if is_direct else " (through the page cache)"
    if min(write, read) < _SLOW_BYTES:
        return warn(
            found, "use a faster drive; kvtier restores only when that is faster than computing"
        )
    return ok(found)


def _nearest(directory: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _mount(kernel: KernelFiles, path: Path) -> tuple[str, str]:
    """Return the type and the mount point of the file system of ``path``."""
    kind, mounted = "unknown", Path("/")
    for line in kernel.read("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place = Path(before.split()[4].replace("\\040", " "))
        if path.is_relative_to(place) and len(place.parts) >= len(mounted.parts):
            kind, mounted = after.split()[0], place
    return kind, str(mounted)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[int]:
    """Yield an unnamed temporary file, which cannot outlive this process."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        yield file.fileno()


def _go_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _keeps_a_page(fd: int) -> bool:
    with mmap.mmap(-1, PAGE_BYTES) as written, mmap.mmap(-1, PAGE_BYTES) as found:
        written[:] = os.urandom(PAGE_BYTES)
        try:
            os.pwritev(fd, [written], 0)
            os.preadv(fd, [found], 0)
        except OSError:
            return False
        return found[:] == written[:]


def _rates(fd: int) -> tuple[float, float]:
    """Return the bytes per second written and read."""
    with mmap.mmap(-1, _PIECE_BYTES) as piece:
        piece[:] = os.urandom(_PIECE_BYTES)
        places = range(0, _MEASURED_BYTES, _PIECE_BYTES)
        started_s = time.monotonic()
        for place in places:
            os.pwritev(fd, [piece], place)
        os.fdatasync(fd)
        written_s = time.monotonic()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for place in places:
            os.preadv(fd, [piece], place)
        read_s = time.monotonic()
    return _MEASURED_BYTES / (written_s - started_s), _MEASURED_BYTES / (read_s - written_s)
