"""Manages the segments of a store, their readers, and the space for new ones.

Rules
-----
* File sizes plus ``metadata_bytes`` never exceed the capacity: space is made before a file is
  created. A removed segment that is still being read counts until its last reader is done, and a
  file that cannot be removed counts until it can.
* ``order`` chooses the segment to remove, unless a reader has pinned it or the caller protects it.
  Blocks worth keeping were moved before, by reclaim.py.
* ``lock`` guards all state. Only the appending thread creates and removes files, except that the
  last reader of a retired segment may remove its file.
"""

import contextlib
import os
import threading
from collections.abc import Collection

from kvtier.core.identity import BlockHash
from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import TierFull
from kvtier.tiers.base import Removed
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.index import SegmentIndex
from kvtier.tiers.ssd.segment import Segment, create_segment, seal_segment
from kvtier.tiers.ssd.store_limits import NO_SPACE, Volume, WriteBudget
from kvtier.tiers.ssd.victim import Choice, ReclaimOrder

__all__ = ["METADATA_BYTES", "SegmentPool", "metadata_bytes"]

METADATA_BYTES = 320 << 10
"""Least space reserved for other files: the lock file, the health check's page, the directory
itself, and the daemon's documents of 64 KiB each: two, those kept by another version, and one being
written.
"""

_RECLAIMS_MAX = 2
"""Segments removed for one new one; more than one only after the segment size was changed."""


def metadata_bytes(num_segments: int) -> int:
    """Return the reserved part of the capacity: ext4 may use a page per file for extents."""
    return max(METADATA_BYTES, num_segments * PAGE_BYTES)


