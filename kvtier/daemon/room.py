"""Whether there is a place for what the daemon keeps: a directory that it may write, and room.

Raises StartError with the key and the remedy, and changes nothing that it did not have to make:
directories that are missing are created, because that is how writing is proved.
"""

import contextlib
import shutil
import tempfile
from pathlib import Path

from kvtier.config import Config
from kvtier.config.units import format_size
from kvtier.errors import StartError
from kvtier.tiers.ssd.segment import segment_number

__all__ = ["check_space", "check_ssd", "check_writable"]


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
        reason = (error.strerror or str(error)).lower()
        raise StartError(
            "ssd.directory", f"{directory}: {reason}", "repair or name another one"
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
            f"{cure}, or use another ssd.directory",
        )


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
        reason = (error.strerror or str(error)).lower()
        raise StartError(
            field,
            f"{directory} cannot be written: {reason}",
            "give a directory that this user may write",
        ) from error


def _segments_bytes(directory: Path) -> int:
    """Return what the tier's own files already take: the capacity counts them, and no others."""
    num_bytes = 0
    for path in directory.iterdir():
        if segment_number(path) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                num_bytes += path.lstat().st_blocks * 512
    return num_bytes
