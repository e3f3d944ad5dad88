"""Removes blocks by name, or erases those of a key space or tenant down to their bytes.

Theory
------
Removing a block forgets it and marks its record, so that it stays forgotten. Its bytes stay until
the file is removed.

A purge leaves no readable bytes. The index does not list everything that must go: a file also
contains records that were removed, quarantined or stored again elsewhere, and leftovers of failed
writes in its free space. So each file is processed by its entries, which list every record. The
header page of a selected record keeps only what recovery needs to skip it, its payload is zeroed,
and its entry loses the header. Space that belongs to no record is always zeroed.

One file is finished before the next is begun: payloads, then heads, then entries, each made
durable. If the process dies in between, a selected block is either intact or a miss.

A purge does not reach old data in cells that a drive has remapped; encryption protects that data.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import PACKED_HEADER, BlockHash, Selection
from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import TierTimeout
from kvtier.tiers.base import Removed
from kvtier.tiers.check import seconds_left
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState, record_bytes
from kvtier.tiers.ssd.segment import (
    TOMBSTONE_S,
    Entries,
    Segment,
    add_tombstones,
    entries_of,
    footer_bytes,
    mark_records,
    segment_number,
    write_footer,
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
    is_selected = selection.mask(entries["header"]["space"]) & ~_is_erased(entries)
    with pool.lock:
        rows = pool.index.rows_at(entries[is_selected], segment.number)
        removed = pool.index.sizes_of(rows)
        pool.index.drop(rows)
    if _is_empty(pool, segment):
        pool.retire(segment)
        return removed
    try:
        _erase_records(pool.disk, segment, entries, is_selected)
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


def _is_erased(entries: Entries) -> npt.NDArray[np.bool_]:
    """Tell which entries have lost their headers to a purge."""
    erased: npt.NDArray[np.bool_] = (entries["header"]["block_hash"] == 0).all(axis=1)
    return erased


def _erase_records(
    disk: Disk, segment: Segment, entries: Entries, is_selected: npt.NDArray[np.bool_]
) -> None:
    """Erase records except what is needed to skip them, and zero free space.

    ``entries`` are all entries of the segment, to which nothing is appended meanwhile.
    """
    pages = entries["page"][is_selected].tolist()
    add_tombstones(disk, segment, pages)  # first, or a restart could find half-erased records
    disk.zero(segment.path, _ranges_to_zero(segment, entries, is_selected))
    # Only now: an erased head implies an erased payload.
    disk.hook("record.erase")
    disk.rewrite(segment.path, pages, lambda page: _erased(page, segment.number))
    changed = entries.copy()
    headers = changed["header"]
    sizes = headers["payload_bytes"][is_selected]
    headers[is_selected] = np.zeros((), PACKED_HEADER)
    headers["payload_bytes"][is_selected] = sizes
    changed["written_s"][is_selected] = TOMBSTONE_S
    if segment.entries:
        segment.entries[:] = changed.tobytes()
    elif segment.has_footer:
        write_footer(disk, segment, changed.tobytes(), "footer.drop")


def _erased(page: bytes, number: int) -> bytes:
    head = RecordHead.unpack(page[:RECORD_HEAD_BYTES], number)
    return b"" if head is None else head.erased().pack(number)


def _ranges_to_zero(
    segment: Segment, entries: Entries, is_selected: npt.NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """Return [start, end) of selected payloads and of space that belongs to no record."""
    ranges = []
    end = PAGE_BYTES
    columns = (entries["page"], entries["header"]["payload_bytes"], is_selected)
    for page, payload_bytes, meant in zip(*(each.tolist() for each in columns), strict=True):
        start = page * PAGE_BYTES
        ranges.append((end, start))
        end = start + record_bytes(payload_bytes)
        if meant:
            ranges.append((start + PAGE_BYTES, end))
    footer = footer_bytes(len(entries)) if segment.has_footer else 0
    ranges.append((end, segment.size_bytes - footer))
    return [(start, end) for start, end in ranges if start < end]
