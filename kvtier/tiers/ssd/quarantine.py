"""Damaged records on their way to be marked: out of the index at once, on the disk a little later.

A reader that finds a record damaged must not wait for a write. It leaves the record here, and the
next one that changes files marks it, so that it does not come back after a restart. A mark that is
lost, for a crash or for want of room here, costs no more than another miss.
"""

import contextlib
import threading
from collections.abc import Iterable

from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.record import RecordState
from kvtier.tiers.ssd.segment import Segment, mark_records

__all__ = ["Quarantine"]

_WAITING_MAX = 4096
"""Records that wait to be marked: more damaged ones than that at once are a broken drive."""

_MARKED_MAX = 256
"""Records marked at a time, two operations each: 50 ms on a drive that does 10,000 a second."""


class Quarantine:
    """Counts damaged records, and marks them when asked to. May be added to from any thread."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Found damaged since the start."""
        self._lock = threading.Lock()
        self._waiting: dict[Segment, set[int]] = {}
        self._num_waiting = 0

    def add(self, segment: Segment, pages: Iterable[int]) -> None:
        """Count the records of a segment that start at ``pages``, and remember to mark them."""
        with self._lock:
            waiting = self._waiting.setdefault(segment, set())
            for page in pages:
                self.num_blocks += 1
                if self._num_waiting < _WAITING_MAX and page not in waiting:
                    waiting.add(page)
                    self._num_waiting += 1

    def mark(self, disk: Disk) -> bool:
        """Mark some of what waits, in one segment; False where nothing does. For the one writer.

        A page that cannot be written is left as it is.
        """
        with self._lock:
            segment = next(iter(self._waiting), None)
            if segment is None:
                return False
            pages = sorted(self._waiting.pop(segment))
            pages, later = pages[:_MARKED_MAX], pages[_MARKED_MAX:]
            self._num_waiting -= len(pages)
            if later:
                self._waiting[segment] = set(later)
        if not segment.is_retired:
            with contextlib.suppress(OSError):
                mark_records(disk, segment, pages, RecordState.QUARANTINED)
        return True
