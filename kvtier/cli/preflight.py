"""What must be true of the machine before anything is allocated.

Each check raises StartError with the key and the remedy, and changes nothing that it did not have
to make: directories that are missing are created, because that is how writing is proved.
"""

import os
import shutil
import socket
import tempfile
from pathlib import Path

from kvtier.api.http.tenant import read_api_keys
from kvtier.api.rpc.credentials import read_credentials
from kvtier.config import Address, Config
from kvtier.config.units import format_size
from kvtier.daemon.memory import MemoryFiles, available_memory_bytes
from kvtier.daemon.supervisor import engine_is_running
from kvtier.engine.support import check_model
from kvtier.errors import StartError
from kvtier.transfer.shm import arena_socket

__all__ = ["check_free", "check_pool", "check_start"]

_SOCKET_PATH_BYTES_MAX = 107  # sun_path of Linux is 108 bytes, the last one a zero

# Besides the arena the daemon itself takes up to 250 MB with a million entries, so this much has
# to be left over for it.
_DAEMON_BYTES = 256 << 20


def check_start(config: Config, files: MemoryFiles | None = None) -> None:
    """Check all that the daemon and its engine need; raises StartError for the first lack."""
    _check_host(config, files or MemoryFiles())
    _check_socket(config.daemon.socket, is_shared=bool(config.daemon.allowed_uids))
    if config.rpc.listen is not None:
        check_free("rpc.listen", config.rpc.listen)
        read_credentials(config.rpc)
    if config.http.listen is not None:
        check_free("http.listen", config.http.listen)
    if config.ssd.enabled:
        _check_ssd(config)
    if config.engine.model is not None:
        check_model(config.engine.model, config.engine.context_limit)
        if config.engine.api_keys_file is not None:
            read_api_keys(config.engine.api_keys_file)


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

    For an engine alone; one that a daemon starts is part of that one's check. A device says itself
    that its memory is full; the kernel would end a process only once it uses what it was given.
    """
    if config.engine.device == "cpu":
        _check_room("engine.pool", config.engine.pool_bytes, 0, files or MemoryFiles())


def _check_host(config: Config, files: MemoryFiles) -> None:
    """Check that all that one command starts fits into the host's memory, together."""
    pool_bytes = 0
    is_started = config.engine.model is not None and not engine_is_running(config.daemon.socket)
    if is_started and config.engine.device == "cpu":  # one that outlived a daemon has its pool
        pool_bytes = config.engine.pool_bytes
    _check_room("cpu.capacity", config.cpu.capacity_bytes, _DAEMON_BYTES + pool_bytes, files)


def _check_room(field: str, wanted_bytes: int, other_bytes: int, files: MemoryFiles) -> None:
    """Check that what ``field`` wants fits into memory, with ``other_bytes`` to spare."""
    available = available_memory_bytes(files)
    if available is not None and wanted_bytes + other_bytes > available:
        fits = max(0, available - other_bytes) >> 20
        beside = f" and {other_bytes >> 20}MiB for all else" if other_bytes else ""
        raise StartError(
            field,
            f"{format_size(wanted_bytes)}{beside} do not fit into the "
            f"{available >> 20}MiB of memory that are available",
            f"set it to at most {fits}MiB, or free memory or raise the container's limit",
        )


def _check_socket(path: Path, *, is_shared: bool) -> None:
    excess = len(os.fsencode(arena_socket(path))) - _SOCKET_PATH_BYTES_MAX
    if excess > 0:
        raise StartError(
            "daemon.socket",
            f"its path, {path}, is {excess} bytes longer than Linux allows",
            "use a shorter path, such as /run/kvtier/kvtier.sock",
        )
    if path.exists() and not path.is_socket():
        raise StartError("daemon.socket", f"{path} is no socket", "remove it or use another path")
    _check_writable("daemon.socket", path.parent, 0o711 if is_shared else 0o700)
    # The fallback is under /tmp, where anyone may have made the directory first.
    owner = path.parent.stat().st_uid
    if owner not in {0, os.geteuid()}:
        raise StartError(
            "daemon.socket",
            f"{path.parent} belongs to user {owner}, who could replace the socket",
            "use a directory of your own",
        )
    if is_shared:
        _check_passable(path.parent)


def _check_passable(directory: Path) -> None:
    """Check that other users come as far as the sockets."""
    for folder in (directory, *directory.parents):
        if not folder.stat().st_mode & 0o011:
            raise StartError(
                "daemon.allowed_uids",
                f"other users cannot pass through {folder} to the daemon's sockets",
                f"chmod 711 {folder}, or use a daemon.socket such as /run/kvtier/kvtier.sock",
            )


def _check_ssd(config: Config) -> None:
    directory = config.ssd.directory
    _check_writable("ssd.directory", directory)
    free = shutil.disk_usage(directory).free + _files_bytes(directory)
    wanted = config.ssd.capacity_bytes + config.ssd.free_space_floor_bytes
    if wanted > free:
        fits = max(0, free - config.ssd.free_space_floor_bytes) >> 20
        cure = f"set it to at most {fits}MiB" if fits else "lower ssd.free_space_floor"
        raise StartError(
            "ssd.capacity",
            f"{format_size(config.ssd.capacity_bytes)} and the floor of "
            f"{format_size(config.ssd.free_space_floor_bytes)} do not fit into the {free >> 20}MiB "
            f"that are free at {directory}",
            f"{cure}, or use another ssd.directory",
        )


def _files_bytes(directory: Path) -> int:
    """Return what the tier's own files already take: the capacity counts them too."""
    with os.scandir(directory) as entries:
        return sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        )


def _check_writable(field: str, directory: Path, mode: int = 0o700) -> None:
    """Make the directory, by default private to this user, and write a file into it."""
    try:
        is_new = not directory.exists()
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        if is_new:
            directory.chmod(mode)  # whatever the umask took away
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StartError(
            field,
            f"{directory} cannot be written: {reason}",
            "give a directory that this user may write",
        ) from error
