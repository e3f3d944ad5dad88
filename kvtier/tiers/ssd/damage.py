"""Verifies records found by location, and quarantines damaged ones.

Readers know which block they want and check for it (fetch.py). Reclaim, scrub and fsck know only
where a record is: they take its identity from its header and verify that.

A reader that finds a damaged record must not wait for a write. It adds the record to the
quarantine, and the next writer marks it on disk, so that it does not return after a restart. If the
mark is lost in a crash or for lack of room, the block is a miss once more.
"""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.core.identity import BlockHeader, HeaderError
from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import MissReason
from kvtier.tiers.seal import Codec, Seal
from kvtier.tiers.ssd.disk import Disk, PageReader
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState
from kvtier.tiers.ssd.segment import Segment, mark_records

__all__ = ["Quarantine", "RecordCheck", "check_record", "read_record"]


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """Result of checking a record; ``head`` and ``header`` as far as they are readable."""

    head: RecordHead | None = None
    header: BlockHeader | None = None
    fault: MissReason | None = None
    """Why a read would miss: None for a sound block, ABSENT for a record that no longer counts."""
    is_damage: bool = False
    """The record itself is damaged; it is not a matter of a missing key."""


def read_record(disk: Disk, fd: int, page: int, into: memoryview) -> None:
    """Read a record into ``into``, aligned whole pages, from its first page on. Raises OSError."""
    reader = PageReader(disk, fd, page * PAGE_BYTES, into)
    reader.add(into)
    reader.flush()
    disk.drop_cache(fd)


def check_record(record: memoryview, segment_number: int, seal: Seal) -> RecordCheck:
    """Verify a record. Changes nothing: encrypted payloads are opened in a copy."""
    head = RecordHead.unpack(bytes(record[:RECORD_HEAD_BYTES]), segment_number)
    if head is None:
        return RecordCheck(fault=MissReason.HEADER, is_damage=True)
    if head.state is not RecordState.LIVE:
        return RecordCheck(head, fault=MissReason.ABSENT)
    try:
        header = BlockHeader.unpack(head.header)
    except HeaderError:
        return RecordCheck(head, fault=MissReason.HEADER, is_damage=True)
    payload = record[PAGE_BYTES : PAGE_BYTES + header.payload_bytes]
    if len(payload) < header.payload_bytes:
        return RecordCheck(head, header, MissReason.LENGTH, is_damage=True)
    if head.stamp.codec is Codec.ENCRYPTED:
        payload = memoryview(bytearray(payload))
    opened = seal.open(header, head.stamp, payload)
    if isinstance(opened, BlockHeader):
        return RecordCheck(head, header)
    is_damage = opened is not MissReason.SEAL or seal.may_open(head.stamp)
    return RecordCheck(head, header, opened, is_damage=is_damage)


_WAITING_MAX = 4096
"""Records waiting to be marked. More damaged ones at once mean a broken drive."""

_MARKED_MAX = 256
"""Records marked at a time, two operations each: 50 ms on a drive with 10,000 operations per
second.
"""


class Quarantine:
    """Counts damaged records and marks them on request. ``add`` may be called from any thread."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Damaged blocks found since startup."""
        self._lock = threading.Lock()
        self._waiting: dict[Segment, set[int]] = {}
        self._num_waiting = 0

    def add(self, segment: Segment, pages: Iterable[int]) -> None:
        """Count the records of a segment that start at ``pages`` and queue them for marking."""
        with self._lock:
            waiting = self._waiting.setdefault(segment, set())
            for page in pages:
                self.num_blocks += 1
                if self._num_waiting < _WAITING_MAX and page not in waiting:
                    waiting.add(page)
                    self._num_waiting += 1

    def mark(self, disk: Disk) -> bool:
        """Mark some of the waiting records of one segment; False if none wait. For the writer only.

        A page that cannot be written stays as it is.
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
