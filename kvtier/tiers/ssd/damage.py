"""What a record as it lies on the disk is worth, for whoever has not been asked for it.

Readers know whom they want and check for that (fetch.py). Reclaim, scrub and fsck know only where
a record is; they let it say who it is, and check that it is so.
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
    """What was found; ``head`` and ``header`` as far as they can be read."""

    head: RecordHead | None = None
    header: BlockHeader | None = None
    fault: MissReason | None = None
    """Why it would be a miss; None for a sound block, ABSENT for a record that does not count."""
    is_damage: bool = False
    """It is the record that is at fault, and not a key that we do not have."""


def read_record(disk: Disk, fd: int, page: int, into: memoryview) -> None:
    """Fill ``into``, aligned whole pages, from a record's first page on; raises OSError."""
    reader = PageReader(disk, fd, page * PAGE_BYTES, into)
    reader.add(into)
    reader.flush()
    disk.drop_cache(fd)


def check_record(record: memoryview, segment_number: int, seal: Seal) -> RecordCheck:
    """Judge a record by itself. Changes nothing: what is encrypted is opened as a copy."""
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
