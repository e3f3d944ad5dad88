"""A hash table from 128-bit keys to dense row numbers, in numpy arrays.

A Python dict of a million 16-byte keys takes about 140 MB and a microsecond per entry. This table
takes 24 to 32 bytes per row, and looks up or inserts a whole prefix in a few array operations. Rows
are small integers, reused after removal, that index the columns of the table's users.

Open addressing with linear probing. A removal leaves a tombstone where other keys may have been
placed behind it; later insertions reuse tombstones, and growing drops the rest. A table that is
filled as fast as it is emptied is therefore hardly ever rebuilt, which takes half a second per
million rows.

Keys should be SHA-256 output, but clients choose them, and counters or 64-bit hashes padded with
zeros would all map to the same bucket. So both halves are mixed by multiplication and shifts
(Dietzfelbinger et al., A reliable randomized algorithm for the closest-pair problem, 1997), with
secret factors of this process, so that a malicious client cannot construct collisions.
"""

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import HASH_BYTES

__all__ = ["HashTable", "Keys", "Rows", "as_keys"]

Keys = npt.NDArray[np.uint64]
"""Block hashes as an array of shape (n, 2)."""

Rows = npt.NDArray[np.int64]
"""Row numbers, shape (n,); -1 if absent."""

_PAIR = np.dtype([("low", np.uint64), ("high", np.uint64)])

_EMPTY = -1
_TOMBSTONE = -2
_CAPACITY_MIN = 1024
_WIDTH_MIN, _WIDTH_MAX = 4, 64
"""Buckets examined per probing round. Most keys end at the first or second bucket, but one in a few
dozen needs a dozen, and a round costs 7 us regardless of its width."""
_MANY = 512
"""With this many keys, cache misses of the probes cost more than the rounds."""


