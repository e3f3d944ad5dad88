"""Checks of the machine before a daemon or engine starts.

Each check raises StartError with the key and the remedy. Checks change nothing, but they create
missing directories to prove that these are writable.
"""

import importlib.util
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kvtier.api.http.tenant import api_keys
from kvtier.api.rpc.credentials import Credentials
from kvtier.config import Config, ListenAddress
from kvtier.config.model import with_secrets
from kvtier.config.units import format_size
from kvtier.core.limits import OPEN_FILES_LEAST, THREADS_LEAST
from kvtier.daemon.supervisor import engine_is_running
from kvtier.daemon.tiers.memory import MemoryFiles, available_memory_bytes
from kvtier.daemon.tiers.opening import check_tier, configured
from kvtier.engine.support import check_model
from kvtier.errors import StartError
from kvtier.permissions import check_owner, check_parents, check_writable, directory_mode
from kvtier.transfer.shm import arena_socket

__all__ = [
    "check_free",
    "check_limits",
    "check_memory",
    "check_packages",
    "check_pool",
    "check_socket",
    "check_start",
    "find_problems",
]

_SOCKET_PATH_BYTES_MAX = 107  # sun_path of Linux is 108 bytes, the last one a zero

_DAEMON_BYTES = 256 << 20
"""Memory of the daemon beside the arena: up to 250 MB with a million blocks."""

_PAGE_TABLE_SHARE = 512
"""Page tables take 8 bytes for every 4096 bytes of the arena."""

_ENGINE_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "tokenizers", "jinja2")
"""Packages of the extra ``engine``."""


def check_start(config: Config, files: MemoryFiles | None = None) -> None:
    """Check what the daemon and its engine need. Raises StartError for the first problem.

    A tier is checked only if it is required: the daemon can serve without the others.
    """
    for check in _checks(config, files or MemoryFiles(), needs_all_tiers=False):
        check()


def find_problems(config: Config) -> list[StartError]:
    """Return all problems, including those that the daemon tolerates."""
    found: list[StartError] = []
    for check in _checks(config, MemoryFiles(), needs_all_tiers=True):
        try:
            check()
        except StartError as error:
            found.append(error)
    return found


def _checks(
    config: Config, files: MemoryFiles, *, needs_all_tiers: bool
) -> Iterator[Callable[[], object]]:
    """Yield the checks in order; each raises StartError."""
    yield check_limits
    yield partial(check_memory, config, files)
    yield partial(_check_socket_path, config)
    if config.rpc.listen is not None:
        yield partial(check_free, "rpc.listen", config.rpc.listen)
        yield partial(Credentials, config.rpc)
    if config.http.listen is not None:
        yield partial(check_free, "http.listen", config.http.listen)
    for name in configured(config):
        if needs_all_tiers or config.tiers[name].is_required:
            yield partial(check_tier, config, name)
    yield partial(with_secrets, config)
    if config.engine.model is not None:
        yield check_packages
        yield partial(check_model, config.engine.model, config.engine.context_limit)
        if config.engine.api_keys_file is not None:
            yield partial(api_keys, config.engine.api_keys_file)


def _check_socket_path(config: Config) -> None:
    """Check that the daemon's socket can be created."""
    path, is_shared = config.daemon.socket, bool(config.daemon.allowed_uids)
    _check_name(path)
    check_writable("daemon.socket", path.parent, directory_mode(is_shared=is_shared))
    check_socket(path, os.geteuid(), is_shared=is_shared)


def check_free(field: str, address: ListenAddress) -> None:
    """Check that an address is free. Raises StartError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise StartError(
                field, f"cannot listen on {address}: {error.strerror}", "use a free port"
            ) from error


def check_limits() -> None:
    """Check the limits of open files and threads. Raises StartError.

    First raises the soft limit of open files to the hard limit. A process that runs out of either
    is killed by an assertion in gRPC.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < OPEN_FILES_LEAST:
        raise StartError(
            "open files",
            f"the hard limit (RLIMIT_NOFILE) is {most}, at least {OPEN_FILES_LEAST} are required",
            "raise it: ulimit -n 65536, LimitNOFILE=65536 in a unit, --ulimit nofile=65536 for a "
            "container",
        )
    num_threads = _startable_threads()
    if num_threads < THREADS_LEAST:
        raise StartError(
            "threads",
            f"only {num_threads} can be started, at least {THREADS_LEAST} are required",
            "raise the limit: ulimit -u (RLIMIT_NPROC), TasksMax= in a unit, --pids-limit for a "
            "container (pids.max), or ulimit -v (RLIMIT_AS)",
        )


