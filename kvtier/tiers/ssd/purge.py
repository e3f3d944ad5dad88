"""Removes blocks by name, or erases those of a key space or tenant down to their bytes.

Theory
------
Removing a block forgets it and marks its record, so that it stays forgotten. Its bytes go with the
file, which may be late.

A purge leaves no readable bytes. The index does not list everything that must go: a file also
contains records that were removed, quarantined or stored again elsewhere, and leftovers of failed
writes in its free space. So each file is processed by its entries, which list every record. The
header page of a selected record keeps only what recovery needs to skip it, its payload is zeroed,
and its entry loses the header. Space that belongs to no record is always zeroed.

One file is finished before the next is begun: payloads, then heads, then entries, each made
durable. If the process dies in between, a selected block is either intact or a miss.

A purge does not reach old data in cells that a drive has remapped; encryption protects that.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.core.identity import BlockHash, Selection
from kvtier.errors import TierTimeout
from kvtier.tiers.base import Removed
from kvtier.tiers.check import seconds_left
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import RecordState
from kvtier.tiers.ssd.segment import (
    Segment,
    entries_of,
    erase_records,
    is_erased,
    mark_records,
    segment_number,
)

__all__ = ["purge_all", "purge_selected", "remove_blocks", "remove_unknown_files"]


def remove_blocks(pool: SegmentPool, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
    """Forget blocks, durably against a restart or power loss.

    Raises TierTimeout between two files, with the remaining blocks still there. A file that cannot
    be marked is removed entirely, and its other blocks are reported as evicted.
    """
    with pool.lock:
        rows = pool.index.find(hashes)
        numbers = np.unique(pool.index.segment[rows[rows >= 0]]).tolist()
    removed = Removed()
    with _syncing_removals(pool):
        for segment in [pool.segments[number] for number in numbers]:
            seconds_left(deadline_ns)
            with pool.lock:
                rows = np.unique(pool.index.find(hashes))
                rows = rows[(rows >= 0) & (pool.index.segment[rows] == segment.number)]
                pages = pool.index.page[rows].tolist()
                removed += pool.index.sizes_of(rows)
                pool.index.drop(rows)
            if _is_empty(pool, segment):
                pool.retire(segment)
                continue
            try:
                mark_records(pool.disk, segment, pages, RecordState.REMOVED)
            except OSError:
                pool.evict(segment)
    remove_unknown_files(pool)
    return removed


def purge_all(pool: SegmentPool) -> Removed:
    """Remove every file. Raises OSError if one cannot be removed."""
    with _syncing_removals(pool):
        removed = sum(map(pool.retire, list(pool.segments.values())), Removed())
    remove_unknown_files(pool)
    return removed


def purge_selected(pool: SegmentPool, selection: Selection, deadline_ns: int) -> Removed:
    """Remove a selection from each file in turn. Raises TierTimeout between two files.

    A file that cannot be read in time or changed, or that another version wrote, may contain blocks
    of the selection and is removed entirely. Raises OSError if a file cannot be removed.
    """
    removed = Removed()
    with _syncing_removals(pool):
        for segment in sorted(pool.segments.values(), key=lambda each: each.number):
            seconds_left(deadline_ns)
            try:
                removed += _purge_segment(pool, segment, selection, deadline_ns)
            except (OSError, TierTimeout):
                removed += _evict(pool, segment)
    remove_unknown_files(pool)
    return removed


def remove_unknown_files(pool: SegmentPool) -> None:
    """Remove segment files that are not part of the pool. Raises OSError.

    A file that is still being read keeps its space until its last reader is done, but has no name.
    """
    strangers = [
        path
        for path in pool.disk.directory.iterdir()
        if segment_number(path) not in {None, *pool.segments} and not path.is_dir()
    ]
    for path in strangers:
        pool.disk.unlink(path)
    if strangers:
        pool.disk.sync_directory()


def _purge_segment(
    pool: SegmentPool, segment: Segment, selection: Selection, deadline_ns: int
) -> Removed:
    if segment.is_set_aside:
        return _evict(pool, segment)
    entries = entries_of(pool.disk, segment, deadline_ns=deadline_ns)
    is_meant = selection.mask(entries["header"]["space"]) & ~is_erased(entries)
    with pool.lock:
        rows = pool.index.rows_at(entries[is_meant], segment.number)
        removed = pool.index.sizes_of(rows)
        pool.index.drop(rows)
    if _is_empty(pool, segment):
        pool.retire(segment)
        return removed
    try:
        erase_records(pool.disk, segment, entries, is_meant)
    except OSError:
        removed += _evict(pool, segment)
    return removed


@contextlib.contextmanager
def _syncing_removals(pool: SegmentPool) -> Iterator[None]:
    """Make the removal of files durable at the end. Raises OSError if one cannot be removed."""
    before = set(pool.segments)
    try:
        yield
    finally:
        pool.remove_retired_files()
        if before != set(pool.segments):
            pool.disk.sync_directory()


def _is_empty(pool: SegmentPool, segment: Segment) -> bool:
    with pool.lock:
        return not len(pool.index.rows_of(segment.number))


def _evict(pool: SegmentPool, segment: Segment) -> Removed:
    with pool.lock:
        lost = pool.index.sizes_of(pool.index.rows_of(segment.number))
    pool.evict(segment)
    return lost