def as_keys(joined: bytes | memoryview) -> Keys:
    """View concatenated 16-byte hashes as keys, without a copy."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes is not a multiple of the hash size ({HASH_BYTES})")
    return np.frombuffer(joined, dtype="<u8").reshape(-1, 2)


class HashTable:
    """Maps keys to rows ``[0, capacity)``; ``capacity`` doubles when all rows are taken.

    Rows are taken from 0 on, and untouched memory is free: a large initial ``capacity`` avoids the
    copies and the fragmentation of growing.
    """

    def __init__(self, capacity: int = _CAPACITY_MIN) -> None:
        size = _CAPACITY_MIN
        while size < capacity:
            size *= 2
        self.keys: Keys = np.zeros((size, 2), dtype=np.uint64)
        """Key of each row in use; undefined for free rows."""
        self.extent = 0
        """Rows from this one on were never used."""
        self._free: npt.NDArray[np.int32] = np.empty(size, dtype=np.int32)
        """Stack of the free rows below ``extent``."""
        self._num_free = 0
        self._num_tombstones = 0
        self._buckets = _blank(_CAPACITY_MIN)
        # Python randomizes its own hashes per process for the same reason. The order of rows does
        # not depend on the factors, so replays are reproducible.
        secrets = np.array([hash(b"low"), hash(b"high")]).astype(np.uint64)
        self._factors: npt.NDArray[np.uint64] = secrets | np.uint64(1)

    @property
    def capacity(self) -> int:
        """Return the number of rows, which columns beside this table must also have."""
        return len(self.keys)

    def __len__(self) -> int:
        return self.extent - self._num_free

    def find(self, keys: Keys) -> Rows:
        """Return the row of each key, -1 if absent. Changes nothing."""
        return self._probe(keys)[0]

    def insert(self, keys: Keys) -> Rows:
        """Return the row of each key, adding the absent ones; keys may repeat."""
        rows = self.find(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            fresh, places = np.unique(keys[absent], axis=0, return_inverse=True)
            rows[absent] = self.add(fresh)[places.reshape(-1)]
        return rows

    def add(self, keys: Keys) -> Rows:
        """Add keys that are absent and distinct, at a third of the cost of ``insert``."""
        while len(self) + len(keys) > self.capacity:
            self.keys = np.concatenate([self.keys, np.zeros_like(self.keys)])
            self._free = np.concatenate([self._free, np.empty_like(self._free)])
        # Keep 3 of 8 buckets empty: with less, a miss examines more than four of them.
        if len(self) + len(keys) + self._num_tombstones > len(self._buckets) * 5 // 8:
            self._rebuild(len(self) + len(keys))
        num_reused = min(self._num_free, len(keys))
        self._num_free -= num_reused
        reused = self._free[self._num_free : self._num_free + num_reused]
        fresh = np.arange(self.extent, self.extent + len(keys) - num_reused)
        self.extent += len(fresh)
        rows: Rows = np.concatenate([reused.astype(np.int64), fresh])
        self.keys[rows] = keys
        self._place(rows)
        return rows

    def remove(self, keys: Keys) -> Rows:
        """Remove keys and return their rows; -1 where a key is absent or repeated."""
        rows, buckets = self._probe(keys)
        if len(rows) > 1:
            _, firsts = np.unique(rows, return_index=True)
            repeats = np.ones(len(rows), dtype=bool)
            repeats[firsts] = False
            rows[repeats] = -1
        gone = rows >= 0
        self._clear(buckets[gone])
        count = int(gone.sum())
        self._free[self._num_free : self._num_free + count] = rows[gone]
        self._num_free += count
        return rows

    def clear(self) -> None:
        """Remove all keys; keeps the capacity."""
        self._buckets = _blank(_CAPACITY_MIN)
        self.extent = self._num_free = self._num_tombstones = 0

    def rows(self) -> Rows:
        """Return all rows in use, ascending."""
        return np.sort(self._buckets[self._buckets >= 0]).astype(np.int64)

    def _probe(self, keys: Keys) -> tuple[Rows, Rows]:
        """Return the row of each key (-1: absent) and the bucket where the search ended."""
        # Read the buckets before the keys: a thread that searches during an insertion sees the
        # state before or after it.
        table = self._buckets
        mask = len(table) - 1
        buckets = self._first_buckets(keys, mask)
        rows: Rows = np.full(len(keys), -1, dtype=np.int64)
        pairs = self.keys.view(_PAIR).reshape(-1)
        pending, low, high = np.arange(len(keys)), keys[:, :1], keys[:, 1:]
        width = _WIDTH_MIN if len(keys) < _MANY else 1
        while len(pending):
            # ``take`` of whole pairs takes a third of the time of indexing, and one cache miss per
            # key.
            ahead = (buckets[pending, None] + np.arange(width)) & mask
            candidates = table.take(ahead)
            found = pairs.take(candidates)
            matches = (candidates >= 0) & (found["low"] == low) & (found["high"] == high)
            is_end = matches | (candidates == _EMPTY)
            each, ends = np.arange(len(pending)), is_end.argmax(axis=1)
            buckets[pending] = ahead[each, ends]
            is_found = matches[each, ends]
            rows[pending[is_found]] = candidates[is_found, ends[is_found]]
            goes_on = ~is_end[each, ends]
            pending, low, high = pending[goes_on], low[goes_on], high[goes_on]
            buckets[pending] = (ahead[goes_on, -1] + 1) & mask
            width = min(4 * width, _WIDTH_MAX)
        return rows, buckets

    def _first_buckets(self, keys: Keys, mask: int) -> Rows:
        """Return the bucket where the search for each key starts."""
        low, high = self._factors
        mixed = keys[:, 0] * low + keys[:, 1] * high
        # Mix twice: otherwise one factor in forty leaves long runs of adjacent counters.
        mixed = (mixed ^ (mixed >> np.uint64(32))) * high
        buckets: Rows = (mixed >> np.uint64(64 - mask.bit_length())).astype(np.int64)
        return buckets

    def _clear(self, buckets: Rows) -> None:
        """Empty buckets; those before a non-empty bucket become tombstones."""
        table, mask = self._buckets, len(self._buckets) - 1
        table[buckets] = _TOMBSTONE
        self._num_tombstones += len(buckets)
        while len(buckets):
            is_last = (table[buckets] == _TOMBSTONE) & (table[(buckets + 1) & mask] == _EMPTY)
            buckets = np.unique(buckets[is_last])
            table[buckets] = _EMPTY
            self._num_tombstones -= len(buckets)
            buckets = (buckets - 1) & mask  # which may be the last one now

    def _place(self, rows: Rows) -> None:
        """Place rows into buckets; if several want the same one, one wins and the others go on."""
        mask = len(self._buckets) - 1
        buckets = self._first_buckets(self.keys[rows], mask)
        pending = np.arange(len(rows))
        while len(pending):
            wanted = buckets[pending]
            before = self._buckets[wanted]
            free = before < 0
            self._buckets[wanted[free]] = rows[pending[free]]
            is_placed = self._buckets[wanted] == rows[pending]
            self._num_tombstones -= int((before[is_placed] == _TOMBSTONE).sum())
            pending = pending[~is_placed]
            buckets[pending] = (buckets[pending] + 1) & mask

    def _rebuild(self, num_rows: int) -> None:
        """Rebuild the buckets for ``num_rows``, without tombstones."""
        rows = self.rows()
        self._buckets = _blank(num_rows)
        self._num_tombstones = 0
        self._place(rows)


def _blank(num_rows: int) -> npt.NDArray[np.int32]:
    # At a load of at most one half, a probe examines 1.5 buckets on average.
    size = 2 * _CAPACITY_MIN
    while size < 2 * num_rows:
        size *= 2
    return np.full(size, _EMPTY, dtype=np.int32)
