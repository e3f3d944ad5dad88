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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "DAY_S",
    "NO_SPACE",
    "NO_WRITES",
    "AgeLimit",
    "Clock",
    "Volume",
    "WriteBudget",
    "wall_clock_s",
]


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


DAY_S = 86_400
"""What a budget is for, in seconds."""


class WriteBudget:
    """What is left of ``day_bytes`` a day; 0: there is no limit.

    ``written_bytes`` tells all that was written since the start, and ``now_s`` the time of day:
    where that is set back nothing is refilled for the while, and where it leaps ahead one day's
    budget comes at once, and no more. May be asked from any thread.
    """

    def __init__(
        self, day_bytes: int, written_bytes: Callable[[], int], now_s: Callable[[], int]
    ) -> None:
        self.day_bytes = day_bytes
        self._written_bytes = written_bytes
        self._now_s = now_s
        self._left_bytes = float(day_bytes)
        self._seen_bytes = written_bytes()
        self._seen_s = now_s()
        self._refused_bytes = 0
        """Of the write that was refused last, where none was allowed since."""
        self._lock = threading.Lock()

    @property
    def is_limited(self) -> bool:
        """Tell whether there is a budget at all."""
        return self.day_bytes > 0

    @property
    def is_used_up(self) -> bool:
        """Tell whether a write was refused that would be refused now too."""
        return self._refused_bytes > 0 and self.available_bytes() < self._refused_bytes

    def available_bytes(self) -> int:
        """Return what may be written now; 0 while there is a debt."""
        now_s, written_bytes = self._now_s(), self._written_bytes()
        with self._lock:
            gained = max(0, now_s - self._seen_s) * self.day_bytes / DAY_S
            self._take(written_bytes - self._seen_bytes)
            self._left_bytes = min(self.day_bytes, self._left_bytes + gained)
            self._seen_s, self._seen_bytes = now_s, written_bytes
            return max(0, int(self._left_bytes))

    def allows(self, num_bytes: int) -> bool:
        """Tell whether so much may be written now."""
        is_allowed = not self.is_limited or num_bytes <= self.available_bytes()
        self._refused_bytes = 0 if is_allowed else num_bytes
        return is_allowed

    def change(self, day_bytes: int) -> None:
        """Have another budget from now on: the difference is given, or taken, at once."""
        self.available_bytes()  # until now the old one counts
        with self._lock:
            self._left_bytes += day_bytes - self.day_bytes
            self.day_bytes = day_bytes
            self._take(0)

    def day_ago_s(self) -> int:
        """Return since when what was written counts."""
        return self._now_s() - DAY_S

    def recall(self, num_bytes: int) -> None:
        """Take off what an earlier process has written within the last day."""
        with self._lock:
            self._take(num_bytes)

    def _take(self, num_bytes: int) -> None:
        # A debt of more than a day's budget would outlast the day that it is for.
        self._left_bytes = max(self._left_bytes - num_bytes, -self.day_bytes)


Clock = Callable[[], int]
"""Seconds since 1970: what is written by it must mean something after a restart."""

_LATEST_S = (1 << 32) - 1
"""What an entry can say, in the year 2106."""


def wall_clock_s() -> int:
    """Return the time of day."""
    return int(time.time())


@dataclass(slots=True)
class AgeLimit:
    """Blocks written more than ``max_age_s`` ago are not served; 0: no limit. May be changed.

    A clock that was set back lets blocks live longer, one that was set forward hides them while it
    is wrong. Neither makes a wrong block.
    """

    max_age_s: int = 0
    now_s: Clock = wall_clock_s

    def stamp_s(self) -> int:
        """Return the time to write down: later than that of no record, and within an entry."""
        return min(max(1, self.now_s()), _LATEST_S)

    def oldest_s(self) -> int:
        """Return when the oldest blocks that may be served were written."""
        max_age_s = self.max_age_s
        return max(0, self.now_s() - max_age_s) if max_age_s else 0