class SegmentPool:
    """Segments by number, oldest first, and the index of their blocks."""

    def __init__(
        self,
        disk: Disk,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        volume: Volume,
        budget: WriteBudget,
        order: ReclaimOrder,
    ) -> None:
        self.disk = disk
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.volume = volume
        self.budget = budget
        self.order = order
        self.lock = threading.Lock()
        self.index = SegmentIndex()
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.next_number = 1
        self.allocated_bytes = 0
        self.is_closed = False
        """Others may use the directory: no file is removed any more, even after its last read."""
        self._evicted: list[BlockHash] = []
        self._unremoved: list[Segment] = []
        """Retired segments whose files could not be removed."""
        self._num_reclaims = 0
        """Segments removed since read counts were last halved."""
        self._instance = os.urandom(16)

    def take_evicted(self) -> tuple[BlockHash, ...]:
        """Return the blocks evicted since the last call, including those of failed calls.

        A block that has been stored again meanwhile is not included.
        """
        with self.lock:
            evicted, self._evicted = self._evicted, []
            rows = self.index.find(evicted).tolist()
        return tuple(each for each, row in zip(evicted, rows, strict=True) if row < 0)

    def open_segment(self, payload_bytes: int, protected: Collection[int]) -> Segment | None:
        """Return a segment with room for a record, or None if none can be had.

        If the volume lacks space, it becomes read-only. Raises OSError for other faults.
        """
        if self.active is not None:
            if self.active.fitting([payload_bytes]):
                return self.active
            self._seal_active()
        with contextlib.suppress(OSError):  # still counted; tried again next time
            self.remove_retired_files()
        if not self._fit_capacity(protected):
            return None
        made = self._make_segment()
        if isinstance(made, str) and self.reclaim_for_others(protected):
            made = self._make_segment()
            if isinstance(made, str):
                self.volume.note_failed_reclaim()
        if isinstance(made, str):
            self.volume.set_read_only(made)
            return None
        self.adopt(made)
        self.active = made
        return made

    def adopt(self, segment: Segment) -> None:
        """Add a segment."""
        with self.lock:
            self.segments[segment.number] = segment
            self.allocated_bytes += segment.size_bytes

    def seal(self) -> None:
        """Stop appending to the active segment; it keeps its blocks even if this fails."""
        segment, self.active = self.active, None
        if segment is not None:
            seal_segment(self.disk, segment)

    def is_within_capacity(self, num_more: int) -> bool:
        """Return whether this many more segments would fit into the capacity."""
        used_bytes = self.allocated_bytes + num_more * self.segment_bytes
        return used_bytes + metadata_bytes(len(self.segments) + num_more) <= self.capacity_bytes

    def check_room(self, num_bytes: int) -> None:
        """Raise TierFull unless this many more bytes fit without an eviction."""
        used_bytes = self.allocated_bytes + metadata_bytes(len(self.segments))
        free_bytes = self.capacity_bytes - used_bytes
        if free_bytes < num_bytes:
            free = f"{free_bytes >> 10} KiB of ssd.capacity"
            raise TierFull(f"{free} free, {num_bytes >> 10} KiB needed")
        if shortage := self.volume.shortage(num_bytes):
            raise TierFull(shortage)

    def replaces(self) -> bool:
        """Return whether the next segment takes the place of another."""
        is_full = not self.is_within_capacity(1)
        return is_full or self.volume.shortage(self.segment_bytes) is not None

    def victim(self, protected: Collection[int], choose: Choice) -> Segment | None:
        """Return the segment that ``choose`` selects for removal; None if none may go."""
        with self.lock:
            candidates = sorted(
                number
                for number, segment in self.segments.items()
                if segment.num_pins == 0 and segment is not self.active and number not in protected
            )
            unreadable = [number for number in candidates if self.segments[number].is_unreadable]
        number = choose(self.index, candidates, unreadable)
        return None if number is None else self.segments[number]

    def reclaim_for_others(self, protected: Collection[int]) -> bool:
        """Remove a segment to make up for space that others took.

        Never removes the last one, nor one soon after a removal that did not help.
        """
        return (
            len(self.segments) > 1
            and self.volume.may_reclaim_for_others()
            and self.reclaim(protected)
        )

    def reclaim(self, protected: Collection[int]) -> bool:
        """Remove the next segment in order; False if none may go."""
        victim = self.victim(protected, self.order.to_evict)
        if victim is None:
            return False
        self.evict(victim)
        return True

    def evict(self, segment: Segment) -> None:
        """Retire a segment and report its blocks as evicted."""
        with self.lock:
            self._evicted += self.index.hashes_of(self.index.rows_of(segment.number))
            self._num_reclaims += 1
            if self._num_reclaims >= len(self.segments):  # the whole store was replaced
                self._num_reclaims = 0
                self.index.halve_reads()
        self.retire(segment)

    def retire(self, segment: Segment) -> Removed:
        """Forget a segment's blocks; its file is removed after its last reader at the latest."""
        with self.lock:
            removed = self._detach(segment)
            is_unread = segment.num_pins == 0
        if is_unread:
            self._remove_file(segment)
        return removed

    def remove_retired_files(self) -> None:
        """Remove the files of retired segments that could not be removed. Raises OSError."""
        with self.lock:
            unremoved, self._unremoved = self._unremoved, []
        for segment in unremoved:
            self._remove_file(segment)
        if self._unremoved:
            raise OSError(f"{self._unremoved[0].path.name} cannot be removed")

    def unpin(self, segment: Segment) -> None:
        """End reading a segment. It was pinned by ``num_pins += 1`` under the lock."""
        with self.lock:
            segment.num_pins -= 1
            is_last = segment.is_retired and segment.num_pins == 0
        if is_last:
            self._remove_file(segment)

    def _detach(self, segment: Segment) -> Removed:
        rows = self.index.rows_of(segment.number)
        removed = self.index.sizes_of(rows)
        self.index.drop(rows)
        self.segments.pop(segment.number, None)
        segment.is_retired = True
        if self.active is segment:
            self.active = None
        return removed

    def _seal_active(self) -> None:
        """Seal the active segment. Without a footer, the next start walks its records."""
        try:
            self.seal()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise

    def _make_segment(self) -> Segment | str:
        """Return a new segment, or in words what the volume lacks."""
        shortage = self.volume.shortage(self.segment_bytes)
        if shortage is not None:
            return shortage
        number, self.next_number = self.next_number, self.next_number + 1
        try:
            return create_segment(self.disk, number, self.segment_bytes, self._instance)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return f"the volume has no room for a segment: {error.strerror}"

    def _fit_capacity(self, protected: Collection[int]) -> bool:
        """Remove segments until one more fits into the capacity."""
        for _ in range(_RECLAIMS_MAX):
            if self.is_within_capacity(1):
                return True
            if not self.reclaim(protected):
                return False
        return self.is_within_capacity(1)

    def _remove_file(self, segment: Segment) -> None:
        if self.is_closed:
            return
        try:
            self.disk.unlink(segment.path)
        except OSError:
            with self.lock:
                self._unremoved.append(segment)
            return
        with self.lock:
            self.allocated_bytes -= segment.size_bytes
