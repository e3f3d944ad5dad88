"""Identifies a tier's medium, so that measurements of it are not used for another medium."""

import hashlib
import os
from collections.abc import Collection

import psutil

from kvtier.config import Config
from kvtier.core.residency import TierName

__all__ = ["devices_of"]

_DIGITS = 12


def devices_of(config: Config, tiers: Collection[TierName]) -> dict[TierName, str]:
    """Return a name for the medium of each given tier; blocks while the disk does not answer."""
    devices = {}
    if TierName.SSD in tiers:
        devices[TierName.SSD] = _volume(os.path.realpath(config.ssd.directory))
    if TierName.REMOTE in tiers:
        place = config.remote.url.rpartition("@")[2]  # a different login is still the same server
        devices[TierName.REMOTE] = hashlib.sha256(place.encode()).hexdigest()[:_DIGITS]
    return devices


def _volume(directory: str) -> str:
    """Return device, file system and size of the volume that a directory is on."""
    inside = [
        part
        for part in psutil.disk_partitions(all=True)
        if os.path.commonpath([part.mountpoint, directory]) == part.mountpoint
    ]
    found = max(inside, key=lambda part: len(part.mountpoint), default=None)
    name = f"{found.device} {found.fstype}" if found else "unknown"
    try:
        status = os.statvfs(directory)
    except OSError:  # it was there a moment ago, or the tier is a fake
        return f"{name}, gone"
    return f"{name}, {status.f_blocks * status.f_frsize / 2**30:.0f} GiB"
