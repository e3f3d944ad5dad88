"""Taking blocks out for good: by name, or by whose they are and down to the bytes.

Theory
------
To remove a block is to forget it, and to mark its record so that it stays forgotten. Its bytes go
when the file does, and that may be late.

A purge leaves none that could be read. The index does not know all that must go: a file also has
records that were removed, quarantined or stored anew elsewhere, and what a failed write left in its
free space. So each file is taken by its entries, which name every record. Of a record that is
meant, its header page keeps no more than recovery needs to hop over it, its payload becomes zeros,
and its entry loses the header. Space that belongs to no record becomes zeros, whoever wrote it.

A file is done before the next is begun: payloads, then heads, then entries, each made durable. When
the process dies in between, a block that is meant is there whole or is a miss.

Weakness: zeros are what a reader of the file sees. What a drive still has in cells that it no
longer shows is out of reach; there, encryption helps.
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
    """Forget blocks, also for the time after a restart or a power loss.

    Raises TierTimeout between two files, with the blocks of the others still there. A file that
    cannot be marked is removed whole, and its other blocks are reported as evicted.
    """
    with pool.lock:
        rows = pool.index.find(hashes)
        numbers = np.unique(pool.index.segment[rows[rows >= 0]]).tolist()
    removed = Removed()
    with _settling(pool):
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
                pool.give_up(segment)
    remove_unknown_files(pool)
    return removed


def purge_all(pool: SegmentPool) -> Removed:
    """Remove every file; raises OSError where one stays."""
    with _settling(pool):
        removed = sum(map(pool.retire, list(pool.segments.values())), Removed())
    remove_unknown_files(pool)
    return removed


def purge_selected(pool: SegmentPool, selection: Selection, deadline_ns: int) -> Removed:
    """Remove a selection from each file in turn; raises TierTimeout between two files.

    A file that cannot be read in time or changed, or that another version wrote, may contain blocks
    of the selection, and is removed entirely. Raises OSError if a file cannot be removed.
    """
    removed = Removed()
    with _settling(pool):
        for segment in sorted(pool.segments.values(), key=lambda each: each.number):
            seconds_left(deadline_ns)
            try:
                removed += _purge_segment(pool, segment, selection, deadline_ns)
            except (OSError, TierTimeout):
                removed += _give_up(pool, segment)
    remove_unknown_files(pool)
    return removed


def remove_unknown_files(pool: SegmentPool) -> None:
    """Remove files of segments that the pool has no more, or never had; raises OSError.

    One that is being read while it was given up has its space until its last reader is done, but
    nobody else finds it.
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
        return _give_up(pool, segment)
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
        removed += _give_up(pool, segment)
    return removed


@contextlib.contextmanager
def _settling(pool: SegmentPool) -> Iterator[None]:
    """Make the removal of files durable in the end; raises OSError where one stays."""
    before = set(pool.segments)
    try:
        yield
    finally:
        pool.sweep()
        if before != set(pool.segments):
            pool.disk.sync_directory()


def _is_empty(pool: SegmentPool, segment: Segment) -> bool:
    with pool.lock:
        return not len(pool.index.rows_of(segment.number))


def _give_up(pool: SegmentPool, segment: Segment) -> Removed:
    with pool.lock:
        lost = pool.index.sizes_of(pool.index.rows_of(segment.number))
    pool.give_up(segment)
    return lost
