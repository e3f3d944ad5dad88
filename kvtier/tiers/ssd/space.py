"""Checks that the SSD tier's volume has enough space for it and for the files of others."""

import contextlib
import math
import shutil
from pathlib import Path

from kvtier.config.section import GIB
from kvtier.config.units import format_size
from kvtier.errors import StartError, reason_of
from kvtier.permissions import check_writable
from kvtier.tiers.ssd.segment import segment_number
from kvtier.tiers.ssd.settings import SsdConfig

__all__ = ["check_space", "check_ssd", "floor_beside_system"]

_SYSTEM_SHARE = 0.15
"""Share of the system's drive to keep free: with less, a kubelet evicts pods and removes images."""

_SMALL_SHARE = 0.01
"""A tier smaller than this share of the system's drive is not the reason if that fills up."""


def check_ssd(settings: SsdConfig) -> None:
    """Check that the SSD tier may write its directory and that its capacity fits.

    Raises StartError.
    """
    directory = settings.directory
    check_writable("ssd.directory", directory)
    check_space(settings, directory)


def check_space(settings: SsdConfig, directory: Path) -> None:
    """Check that the SSD tier fits. Raises StartError.

    ``directory`` exists: it is the tier's own, or a parent of it, whose files belong to others.
    """
    try:
        own_bytes = _segments_bytes(directory) if directory == settings.directory else 0
        free = shutil.disk_usage(directory).free + own_bytes
    except OSError as error:
        raise StartError(
            "ssd.directory", f"{directory}: {reason_of(error)}", "repair it or set another one"
        ) from error
    wanted = settings.capacity_bytes + settings.free_space_floor_bytes
    if wanted > free:
        fits = max(0, free - settings.free_space_floor_bytes) >> 20
        cure = f"set it to at most {fits}MiB" if fits else "lower ssd.free_space_floor"
        raise StartError(
            "ssd.capacity",
            f"{format_size(settings.capacity_bytes)} and the floor of "
            f"{format_size(settings.free_space_floor_bytes)} do not fit into the {free >> 20}MiB "
            f"that are free at {directory}",
            f"{cure}, make room there, or use another ssd.directory",
        )


def floor_beside_system(settings: SsdConfig, directory: Path, root: Path = Path("/")) -> int:
    """Return the ssd.free_space_floor that the system's drive needs; 0 if it is safe.

    That drive holds the root or, in a container, the kubelet's directories, from which /etc/hosts
    is mounted. ``directory`` is as for ``check_space``.
    """
    device = directory.stat().st_dev
    if all(device != path.stat().st_dev for path in (root, root / "etc/hosts") if path.exists()):
        return 0
    disk = shutil.disk_usage(directory)
    wanted_bytes = math.ceil(disk.total * _SYSTEM_SHARE / GIB) * GIB
    is_small = settings.capacity_bytes < disk.total * _SMALL_SHARE
    if is_small or settings.free_space_floor_bytes >= wanted_bytes:
        return 0
    own_bytes = _segments_bytes(directory) if directory == settings.directory else 0
    left_bytes = disk.free + own_bytes - settings.capacity_bytes
    return wanted_bytes if left_bytes < wanted_bytes else 0


def _segments_bytes(directory: Path) -> int:
    """Return the size of the tier's own files, which count against the capacity."""
    num_bytes = 0
    for path in directory.iterdir():
        if segment_number(path) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                num_bytes += path.lstat().st_blocks * 512
    return num_bytes
