"""What must be true of the machine before anything is allocated.

Each check raises StartError with the key and the remedy, and changes nothing that it did not have
to make: directories that are missing are created, because that is how writing is proved.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import Address, Config
from kvtier.config.units import format_size
from kvtier.engine.support import check_model
from kvtier.errors import StartError
from kvtier.transfer.shm import arena_socket

__all__ = ["MemoryFiles", "available_memory_bytes", "check_free", "check_pool", "check_start"]

_SOCKET_PATH_BYTES_MAX = 107  # sun_path of Linux is 108 bytes, the last one a zero

# Besides the arena the daemon itself takes up to 250 MB with a million entries, so this much has
# to be left over for it.
_DAEMON_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Where the kernel tells how much memory there is; tests give files of their own."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")


def check_start(config: Config, files: MemoryFiles | None = None) -> None:
    """Check all that the daemon and its engine need; raises StartError for the first lack."""
    _check_room("cpu.capacity", config.cpu.capacity_bytes, _DAEMON_BYTES, files or MemoryFiles())
    _check_socket(config.daemon.socket)
    if config.http.listen is not None:
        check_free("http.listen", config.http.listen)
    if config.ssd.enabled:
        _check_ssd(config)
    if config.engine.model is not None:
        check_model(config.engine.model, config.engine.context_limit)


def check_free(field: str, address: Address) -> None:
    """Check that an address can be listened on, now rather than after slow work; StartError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise StartError(
                field, f"cannot listen on {address}: {error.strerror}", "use a free port"
            ) from error


def check_pool(config: Config, files: MemoryFiles | None = None) -> None:
    """Check that an engine's pool fits into memory; raises StartError.

    The engine's own to ask, not the daemon's: an engine that outlived its daemon has its pool. A
    device says itself that its memory is full; the kernel would end a process only once it uses
    what it was given.
    """
    if config.engine.device == "cpu":
        _check_room("engine.pool", config.engine.pool_bytes, 0, files or MemoryFiles())


def available_memory_bytes(files: MemoryFiles | None = None) -> int | None:
    """Return the memory that may still be taken: the machine's, or less where a cgroup limits it.

    None where the kernel tells nothing (no Linux).
    """
    files = files or MemoryFiles()
    rooms = [_machine_bytes(files.meminfo), *_cgroup_rooms(files)]
    return min((room for room in rooms if room is not None), default=None)


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
            root, names = files.cgroup_root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = files.cgroup_root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / name.lstrip("/")
        # In a container the path may be the host's, which is not mounted: then its root is ours.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield _room(folder, *names)


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


def _check_room(field: str, wanted_bytes: int, other_bytes: int, files: MemoryFiles) -> None:
    """Check that what ``field`` wants fits into memory, with ``other_bytes`` to spare."""
    available = available_memory_bytes(files)
    if available is not None and wanted_bytes + other_bytes > available:
        fits = max(0, available - other_bytes) >> 20
        raise StartError(
            field,
            f"{format_size(wanted_bytes)} do not fit into the "
            f"{available >> 20}MiB of memory that are available",
            f"set it to at most {fits}MiB, or free memory or raise the container's limit",
        )


def _check_socket(path: Path) -> None:
    excess = len(os.fsencode(arena_socket(path))) - _SOCKET_PATH_BYTES_MAX
    if excess > 0:
        raise StartError(
            "daemon.socket",
            f"its path, {path}, is {excess} bytes longer than Linux allows",
            "use a shorter path, such as /run/kvtier/kvtier.sock",
        )
    if path.exists() and not path.is_socket():
        raise StartError("daemon.socket", f"{path} is no socket", "remove it or use another path")
    _check_writable("daemon.socket", path.parent)
    # The fallback is under /tmp, where anyone may have made the directory first.
    owner = path.parent.stat().st_uid
    if owner not in {0, os.geteuid()}:
        raise StartError(
            "daemon.socket",
            f"{path.parent} belongs to user {owner}, who could replace the socket",
            "use a directory of your own",
        )


def _check_ssd(config: Config) -> None:
    directory = config.ssd.directory
    _check_writable("ssd.directory", directory)
    free = shutil.disk_usage(directory).free + _files_bytes(directory)
    wanted = config.ssd.capacity_bytes + config.ssd.free_space_floor_bytes
    if wanted > free:
        fits = max(0, free - config.ssd.free_space_floor_bytes) >> 20
        raise StartError(
            "ssd.capacity",
            f"{format_size(config.ssd.capacity_bytes)} and the floor of "
            f"{format_size(config.ssd.free_space_floor_bytes)} do not fit into the {free >> 20}MiB "
            f"that are free at {directory}",
            f"set it to at most {fits}MiB, or use another ssd.directory",
        )


def _files_bytes(directory: Path) -> int:
    """Return what the tier's own files already take: the capacity counts them too."""
    with os.scandir(directory) as entries:
        return sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        )


def _check_writable(field: str, directory: Path) -> None:
    """Make the directory, private to this user, and write a file into it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StartError(
            field,
            f"{directory} cannot be written: {reason}",
            "give a directory that this user may write",
        ) from error
