"""Maps block hashes to records, in numpy columns beside a hash table: 49 bytes per block.

The index holds only what a lookup needs. The rest of a block's header is read from the disk with
its payload and is authoritative: if a row is wrong, the block is a miss.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import BlockHash
from kvtier.core.limits import INDEX_ROWS_MAX, PAGE_BYTES
from kvtier.core.table import HashTable, Keys, Rows, as_keys
from kvtier.tiers.base import Removed
from kvtier.tiers.ssd.segment import Entries

__all__ = ["NOWHERE", "READS_MAX", "SegmentIndex", "Weights", "space_mark"]

NOWHERE = 0
"""Segment number of an unused row; segments count from 1."""

READS_MAX = 3
"""Reads of a block are counted up to this: two bits, as in S3-FIFO (SOSP'23)."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)

_Column = npt.NDArray[np.uint32]

Weights = npt.NDArray[np.int64]
"""Blocks or bytes per segment."""


def space_mark(spaces: npt.NDArray[np.uint64]) -> _Column:
    """Return 32 bits of each (key space, tenant) digest, to detect a mismatch without a read."""
    mixed = (spaces[:, 0] ^ (spaces[:, 2] * _ODD)) & _LOW
    return mixed.astype(np.uint32)


class SegmentIndex:
    """Rows (segment, page, payload bytes, space mark, time) by block hash. Not thread-safe."""

    def __init__(self) -> None:
        self._table = HashTable(INDEX_ROWS_MAX)
        capacity = self._table.capacity
        self.segment: _Column = np.zeros(capacity, np.uint32)
        self.page: _Column = np.zeros(capacity, np.uint32)
        self.payload_bytes: _Column = np.zeros(capacity, np.uint32)
        self.space: _Column = np.zeros(capacity, np.uint32)
        self.written_s: _Column = np.zeros(capacity, np.uint32)
        self.reads: npt.NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        """Reads since the block was written or last moved, up to ``READS_MAX``."""
        self._num_blocks: Counter[int] = Counter()
        """Blocks per segment. Not an array, as file names can give a segment any number."""
        self.payload_total_bytes = 0
        """Payload bytes of all blocks, kept current because monitoring reads it every second."""

    def __len__(self) -> int:
        return len(self._table)

    def find(self, hashes: Sequence[BlockHash]) -> Rows:
        """Return the row of each block, -1 if it is absent."""
        return self._table.find(as_keys(b"".join(hashes)))

    def find_keys(self, keys: Keys) -> Rows:
        """Return the row of each block, -1 if it is absent; ``keys`` is a column of hashes."""
        return self._table.find(np.ascontiguousarray(keys))

    def find_entries(self, entries: Entries) -> Rows:
        """Return the row of each entry's block, -1 if it is absent."""
        return self.find_keys(entries["header"]["block_hash"])

    def rows_at(self, entries: Entries, segment: int) -> Rows:
        """Return the rows of those entries' blocks that point at exactly these records."""
        return self.find_entries(entries[self.is_at(entries, segment)])

    def is_at(self, entries: Entries, segment: int) -> npt.NDArray[np.bool_]:
        """Return for each entry whether its block points at exactly this record."""
        rows = self.find_entries(entries)
        is_here = (self.segment[rows] == segment) & (self.page[rows] == entries["page"])
        is_at: npt.NDArray[np.bool_] = (rows >= 0) & is_here
        return is_at

    def put(self, entries: Entries, segments: _Column | int) -> None:
        """Point each entry's block at its record; the last one of a block wins."""
        headers = entries["header"]
        rows = self._table.insert(np.ascontiguousarray(headers["block_hash"]))
        if len(self.segment) < self._table.capacity:
            self._grow()
        touched = np.unique(rows)
        before = self.sizes_of(touched[self.segment[touched] != NOWHERE])
        self._count(touched, -1)
        self.segment[rows] = segments
        self._count(touched, 1)
        self.page[rows] = entries["page"]
        self.payload_bytes[rows] = headers["payload_bytes"]
        self.space[rows] = space_mark(headers["space"])
        self.written_s[rows] = entries["written_s"]
        self.reads[rows] = 0
        self.payload_total_bytes += self.sizes_of(touched).num_bytes - before.num_bytes

    def drop(self, rows: Rows) -> None:
        """Forget the blocks of distinct rows that are in use."""
        self._table.remove(self._table.keys[rows])
        self._count(rows, -1)
        self.segment[rows] = NOWHERE
        self.payload_total_bytes -= self.sizes_of(rows).num_bytes

    def rows_of(self, segment: int) -> Rows:
        """Return the rows whose blocks are in a segment."""
        return np.flatnonzero(self.segment[: self._table.extent] == segment)

    def rows_among(self, segments: Sequence[int]) -> Rows:
        """Return the rows whose blocks are in any of some segments."""
        return np.flatnonzero(np.isin(self.segment[: self._table.extent], segments))

    def expired_rows(self, oldest_s: int) -> Rows:
        """Return the rows of blocks that were written before ``oldest_s``."""
        extent = self._table.extent
        is_old = self.written_s[:extent] < oldest_s
        return np.flatnonzero(is_old & (self.segment[:extent] != NOWHERE))

    def written_bytes(self, oldest_s: int) -> int:
        """Return the bytes of records that were written at ``oldest_s`` or later."""
        extent = self._table.extent
        is_recent = (self.written_s[:extent] >= oldest_s) & (self.segment[:extent] != NOWHERE)
        sizes = self.payload_bytes[:extent][is_recent]
        return int(sizes.sum(dtype=np.int64)) + PAGE_BYTES * len(sizes)

    def touch(self, rows: Rows) -> None:
        """Count a read of each row."""
        self.reads[rows] = np.minimum(self.reads[rows] + 1, READS_MAX)

    def halve_reads(self) -> None:
        """Halve all read counts, so that older reads count less."""
        self.reads[: self._table.extent] >>= 1

    def count_blocks(self, segments: Sequence[int]) -> Weights:
        """Return the number of blocks in each of the given segments. Needs no lock."""
        return np.array([self._num_blocks[segment] for segment in segments], np.int64)

    def read_bytes(self, segments: Sequence[int]) -> Weights:
        """Return the total size of read blocks in each of the given segments.

        The segments are in ascending order. Needs no lock: concurrent changes may be missed.
        """
        extent = self._table.extent
        read = np.flatnonzero(self.reads[:extent].copy())  # other threads count reads meanwhile
        sizes = self.payload_bytes[:extent][read] + np.float64(PAGE_BYTES)
        numbers = np.array(segments, np.uint32)
        found = self.segment[:extent][read]
        places = np.searchsorted(numbers, found)
        places[~np.isin(found, numbers)] = len(numbers)
        return np.bincount(places, sizes, len(numbers) + 1)[:-1].astype(np.int64)

    def hashes_of(self, rows: Rows) -> list[BlockHash]:
        """Return the blocks of rows that are in use."""
        return [BlockHash(key.tobytes()) for key in self._table.keys[rows]]

    def sizes_of(self, rows: Rows) -> Removed:
        """Return the number of blocks in rows that are in use, and their payload bytes."""
        return Removed(len(rows), int(self.payload_bytes[rows].sum(dtype=np.int64)))

    def live_segments(self) -> set[int]:
        """Return the segments that have blocks."""
        return set(self._num_blocks)

    def _count(self, rows: Rows, step: int) -> None:
        """Add the blocks of distinct rows to the counts, or remove them if ``step`` is -1."""
        segments, counts = np.unique(self.segment[rows], return_counts=True)
        for segment, count in zip(segments.tolist(), counts.tolist(), strict=True):
            if segment != NOWHERE:
                self._num_blocks[segment] += step * count
                if not self._num_blocks[segment]:
                    del self._num_blocks[segment]

    def _grow(self) -> None:
        added = np.zeros(self._table.capacity - len(self.segment), np.uint32)
        self.segment = np.concatenate([self.segment, added])
        self.page = np.concatenate([self.page, added])
        self.payload_bytes = np.concatenate([self.payload_bytes, added])
        self.space = np.concatenate([self.space, added])
        self.written_s = np.concatenate([self.written_s, added])
        self.reads = np.concatenate([self.reads, added.astype(np.uint8)])
