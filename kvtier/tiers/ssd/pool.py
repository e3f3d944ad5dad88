"""The segments of a store: which there are, who reads them, and how space is made for one more.

Rules
-----
* Sizes of files plus ``metadata_bytes`` never exceed the capacity: room is made before a file is.
  A file that is being read while its blocks are given up counts until its last reader is done, and
  one that cannot be removed until it can.
* Which segment goes is the choice of its ``order``, unless a reader has it pinned or the caller
  protects it. What is worth keeping of it was moved before, by reclaim.py.
* ``lock`` guards everything here. Files are made and removed by the one appending thread; only a
  retired file's last reader may remove it elsewhere.
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
"""The least kept back for what is no segment: the lock file, the probe, the directory itself, and
what the daemon keeps beside them: two documents, those that another version kept, and one that is
just being written, of 64 KiB each."""

_RECLAIMS_MAX = 2
"""Segments given up for one new one: more than one where another size was set before."""


def metadata_bytes(num_segments: int) -> int:
    """Return what is kept back of the capacity: ext4 may spend a page a file on its extents."""
    return max(METADATA_BYTES, num_segments * PAGE_BYTES)


class SegmentPool:
    """Segments by number, oldest first, and the index of what is in them."""

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
        """Others may have the directory: no file of it is removed any more, whoever reads still."""
        self._evicted: list[BlockHash] = []
        self._unremoved: list[Segment] = []
        """Retired, and their files could not be removed."""
        self._num_reclaims = 0
        """Since the counts of reads were halved."""
        self._instance = os.urandom(16)

    def take_evicted(self) -> tuple[BlockHash, ...]:
        """Return the blocks given up since the last call, also by calls that failed.

        One that has been stored anew meanwhile is not among them.
        """
        with self.lock:
            evicted, self._evicted = self._evicted, []
            rows = self.index.find(evicted).tolist()
        return tuple(each for each, row in zip(evicted, rows, strict=True) if row < 0)

    def open_segment(self, payload_bytes: int, protected: Collection[int]) -> Segment | None:
        """Return a segment with room for a record, or None where none can be had.

        The volume is read-only afterwards where it was the one to lack room. Raises OSError for
        anything else.
        """
        if self.active is not None:
            if self.active.fitting([payload_bytes]):
                return self.active
            self._leave_active()
        with contextlib.suppress(OSError):  # counted all the while, and tried again next time
            self.sweep()
        if not self._fit_capacity(protected):
            return None
        made = self._make_segment()
        if isinstance(made, str) and self.relieve(protected):
            made = self._make_segment()
            if isinstance(made, str):
                self.volume.note_in_vain()
        if isinstance(made, str):
            self.volume.stop(made)
            return None
        self.adopt(made)
        self.active = made
        return made

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

    def is_within_capacity(self, num_more: int) -> bool:
        """Tell whether so many segments more would still be within the capacity."""
        used_bytes = self.allocated_bytes + num_more * self.segment_bytes
        return used_bytes + metadata_bytes(len(self.segments) + num_more) <= self.capacity_bytes

    def check_room(self, num_bytes: int) -> None:
        """Raise TierFull unless that many bytes besides the segments fit without an eviction."""
        used_bytes = self.allocated_bytes + metadata_bytes(len(self.segments))
        free_bytes = self.capacity_bytes - used_bytes
        if free_bytes < num_bytes:
            free = f"{free_bytes >> 10} KiB of ssd.capacity"
            raise TierFull(f"{free} are free, but {num_bytes >> 10} KiB are needed")
        if shortage := self.volume.shortage(num_bytes):
            raise TierFull(shortage)

    def replaces(self) -> bool:
        """Tell whether the next segment takes the place of another."""
        is_full = not self.is_within_capacity(1)
        return is_full or self.volume.shortage(self.segment_bytes) is not None

    def victim(self, protected: Collection[int], choose: Choice) -> Segment | None:
        """Return the segment to go next by a choice of the order; None where none may."""
        with self.lock:
            candidates = sorted(
                number
                for number, segment in self.segments.items()
                if segment.num_pins == 0 and segment is not self.active and number not in protected
            )
            unknown = [number for number in candidates if self.segments[number].is_unknown]
        number = choose(self.index, candidates, unknown)
        return None if number is None else self.segments[number]

    def relieve(self, protected: Collection[int]) -> bool:
        """Give up a segment for what others took: never the last, nor soon after one in vain."""
        return len(self.segments) > 1 and self.volume.may_relieve() and self.reclaim(protected)

    def reclaim(self, protected: Collection[int]) -> bool:
        """Give up the segment that is to go next; False where none may."""
        victim = self.victim(protected, self.order.to_evict)
        if victim is None:
            return False
        self.give_up(victim)
        return True

    def give_up(self, segment: Segment) -> None:
        """Retire a segment and report its blocks as evicted."""
        with self.lock:
            self._evicted += self.index.hashes_of(self.index.rows_of(segment.number))
            self._num_reclaims += 1
            if self._num_reclaims >= len(self.segments):  # the store has been turned over
                self._num_reclaims = 0
                self.index.forget_reads()
        self.retire(segment)

    def retire(self, segment: Segment) -> Removed:
        """Forget a segment's blocks and remove its file, at the latest with its last reader."""
        with self.lock:
            removed = self._detach(segment)
            is_unread = segment.num_pins == 0
        if is_unread:
            self._remove_file(segment)
        return removed

    def sweep(self) -> None:
        """Remove the files of retired segments that could not be removed; raises OSError."""
        with self.lock:
            unremoved, self._unremoved = self._unremoved, []
        for segment in unremoved:
            self._remove_file(segment)
        if self._unremoved:
            raise OSError(f"{self._unremoved[0].path.name} cannot be removed")

    def unpin(self, segment: Segment) -> None:
        """End reading a segment; pinning is ``num_pins += 1`` under the lock."""
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

    def _leave_active(self) -> None:
        """Seal the active segment; one that stays without a footer is walked by the next start."""
        try:
            self.seal()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise

    def _make_segment(self) -> Segment | str:
        """Return a new segment, or what the volume lacks, in words."""
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
        """Give up segments until one more is within the capacity."""
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
