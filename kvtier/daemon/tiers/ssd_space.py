"""Whether there is a place for what the daemon keeps: a directory that it may write, and room.

Raises StartError with the key and the remedy, and changes nothing that it did not have to make:
directories that are missing are created, because that is how writing is proved.
"""

import contextlib
import math
import shutil
import tempfile
from pathlib import Path

from kvtier.config import Config
from kvtier.config.section import GIB
from kvtier.config.units import format_size
from kvtier.errors import StartError, reason_of
from kvtier.tiers.ssd.segment import segment_number

__all__ = [
    "check_owner",
    "check_space",
    "check_ssd",
    "check_writable",
    "directory_mode",
    "floor_beside_system",
]

_SYSTEM_SHARE = 0.15
"""Of the system's own drive: with less free a kubelet evicts pods, at last for their images."""

_SMALL_SHARE = 0.01
"""Of that drive: where it is full, a tier of less is not why."""


def check_ssd(config: Config) -> None:
    """Check that the SSD tier may write its directory, and that its capacity fits; StartError."""
    directory = config.ssd.directory
    check_writable("ssd.directory", directory)
    check_space(config, directory)


def check_space(config: Config, directory: Path) -> None:
    """Check that the SSD tier fits; raises StartError.

    ``directory`` exists: the tier's own, or one above it, whose files are others'.
    """
    try:
        own_bytes = _segments_bytes(directory) if directory == config.ssd.directory else 0
        free = shutil.disk_usage(directory).free + own_bytes
    except OSError as error:
        raise StartError(
            "ssd.directory", f"{directory}: {reason_of(error)}", "repair it or set another one"
        ) from error
    wanted = config.ssd.capacity_bytes + config.ssd.free_space_floor_bytes
    if wanted > free:
        fits = max(0, free - config.ssd.free_space_floor_bytes) >> 20
        cure = f"set it to at most {fits}MiB" if fits else "lower ssd.free_space_floor"
        raise StartError(
            "ssd.capacity",
            f"{format_size(config.ssd.capacity_bytes)} and the floor of "
            f"{format_size(config.ssd.free_space_floor_bytes)} do not fit into the {free >> 20}MiB "
            f"that are free at {directory}",
            f"{cure}, make room there, or use another ssd.directory",
        )


def floor_beside_system(config: Config, directory: Path, root: Path = Path("/")) -> int:
    """Return the ssd.free_space_floor that the system's own drive needs, or 0: it is safe.

    That drive has the root, or in a container the kubelet's folders, where /etc/hosts is from.
    ``directory`` as for check_space.
    """
    device = directory.stat().st_dev
    if all(device != path.stat().st_dev for path in (root, root / "etc/hosts") if path.exists()):
        return 0
    disk = shutil.disk_usage(directory)
    wanted_bytes = math.ceil(disk.total * _SYSTEM_SHARE / GIB) * GIB
    is_small = config.ssd.capacity_bytes < disk.total * _SMALL_SHARE
    if is_small or config.ssd.free_space_floor_bytes >= wanted_bytes:
        return 0
    own_bytes = _segments_bytes(directory) if directory == config.ssd.directory else 0
    left_bytes = disk.free + own_bytes - config.ssd.capacity_bytes
    return wanted_bytes if left_bytes < wanted_bytes else 0


def check_writable(field: str, directory: Path, mode: int = 0o700) -> None:
    """Make the directory, by default private to this user, and write a file into it."""
    try:
        is_new = not directory.exists()
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        if is_new:
            directory.chmod(mode)  # whatever the umask took away
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartError(
            field,
            f"{directory} cannot be written: {reason_of(error)}",
            "give a directory that this user may write",
        ) from error


def directory_mode(*, is_shared: bool) -> int:
    """Return the mode of a new directory for sockets; if shared, other users can enter it."""
    return 0o711 if is_shared else 0o700


def check_owner(directory: Path, uid: int) -> None:
    """Check that root or user ``uid`` owns the directory, so that nobody else replaces sockets."""
    owner = directory.stat().st_uid  # the default may be in /tmp, where anyone could create it
    if owner not in {0, uid}:
        raise StartError(
            "daemon.socket",
            f"{directory} belongs to user {owner}, who could replace the socket",
            "use a directory of your own",
        )


def _segments_bytes(directory: Path) -> int:
    """Return the size of the tier's own files, which are the ones that count for the capacity."""
    num_bytes = 0
    for path in directory.iterdir():
        if segment_number(path) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                num_bytes += path.lstat().st_blocks * 512
    return num_bytes
