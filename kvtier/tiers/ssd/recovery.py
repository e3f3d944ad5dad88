"""Rebuilds segments and index from the files of a directory.

The files are the only source. Segments are read oldest first, each by its footer or else record by
record; of two records of a block the later one counts. Files that are not readable as segments are
removed, since they only take space. Files of another version are set aside until their space is
needed, so that they are available after a rollback. If the capacity was reduced, files set aside
are removed first, then the oldest segments, before the first block is served.
"""

import contextlib
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvtier.permissions import is_foreign
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.segment import (
    TOMBSTONE_S,
    Entries,
    Segment,
    is_of_other_version,
    load_segment,
    seal_segment,
    segment_number,
)

__all__ = ["RecoveryFindings", "recover"]

_ENTRIES_AT_ONCE = 1 << 14
"""Entries added to the index together: array operations cost the same for one as for a thousand.
Four times as many leave 35 MB of holes in the heap.
"""


_NUMBER_MAX = 1 << 31
"""Highest accepted segment number: half of what the index can store, so that numbers are left for
new segments. Files with a higher number are not segments of a store.
"""

_EPOCH_MAX = 1 << 31
"""Highest epoch of a segment that is appended to: half of what a record can store."""


@dataclass(frozen=True, slots=True)
class RecoveryFindings:
    """Problems found in the files."""

    num_dropped: int
    """Files that were beyond the capacity or not segments."""
    num_unreadable: int
    num_set_aside: int = 0
    """Files of another version."""
    num_footers_refused: int = 0
    """Intact footers that list records which do not fit into their segment."""


def recover(pool: SegmentPool, oldest_s: int = 0) -> RecoveryFindings:
    """Fill an empty pool from its directory with blocks not written before ``oldest_s``.

    A record that no longer counts hides earlier ones of its block, which a crash or a temporarily
    unreadable sector may have left behind.
    """
    num_dropped = 0
    unreadable: set[int] = set()
    batch = _Batch(pool)
    for number, path in _segment_paths(pool.disk.directory):
        if not _is_ours(path):
            with contextlib.suppress(OSError):
                pool.disk.unlink(path)
            num_dropped += 1
            continue
        try:
            loaded = load_segment(pool.disk, path)
            # With an age limit, files with blocks of unknown age must not stay.
            is_kept = loaded is None and not oldest_s and is_of_other_version(pool.disk, path)
        except OSError:
            # It may become readable again. It takes space until it is reclaimed in turn.
            size_bytes = path.lstat().st_size
            pool.adopt(Segment(path, number, size_bytes, size_bytes, is_unreadable=True))
            unreadable.add(number)
            pool.next_number = number + 1
            continue
        if is_kept:
            size_bytes = path.lstat().st_size
            pool.adopt(Segment(path, number, size_bytes, size_bytes, is_set_aside=True))
            pool.next_number = number + 1
            continue
        if loaded is None:
            with contextlib.suppress(OSError):  # on a read-only volume a later start does it
                pool.disk.unlink(path)
            num_dropped += 1
            continue
        segment, entries = loaded
        pool.adopt(segment)
        pool.next_number = number + 1
        batch.add(number, entries)
    batch.flush()
    num_footers_refused = sum(segment.is_footer_refused for segment in pool.segments.values())
    pool.budget.recall(pool.index.written_bytes(pool.budget.day_ago_s()))
    pool.index.drop(pool.index.expired_rows(max(oldest_s, TOMBSTONE_S + 1)))
    num_dropped += _retire_surplus(pool, pool.index.live_segments() | unreadable)
    for segment in pool.segments.values():
        _resume(pool, segment)
    num_set_aside = sum(segment.is_set_aside for segment in pool.segments.values())
    return RecoveryFindings(num_dropped, len(unreadable), num_set_aside, num_footers_refused)


def _segment_paths(directory: Path) -> list[tuple[int, Path]]:
    files = (path for path in directory.iterdir() if path.is_symlink() or path.is_file())
    numbered = ((segment_number(path), path) for path in files)
    return sorted(
        (number, path)
        for number, path in numbered
        if number is not None and 0 < number <= _NUMBER_MAX
    )


def _is_ours(path: Path) -> bool:
    """Return whether a file is this user's or root's; if so, make it inaccessible to others."""
    found = path.lstat()
    if is_foreign(found):
        return False
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
        with contextlib.suppress(OSError):
            path.chmod(0o600)
    return True


def _retire_surplus(pool: SegmentPool, needed: set[int]) -> int:
    """Remove empty segments, and then others until the rest fits into the capacity.

    Files larger than the whole capacity go first, then files set aside, then the oldest segments.
    """
    for segment in list(pool.segments.values()):
        if segment.number not in needed and not segment.is_set_aside:
            pool.retire(segment)
    num_retired = 0
    while pool.segments and not pool.is_within_capacity(0):
        pool.retire(min(pool.segments.values(), key=partial(_retirement_order, pool)))
        num_retired += 1
    return num_retired


def _retirement_order(pool: SegmentPool, segment: Segment) -> tuple[bool, bool, int]:
    is_possible = segment.size_bytes <= pool.capacity_bytes
    return is_possible, not segment.is_set_aside, segment.number


class _Batch:
    """Collects entries of several segments and adds them to the index together."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._entries: list[Entries] = []
        self._numbers: list[int] = []
        self._count = 0

    def add(self, number: int, entries: Entries) -> None:
        self._entries.append(entries)
        self._numbers.append(number)
        self._count += len(entries)
        if self._count >= _ENTRIES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._count:
            lengths = [len(entries) for entries in self._entries]
            segments = np.repeat(np.array(self._numbers, np.uint32), lengths)
            self._pool.index.put(np.concatenate(self._entries), segments)
        self._entries, self._numbers, self._count = [], [], 0


def _resume(pool: SegmentPool, segment: Segment) -> None:
    """Continue appending to the last segment if it has room, and seal the others."""
    if segment.has_footer or segment.tail_bytes >= segment.size_bytes:
        segment.entries = bytearray()
    elif segment.number == max(pool.segments) and segment.epoch < _EPOCH_MAX:
        segment.epoch += 1
        pool.active = segment
    else:
        with contextlib.suppress(OSError):  # without a footer it is walked again next time
            seal_segment(pool.disk, segment)
