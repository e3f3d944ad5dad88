"""The segments of a store: which there are, who reads them, and which goes when space is needed.

Rules
-----
* Sizes of files plus ``METADATA_BYTES`` never exceed the capacity: room is made before a file is.
  A file that is being read while its blocks are given up counts until its last reader is done.
* The oldest segment goes first, unless a reader has it pinned or the caller protects it.
* ``lock`` guards everything here. Files are made and removed by the one appending thread; only a
  retired file's last reader may remove it elsewhere.
"""

import errno
import os
import threading
from collections.abc import Collection, Iterator

from kvtier.core.identity import BlockHash
from kvtier.tiers.base import Removed
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.index import Index
from kvtier.tiers.ssd.segment import Segment, create_segment, seal_segment

__all__ = ["METADATA_BYTES", "NO_SPACE", "SegmentPool"]

METADATA_BYTES = 64 << 10
"""Kept back for what is no segment: the lock file, the probe at start, the directory itself."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that giving up a segment may cure."""

_RECLAIMS_MAX = 2
"""Segments given up for a new one: one for its space, one more to give space back to the volume.
A volume below its floor is so relieved write by write, not by one that empties the store."""


class SegmentPool:
    """Segments by number, oldest first, and the index of what is in them."""

    def __init__(
        self, disk: Disk, capacity_bytes: int, segment_bytes: int, free_space_floor_bytes: int
    ) -> None:
        self.disk = disk
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.free_space_floor_bytes = free_space_floor_bytes
        self.lock = threading.Lock()
        self.index = Index()
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.next_number = 1
        self.allocated_bytes = 0
        self._evicted: list[BlockHash] = []
        self._instance = os.urandom(16)

    def take_evicted(self) -> tuple[BlockHash, ...]:
        """Return the blocks given up since the last call, also by calls that failed."""
        with self.lock:
            evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def open_segment(self, payload_bytes: int, protected: Collection[int]) -> Segment | None:
        """Return a segment with room for a record, or None where none can be had.

        Raises OSError for anything but a lack of space.
        """
        if self.active is not None:
            if self.active.fitting([payload_bytes]):
                return self.active
            self.seal()
        while self._make_room(protected):
            try:
                self.active = create_segment(
                    self.disk, self.next_number, self.segment_bytes, self._instance
                )
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                if not self.reclaim(protected):
                    return None
                protected = self.segments.keys()  # try once more, give up nothing else
                continue
            self.next_number += 1
            self.adopt(self.active)
            return self.active
        return None

    def adopt(self, segment: Segment) -> None:
        """Count a segment in."""
        with self.lock:
            self.segments[segment.number] = segment
            self.allocated_bytes += segment.size_bytes

    def seal(self) -> None:
        """End appending to the active segment; it keeps its blocks even where this fails."""
        segment, self.active = self.active, None
        if segment is not None:
            seal_segment(self.disk, segment)

    def reclaim(self, protected: Collection[int]) -> bool:
        """Give up the oldest segment that may go; False where none may."""
        with self.lock:
            victim = next(self._victims(protected), None)
        if victim is None:
            return False
        self.give_up(victim)
        return True

    def give_up(self, segment: Segment) -> None:
        """Retire a segment and report its blocks as evicted."""
        with self.lock:
            self._evicted += self.index.hashes_of(self.index.rows_of(segment.number))
        self.retire(segment)

    def retire(self, segment: Segment) -> Removed:
        """Forget a segment's blocks and remove its file, at the latest with its last reader."""
        with self.lock:
            removed = self._detach(segment)
            is_unread = segment.num_pins == 0
        if is_unread:
            self._remove_file(segment)
        return removed

    def _detach(self, segment: Segment) -> Removed:
        rows = self.index.rows_of(segment.number)
        removed = self.index.sizes_of(rows)
        self.index.drop(rows)
        self.segments.pop(segment.number, None)
        segment.is_retired = True
        if self.active is segment:
            self.active = None
        return removed

    def unpin(self, segment: Segment) -> None:
        """End reading a segment; pinning is ``num_pins += 1`` under the lock."""
        with self.lock:
            segment.num_pins -= 1
            is_last = segment.is_retired and segment.num_pins == 0
        if is_last:
            self._remove_file(segment)

    def _victims(self, protected: Collection[int]) -> Iterator[Segment]:
        for segment in sorted(self.segments.values(), key=lambda each: each.number):
            is_free = segment.num_pins == 0 and segment is not self.active
            if is_free and segment.number not in protected:
                yield segment

    def _make_room(self, protected: Collection[int]) -> bool:
        """Give up segments until one more is within the capacity and above the volume's floor."""
        for _ in range(_RECLAIMS_MAX):
            if self._has_room():
                return True
            if not self.reclaim(protected):
                return False
        return self._has_room()

    def _has_room(self) -> bool:
        within = self.allocated_bytes + self.segment_bytes + METADATA_BYTES <= self.capacity_bytes
        free_bytes = self.disk.free_bytes()
        return within and free_bytes - self.segment_bytes >= self.free_space_floor_bytes

    def _remove_file(self, segment: Segment) -> None:
        self.disk.unlink(segment.path)
        with self.lock:
            self.allocated_bytes -= segment.size_bytes
