"""Which block is where, in numpy columns beside a hash table: 44 bytes a block.

Only what a look-up needs is here; the rest of a block's header is read from the disk together with
its payload, and is what counts: a row may be wrong, and then the block is a miss.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import BlockHash
from kvtier.core.limits import INDEX_ROWS_MAX
from kvtier.core.table import HashTable, Rows, as_keys
from kvtier.tiers.base import Removed
from kvtier.tiers.ssd.segment import Entries

__all__ = ["NOWHERE", "Index", "space_mark"]

NOWHERE = 0
"""The segment of a row that is not in use; segments count from 1."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)

_Column = npt.NDArray[np.uint32]


def space_mark(spaces: npt.NDArray[np.uint64]) -> _Column:
    """Return 32 bits of each (key space, tenant), both digests: tells a stranger without a read."""
    mixed = (spaces[:, 0] ^ (spaces[:, 2] * _ODD)) & _LOW
    return mixed.astype(np.uint32)


class Index:
    """Rows of (segment, page, payload bytes, space mark) by block hash. Not thread-safe."""

    def __init__(self) -> None:
        self._table = HashTable(INDEX_ROWS_MAX)
        capacity = self._table.capacity
        self.segment: _Column = np.zeros(capacity, np.uint32)
        self.page: _Column = np.zeros(capacity, np.uint32)
        self.payload_bytes: _Column = np.zeros(capacity, np.uint32)
        self.space: _Column = np.zeros(capacity, np.uint32)

    def __len__(self) -> int:
        return len(self._table)

    def find(self, hashes: Sequence[BlockHash]) -> Rows:
        """Return the row of each block, -1 where it is absent."""
        return self._table.find(as_keys(b"".join(hashes)))

    def find_entries(self, entries: Entries) -> Rows:
        """Return the row of each entry's block, -1 where it is absent."""
        return self._table.find(np.ascontiguousarray(entries["header"]["block_hash"]))

    def put(self, entries: Entries, segments: _Column | int) -> None:
        """Point each entry's block at its record; of several, the last one stays."""
        headers = entries["header"]
        rows = self._table.insert(np.ascontiguousarray(headers["block_hash"]))
        if len(self.segment) < self._table.capacity:
            self._grow()
        self.segment[rows] = segments
        self.page[rows] = entries["page"]
        self.payload_bytes[rows] = headers["payload_bytes"]
        self.space[rows] = space_mark(headers["space"])

    def drop(self, rows: Rows) -> None:
        """Forget the blocks of distinct rows that are in use."""
        self._table.remove(self._table.keys[rows])
        self.segment[rows] = NOWHERE

    def rows_of(self, segment: int) -> Rows:
        """Return the rows whose blocks are in a segment."""
        return np.flatnonzero(self.segment[: self._table.extent] == segment)

    def hashes_of(self, rows: Rows) -> list[BlockHash]:
        """Return the blocks of rows that are in use."""
        return [BlockHash(key.tobytes()) for key in self._table.keys[rows]]

    def sizes_of(self, rows: Rows) -> Removed:
        """Count the blocks of rows that are in use, and the bytes of their payloads."""
        return Removed(len(rows), int(self.payload_bytes[rows].sum(dtype=np.int64)))

    def live_segments(self) -> set[int]:
        """Return the segments that have blocks."""
        return set(np.unique(self.segment[: self._table.extent]).tolist()) - {NOWHERE}

    def _grow(self) -> None:
        added = np.zeros(self._table.capacity - len(self.segment), np.uint32)
        self.segment = np.concatenate([self.segment, added])
        self.page = np.concatenate([self.page, added])
        self.payload_bytes = np.concatenate([self.payload_bytes, added])
        self.space = np.concatenate([self.space, added])
