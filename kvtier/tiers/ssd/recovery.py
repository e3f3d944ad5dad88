"""From the files of a directory back to segments and an index.

The files say all: segments are read oldest first, each by its footer or else record by record, and
of two records of one block the later one counts. What cannot be read as a segment is removed, since
it takes space and serves nobody. A capacity that has become smaller is applied first, to the oldest
segments, so that it holds before the first block is served.
"""

from pathlib import Path

import numpy as np

from kvtier.tiers.ssd.pool import METADATA_BYTES, SegmentPool
from kvtier.tiers.ssd.segment import (
    Entries,
    Segment,
    load_segment,
    seal_segment,
    segment_number,
)

__all__ = ["recover"]

_ENTRIES_AT_ONCE = 1 << 16
"""Entries put into the index together: array operations cost the same for one as for a thousand."""


def recover(pool: SegmentPool) -> int:
    """Fill an empty pool from its directory; returns how many files had to be removed."""
    paths = _segment_paths(pool.disk.directory)
    if paths:
        pool.next_number = paths[-1][0] + 1
    kept, num_dropped = _apply_capacity(pool, paths)
    batch = _Batch(pool)
    for number, path in kept:
        loaded = _load(pool, path)
        if loaded is None:
            pool.disk.unlink(path)
            num_dropped += 1
            continue
        segment, entries = loaded
        pool.adopt(segment)
        batch.add(number, entries)
    batch.flush()
    live = pool.index.live_segments()
    for segment in list(pool.segments.values()):
        if segment.number in live:
            _resume(pool, segment)
        else:
            pool.retire(segment)
    return num_dropped


def _segment_paths(directory: Path) -> list[tuple[int, Path]]:
    numbered = ((segment_number(path), path) for path in directory.iterdir())
    return sorted((number, path) for number, path in numbered if number is not None)


def _apply_capacity(
    pool: SegmentPool, paths: list[tuple[int, Path]]
) -> tuple[list[tuple[int, Path]], int]:
    """Remove the oldest files until the rest is within the capacity."""
    sizes = [path.lstat().st_size for _, path in paths]
    first = 0
    while sum(sizes[first:]) + METADATA_BYTES > pool.capacity_bytes and first < len(paths):
        pool.disk.unlink(paths[first][1])
        first += 1
    return paths[first:], first


def _load(pool: SegmentPool, path: Path) -> tuple[Segment, Entries] | None:
    try:
        return load_segment(pool.disk, path)
    except OSError:
        return None


class _Batch:
    """Entries of several segments on their way into the index."""

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
    """Go on with the last segment where it has room, and seal the others."""
    if segment.has_footer or segment.tail_bytes >= segment.size_bytes:
        segment.entries = bytearray()
    elif segment.number == max(pool.segments):
        segment.opening += 1
        pool.active = segment
    else:
        seal_segment(pool.disk, segment)
