"""Checks every record of a segment file. Changes nothing."""

import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np

from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import MissReason
from kvtier.tiers.seal import Seal
from kvtier.tiers.ssd.damage import RecordCheck, check_record, read_record
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState, record_bytes
from kvtier.tiers.ssd.segment import (
    TOMBSTONE_S,
    Entries,
    Segment,
    declared_size,
    load_segment,
    walk_records,
    written_since,
)

__all__ = ["Footer", "SegmentCheck", "check_segment"]


class Footer(Enum):
    """State of a segment's footer."""

    SOUND = "sound"
    OPEN = "open"
    """No footer yet: this is the last segment, which the next start continues."""
    MISSING = "missing"
    WRONG = "wrong"
    """Damaged, or inconsistent with the records."""


@dataclass(slots=True)
class SegmentCheck:
    """Result of checking a segment."""

    segment: Segment
    entries: Entries
    """Entries of all records, in file order. Damaged ones have tombstones."""
    footer: Footer
    is_cut_short: bool = False
    """The file has no footer and not its declared size."""
    unreachable_bytes: int = 0
    num_removed: int = 0
    num_quarantined: int = 0
    num_unchecked: int = 0
    """Records sealed with a key that was not given."""
    num_unreadable: int = 0
    damaged_pages: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons for the damage, one per page of ``damaged_pages``."""


def check_segment(disk: Disk, path: Path, seal: Seal, *, is_last: bool) -> SegmentCheck | None:
    """Check all records of a file; None if it is not a segment. Raises OSError."""
    loaded = load_segment(disk, path)
    if loaded is None:
        return None
    segment, entries = loaded
    _, walked = walk_records(disk, segment)
    found = SegmentCheck(
        segment,
        _united(entries, walked).copy(),
        _footer(disk, segment, is_last=is_last),
    )
    if _is_cut_short(disk, segment):
        found.is_cut_short, found.footer = True, Footer.OPEN
    if not segment.has_footer:
        found.unreachable_bytes = _gaps(walked)
    elif len(found.entries) > len(entries):
        found.footer = Footer.WRONG  # it omits existing records
    for place, entry in enumerate(found.entries):
        page, payload_bytes = int(entry["page"]), int(entry["header"]["payload_bytes"])
        if entry["written_s"] == TOMBSTONE_S:
            _count_struck(found, _state(disk, segment, page))
            continue
        verdict = _examined(disk, segment, page, payload_bytes, seal)
        if verdict is None:
            found.num_unreadable += 1
        elif verdict.fault is MissReason.ABSENT:
            assert verdict.head is not None
            _count_struck(found, verdict.head.state)
            found.entries["written_s"][place] = TOMBSTONE_S
            found.footer = Footer.WRONG  # it lists a record that is not live
        elif verdict.is_damage:
            found.damaged_pages.append(page)
            found.reasons[str(verdict.fault)] += 1
            found.entries["written_s"][place] = TOMBSTONE_S
        elif verdict.fault is not None:
            found.num_unchecked += 1
    return found


def _united(entries: Entries, walked: Entries) -> Entries:
    """Return the entries plus those of live records that they omit, in file order."""
    live = written_since(walked, 0)
    more = live[~np.isin(live["page"], entries["page"])]
    if not len(more):
        return entries
    united = np.concatenate([entries, more])
    return united[np.argsort(united["page"])]


def _gaps(walked: Entries) -> int:
    """Return the bytes between records that belong to no record."""
    if not len(walked):
        return 0
    pages, sizes = walked["page"].astype(np.int64), walked["header"]["payload_bytes"]
    used_bytes = sum(record_bytes(int(size)) for size in sizes)
    end = int(pages[-1]) * PAGE_BYTES + record_bytes(int(sizes[-1]))
    return end - PAGE_BYTES - used_bytes


def _footer(disk: Disk, segment: Segment, *, is_last: bool) -> Footer:
    if segment.has_footer:
        return Footer.SOUND
    with disk.opened_buffered(segment.path) as fd:
        trailer = os.pread(fd, PAGE_BYTES, max(0, segment.size_bytes - PAGE_BYTES))
    if any(trailer):
        return Footer.WRONG
    return Footer.OPEN if is_last else Footer.MISSING


def _is_cut_short(disk: Disk, segment: Segment) -> bool:
    if segment.has_footer:
        return False
    with disk.opened_buffered(segment.path) as fd:
        return segment.size_bytes != declared_size(fd, segment.number)


def _count_struck(found: SegmentCheck, state: RecordState | None) -> None:
    if state is RecordState.QUARANTINED or state is None:
        found.num_quarantined += 1  # an unreadable head was quarantined
    else:
        found.num_removed += 1


def _state(disk: Disk, segment: Segment, page: int) -> RecordState | None:
    with disk.opened_buffered(segment.path) as fd:
        packed = os.pread(fd, RECORD_HEAD_BYTES, page * PAGE_BYTES)
    head = RecordHead.unpack(packed, segment.number)
    return head.state if head else None


def _examined(
    disk: Disk, segment: Segment, page: int, payload_bytes: int, seal: Seal
) -> RecordCheck | None:
    """Verify a record, twice if it seems damaged; None if the device fails."""
    memory = memoryview(mmap.mmap(-1, record_bytes(payload_bytes)))
    verdict = RecordCheck()
    for _ in range(2):
        try:
            with disk.opened(segment.path) as fd:
                read_record(disk, fd, page, memory)
        except OSError:
            return None
        verdict = check_record(memory, segment.number, seal)
        if not verdict.is_damage:
            break
    return verdict
