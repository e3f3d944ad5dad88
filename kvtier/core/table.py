"""A hash table from 128-bit keys to dense row numbers, held in numpy arrays.

A Python dict of a million 16-byte keys costs about 140 MB and a microsecond an entry; this table
costs 24 to 32 bytes a row, and finds or inserts a whole prefix in a few array
operations. Rows are small integers that are reused after removal, so that users keep their own
columns, indexed by row.

Open addressing with linear probing. A removal leaves a tombstone where others may have been put
behind it; what comes later is put in its place, and growing sweeps out the rest. So a table of
which as much is removed as is added is hardly ever built anew, which takes half a second a million
rows.
The keys should be SHA-256 output, but who names blocks is a client, and counters, or hashes of 64
bits with zeros before them, would all want the same bucket: so both halves are mixed (multiply and
shift: Dietzfelbinger et al., A reliable randomized algorithm for the closest-pair problem, 1997).
By what is a secret of the process, or a client that lies could choose keys that meet again.
"""

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import HASH_BYTES

__all__ = ["HashTable", "Keys", "Rows", "as_keys"]

Keys = npt.NDArray[np.uint64]
"""Block hashes as an array of shape (n, 2)."""

Rows = npt.NDArray[np.int64]
"""Row numbers, shape (n,); -1 where there is none."""

_PAIR = np.dtype([("low", np.uint64), ("high", np.uint64)])

_EMPTY = -1
_TOMBSTONE = -2
_CAPACITY_MIN = 1024
_WIDTH_MIN, _WIDTH_MAX = 4, 64
"""How many buckets a round of a search looks at: most keys end at the first or second, but one of
a few dozen goes on for a dozen, and a round costs 7 us whatever it looks at."""
_MANY = 512
"""Of so many keys the looks themselves cost more, in cache misses, than the rounds."""


def as_keys(joined: bytes | memoryview) -> Keys:
    """View a concatenation of 16-byte hashes as keys; copies nothing."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return np.frombuffer(joined, dtype="<u8").reshape(-1, 2)


class HashTable:
    """Maps keys to rows ``[0, capacity)``; ``capacity`` doubles when all rows are taken.

    Rows are taken from 0 on, and memory that was never written costs nothing: a large ``capacity``
    from the start spares the copies, and the holes, that growing leaves behind.
    """

    def __init__(self, capacity: int = _CAPACITY_MIN) -> None:
        size = _CAPACITY_MIN
        while size < capacity:
            size *= 2
        self.keys: Keys = np.zeros((size, 2), dtype=np.uint64)
        """The key of each row in use; of a free row, garbage."""
        self.extent = 0
        """Rows from here on were never in use."""
        self._free: npt.NDArray[np.int32] = np.empty(size, dtype=np.int32)
        """A stack of the rows below ``extent`` that are free."""
        self._num_free = 0
        self._num_tombstones = 0
        self._buckets = _blank(_CAPACITY_MIN)
        # Python keys its own hashes for the same reason, anew in each process. What comes out of a
        # table does not depend on it, so that a replay repeats.
        secrets = np.array([hash(b"low"), hash(b"high")]).astype(np.uint64)
        self._factors: npt.NDArray[np.uint64] = secrets | np.uint64(1)

    @property
    def capacity(self) -> int:
        """Return the number of rows; columns kept beside this table need as many."""
        return len(self.keys)

    def __len__(self) -> int:
        return self.extent - self._num_free

    def find(self, keys: Keys) -> Rows:
        """Return the row of each key, -1 where it is absent. Changes nothing."""
        return self._probe(keys)[0]

    def insert(self, keys: Keys) -> Rows:
        """Return the row of each key, taking rows for those that are new; repeats are welcome."""
        rows = self.find(keys)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            fresh, places = np.unique(keys[absent], axis=0, return_inverse=True)
            rows[absent] = self.add(fresh)[places.reshape(-1)]
        return rows

    def add(self, keys: Keys) -> Rows:
        """Return rows for keys that are absent, each given once; a third of ``insert``'s cost."""
        while len(self) + len(keys) > self.capacity:
            self.keys = np.concatenate([self.keys, np.zeros_like(self.keys)])
            self._free = np.concatenate([self._free, np.empty_like(self._free)])
        # At most 5 of 8 buckets are not empty: beyond, a miss looks at more than four of them.
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
        """Forget keys and return the rows they had, -1 where a key was absent or a repeat."""
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
        """Forget everything; keeps the capacity."""
        self._buckets = _blank(_CAPACITY_MIN)
        self.extent = self._num_free = self._num_tombstones = 0

    def rows(self) -> Rows:
        """Return all rows in use, in ascending order."""
        return np.sort(self._buckets[self._buckets >= 0]).astype(np.int64)

    def _probe(self, keys: Keys) -> tuple[Rows, Rows]:
        """Return for each key its row (-1: absent) and the bucket it was found in."""
        # First the buckets, then the keys they name: a thread that looks while another adds sees
        # what was, or what will be.
        table = self._buckets
        mask = len(table) - 1
        buckets = self._first_buckets(keys, mask)
        rows: Rows = np.full(len(keys), -1, dtype=np.int64)
        pairs = self.keys.view(_PAIR).reshape(-1)
        pending, low, high = np.arange(len(keys)), keys[:, :1], keys[:, 1:]
        width = _WIDTH_MIN if len(keys) < _MANY else 1
        while len(pending):
            # ``take`` of whole pairs: a third of the time of indexing, and one cache miss a key.
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
        """Return where to look for each key first."""
        low, high = self._factors
        mixed = keys[:, 0] * low + keys[:, 1] * high
        # Once more: one factor in forty would leave long rows of counters side by side.
        mixed = (mixed ^ (mixed >> np.uint64(32))) * high
        buckets: Rows = (mixed >> np.uint64(64 - mask.bit_length())).astype(np.int64)
        return buckets

    def _clear(self, buckets: Rows) -> None:
        """Empty buckets; one before a bucket that is not empty keeps a tombstone."""
        table, mask = self._buckets, len(self._buckets) - 1
        table[buckets] = _TOMBSTONE
        self._num_tombstones += len(buckets)
        while len(buckets):
            is_last = (table[buckets] == _TOMBSTONE) & (table[(buckets + 1) & mask] == _EMPTY)
            buckets = np.unique(buckets[is_last])
            table[buckets] = _EMPTY
            self._num_tombstones -= len(buckets)
            buckets = (buckets - 1) & mask  # which may be last now

    def _place(self, rows: Rows) -> None:
        """Put rows into buckets; where several want the same one, one wins and the others go on."""
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
        """Make buckets for ``num_rows``, and leave the tombstones behind."""
        rows = self.rows()
        self._buckets = _blank(num_rows)
        self._num_tombstones = 0
        self._place(rows)


def _blank(num_rows: int) -> npt.NDArray[np.int32]:
    # Two buckets a row or more: at a load of one half, a probe looks at 1.5 buckets on average.
    size = 2 * _CAPACITY_MIN
    while size < 2 * num_rows:
        size *= 2
    return np.full(size, _EMPTY, dtype=np.int32)