def _startable_threads() -> int:
    """Return how many threads can be started, up to ``THREADS_LEAST``."""
    enough = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(THREADS_LEAST):
            thread = threading.Thread(target=enough.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass  # the limit is reached
    finally:
        enough.set()
    for thread in started:
        thread.join()
    return len(started)


def check_pool(config: Config, files: MemoryFiles | None = None) -> None:
    """Check that the pool of a separate engine fits into memory. Raises StartError.

    Only needed on a CPU: Linux overcommits, and would kill the process later.
    """
    if config.engine.device == "cpu":
        _check_room("engine.pool", config.engine.pool_bytes, 0, files or MemoryFiles())


def check_memory(config: Config, files: MemoryFiles) -> None:
    """Check that everything that ``kvtier serve`` starts fits into memory. Raises StartError."""
    pool_bytes = 0
    is_started = config.engine.model is not None and not engine_is_running(config.daemon.socket)
    if (
        is_started and config.engine.device == "cpu"
    ):  # an engine that outlived its daemon already has its pool
        pool_bytes = config.engine.pool_bytes
    arena_bytes = config.cpu.capacity_bytes
    other_bytes = _DAEMON_BYTES + arena_bytes // _PAGE_TABLE_SHARE + pool_bytes
    _check_room("cpu.capacity", arena_bytes, other_bytes, files)


def _check_room(field: str, wanted_bytes: int, other_bytes: int, files: MemoryFiles) -> None:
    """Check that ``wanted_bytes`` and ``other_bytes`` fit into memory."""
    available = available_memory_bytes(files)
    if available is not None and wanted_bytes + other_bytes > available:
        fits = max(0, available - other_bytes) >> 20
        beside = f" plus {other_bytes >> 20}MiB for the rest" if other_bytes else ""
        raise StartError(
            field,
            f"{format_size(wanted_bytes)}{beside} exceed the {available >> 20}MiB of free memory",
            f"set it to at most {fits}MiB, free memory, or raise the container's limit",
        )


def check_socket(path: Path, uid: int, *, is_shared: bool) -> None:
    """Check the path of a socket of user ``uid``, and who can reach or replace it.

    The directory must exist. Raises StartError.
    """
    _check_name(path)
    check_owner(path.parent, uid)
    check_parents(path, "daemon.socket", uid)
    if is_shared:
        _check_passable(path.parent)


def _check_name(path: Path) -> None:
    excess = len(os.fsencode(arena_socket(path))) - _SOCKET_PATH_BYTES_MAX
    if excess > 0:
        raise StartError(
            "daemon.socket",
            f"the path {path} is {excess} bytes too long",
            "use a shorter path, such as /run/kvtier/kvtier.sock",
        )
    if path.exists() and not path.is_socket():
        raise StartError(
            "daemon.socket", f"{path} exists and is not a socket", "remove it, or use another path"
        )


def _check_passable(directory: Path) -> None:
    """Check that other users can reach the sockets in a directory."""
    for folder in (directory, *directory.parents):
        if not folder.stat().st_mode & 0o011:
            raise StartError(
                "daemon.allowed_uids",
                f"other users have no access to {folder}, where the sockets are",
                f"chmod 711 {folder}, or use a daemon.socket such as /run/kvtier/kvtier.sock",
            )


def check_packages() -> None:
    """Check that the packages of an engine are installed, without importing them."""
    for name in _ENGINE_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise StartError(
                "engine", f"package {name} is not installed", "pip install 'kvtier[engine]'"
            )
