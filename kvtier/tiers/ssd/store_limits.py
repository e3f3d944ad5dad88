"""Limits of a store: free space of its volume, its daily write budget, and the age of blocks.

Rules
-----
* Below a floor of the volume nothing is written. If the volume cannot hold a new segment, even
  after another was removed for it, the store becomes read-only: writes are rejected without
  touching the disk, and the volume is checked again once a second.
* Other users of the volume must not displace the cache. If removing a segment did not help, because
  others took its space or need more, the next one is removed ``_RELIEF_S`` later at the earliest. A
  store under pressure thus shrinks by one segment per minute, and operators notice long before it
  is gone.
* The write budget is a token bucket that holds one day's budget and refills continuously, so an
  idle night pays for a busy morning. All writes count. Writes needed for correctness (footers,
  marks) are made even without budget left; that debt is paid off before the next block is written.

The bucket is not stored. At startup, writes of the last day are deducted only as far as blocks that
are still stored show them.
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
"""Errors that removing a segment may fix."""

NO_WRITES = NO_SPACE | {errno.EROFS}
"""Errors of a volume that accepts no writes but may still be readable."""

_RELIEF_S = 60
"""Seconds between removing a segment in vain and removing the next."""


class Volume:
    """Free space of a volume as ``measure`` reports it. Used by one writer, read by any thread."""

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
        self._checked_s = 0
        self._failed_reclaim_s: int | None = None
        self.read_only: str | None = None
        """Why nothing is written now, for an operator to read; None while writes continue."""
        self.num_refused = 0
        """Blocks rejected while read-only."""

    def shortage(self, num_bytes: int, num_inodes: int = 1) -> str | None:
        """Return why the volume cannot hold this much more, in words; None if it can."""
        volume = self._measure()
        if volume.f_flag & os.ST_RDONLY:
            return "the file system is mounted read-only"
        free_bytes = volume.f_bavail * volume.f_frsize
        if free_bytes - num_bytes < self.free_space_floor_bytes:
            floor = f"ssd.free_space_floor ({self.free_space_floor_bytes >> 20} MiB)"
            return f"{free_bytes >> 20} MiB free, below {floor}"
        # Some file systems (btrfs) create inodes on demand and report none.
        if volume.f_files and volume.f_favail - num_inodes < self.free_inodes_floor:
            floor = f"ssd.free_inodes_floor ({self.free_inodes_floor})"
            return f"{volume.f_favail} inodes free, below {floor}"
        return None

    def check_floors(self) -> None:
        """Become read-only if free space is below the floors or the volume is read-only."""
        if (reason := self.shortage(0, 0)) is not None:
            self.set_read_only(reason)

    def set_read_only(self, reason: str) -> None:
        """Become read-only for this reason."""
        self.read_only = reason
        self._checked_s = self._now_s()

    def accepts_writes(self) -> bool:
        """Return whether a write may be tried. Checks the volume once a second while read-only.

        Below a floor, a write may be tried if removing a segment may help; only its success ends
        read-only.
        """
        if self.read_only is None:
            return True
        now_s = self._now_s()
        if now_s == self._checked_s:  # not "<": the clock may be set back
            return False
        self._checked_s = now_s
        # Removing a segment may make room for a new one, so only the floors count here.
        reason = self.shortage(0, 0)
        self.read_only = reason
        return reason is None or (self._is_writable() and self.may_reclaim_for_others())

    def set_writable(self) -> None:
        """Leave read-only after a successful write."""
        self.read_only = None

    def may_reclaim_for_others(self) -> bool:
        """Return whether a segment may be removed to make up for space that others took."""
        return (
            self._failed_reclaim_s is None
            or abs(self._now_s() - self._failed_reclaim_s) >= _RELIEF_S
        )

    def note_failed_reclaim(self) -> None:
        """Note that a segment was removed and no new one could be created in its place."""
        self._failed_reclaim_s = self._now_s()

    def _is_writable(self) -> bool:
        return not self._measure().f_flag & os.ST_RDONLY


DAY_S = 86_400
"""Seconds that a budget covers."""


class WriteBudget:
    """What is left of ``day_bytes`` per day; 0: unlimited. Thread-safe.

    ``written_bytes`` returns all bytes written since the start, and ``now_s`` the time of day.
    After the clock was set back nothing is refilled for that time; after a leap forward at most one
    day's budget is.
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
        """Size of the last rejected write; 0 after one was allowed."""
        self._lock = threading.Lock()

    @property
    def is_limited(self) -> bool:
        """Return whether a budget is set."""
        return self.day_bytes > 0

    @property
    def is_used_up(self) -> bool:
        """Return whether a write was rejected that would still be rejected now."""
        return self._refused_bytes > 0 and self.available_bytes() < self._refused_bytes

    def available_bytes(self) -> int:
        """Return how much may be written now; 0 while there is a debt."""
        now_s, written_bytes = self._now_s(), self._written_bytes()
        with self._lock:
            gained = max(0, now_s - self._seen_s) * self.day_bytes / DAY_S
            self._take(written_bytes - self._seen_bytes)
            self._left_bytes = min(self.day_bytes, self._left_bytes + gained)
            self._seen_s, self._seen_bytes = now_s, written_bytes
            return max(0, int(self._left_bytes))

    def allows(self, num_bytes: int) -> bool:
        """Return whether this much may be written now."""
        is_allowed = not self.is_limited or num_bytes <= self.available_bytes()
        self._refused_bytes = 0 if is_allowed else num_bytes
        return is_allowed

    def change(self, day_bytes: int) -> None:
        """Set another daily budget; the difference is added or deducted at once."""
        self.available_bytes()  # settle with the old budget
        with self._lock:
            self._left_bytes += day_bytes - self.day_bytes
            self.day_bytes = day_bytes
            self._take(0)

    def day_ago_s(self) -> int:
        """Return the time since which writes count."""
        return self._now_s() - DAY_S

    def recall(self, num_bytes: int) -> None:
        """Deduct what an earlier process wrote within the last day."""
        with self._lock:
            self._take(num_bytes)

    def _take(self, num_bytes: int) -> None:
        # A debt above a day's budget would outlast its day.
        self._left_bytes = max(self._left_bytes - num_bytes, -self.day_bytes)


Clock = Callable[[], int]
"""Returns seconds since 1970, which stay meaningful across restarts."""

_LATEST_S = (1 << 32) - 1
"""Latest time that an entry can store, in the year 2106."""


def wall_clock_s() -> int:
    """Return the time of day."""
    return int(time.time())


@dataclass(slots=True)
class AgeLimit:
    """Maximum age of served blocks in ``max_age_s``; 0: no limit. May be changed.

    A clock that is set back lets blocks live longer; one that is set forward hides them while it is
    wrong. Neither causes a wrong block to be served.
    """

    max_age_s: int = 0
    now_s: Clock = wall_clock_s

    def stamp_s(self) -> int:
        """Return the time to record, within the range of an entry and after ``TOMBSTONE_S``."""
        return min(max(1, self.now_s()), _LATEST_S)

    def oldest_s(self) -> int:
        """Return the earliest write time of blocks that may be served."""
        max_age_s = self.max_age_s
        return max(0, self.now_s() - max_age_s) if max_age_s else 0
