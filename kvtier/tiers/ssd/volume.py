"""The file system a store is on, which others use too: what it has left, and whether it takes more.

Rules
-----
* Below a floor nothing is written. Where the volume cannot take a new segment, not even in the
  place of one that was given up for it, the store is read-only: writes are refused without touching
  the disk, and once a second it is looked at again.
* Others must not drive the cache out. A segment given up in vain, because somebody else took its
  room or needs more still, is the last one for ``_RELIEF_S``: so a store that others press shrinks
  by a segment a minute, and long before it is gone somebody has read the gauge.
"""

import errno
import os
from collections.abc import Callable

__all__ = ["NO_SPACE", "NO_WRITES", "Volume"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that giving up a segment may cure."""

NO_WRITES = NO_SPACE | {errno.EROFS}
"""Errors of a volume that takes no writes but may still be read."""

_RELIEF_S = 60
"""Time from giving up one segment in vain to giving up the next."""


class Volume:
    """What is left of a volume, as ``measure`` tells it. Asked by one writer, read by anyone."""

    def __init__(
        self,
        measure: Callable[[], os.statvfs_result],
        now_s: Callable[[], int],
        *,
        free_space_floor_bytes: int = 0,
        free_inodes_floor: int = 0,
    ) -> None:
        self._measure = measure
        self._now_s = now_s
        self.free_space_floor_bytes = free_space_floor_bytes
        self.free_inodes_floor = free_inodes_floor
        self._looked_s = 0
        self._in_vain_s: int | None = None
        self.read_only: str | None = None
        """Why nothing is written now, in words for an operator; None while writes go on."""
        self.num_refused = 0
        """Blocks refused while read-only."""

    def shortage(self, num_bytes: int, num_inodes: int = 1) -> str | None:
        """Return why the volume cannot take so much more, in words; None where it can."""
        volume = self._measure()
        if volume.f_flag & os.ST_RDONLY:
            return "the file system is mounted read-only"
        free_bytes = volume.f_bavail * volume.f_frsize
        if free_bytes - num_bytes < self.free_space_floor_bytes:
            floor = f"ssd.free_space_floor ({self.free_space_floor_bytes >> 20} MiB)"
            return f"{free_bytes >> 20} MiB are free, too few for {floor}"
        # Some file systems (btrfs) make inodes as they go, and count none.
        if volume.f_files and volume.f_favail - num_inodes < self.free_inodes_floor:
            floor = f"ssd.free_inodes_floor ({self.free_inodes_floor})"
            return f"{volume.f_favail} inodes are free, too few for {floor}"
        return None

    def check_floors(self) -> None:
        """Become read-only if the volume has less free than the floors, or is mounted read-only."""
        if (reason := self.shortage(0, 0)) is not None:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Become read-only, because of ``reason``."""
        self.read_only = reason
        self._looked_s = self._now_s()

    def takes_writes(self) -> bool:
        """Tell whether a write may be tried; looks at the volume once a second while read-only.

        Below a floor one may be tried with a segment's room, and only its success ends read-only.
        """
        if self.read_only is None:
            return True
        now_s = self._now_s()
        if now_s == self._looked_s:  # not "<": a clock set back must not stop us for ever
            return False
        self._looked_s = now_s
        # Room for a segment may come from giving one up: all that counts here are the floors.
        reason = self.shortage(0, 0)
        self.read_only = reason
        return reason is None or (self._is_writable() and self.may_relieve())

    def resume(self) -> None:
        """Be no longer read-only: something was written."""
        self.read_only = None

    def may_relieve(self) -> bool:
        """Tell whether a segment may be given up for space that others took."""
        return self._in_vain_s is None or abs(self._now_s() - self._in_vain_s) >= _RELIEF_S

    def note_in_vain(self) -> None:
        """Note that a segment was given up, and no new one could be made in its place."""
        self._in_vain_s = self._now_s()

    def _is_writable(self) -> bool:
        return not self._measure().f_flag & os.ST_RDONLY
