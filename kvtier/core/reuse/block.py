"""Remembered blocks, as columns: whose child a block is, in which run, and where it is.

A hash table and numpy columns, 90 bytes a block: with a dictionary of a million hashes and lists it
would be 250. What is asked for is a chain at a time, mostly, for which an array operation costs no
more than a loop.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.fate import Fate
from kvtier.core.residency import LOWER_TIERS
from kvtier.core.table import HashTable, as_keys

__all__ = ["FATES", "NO_ROW", "ORPHAN", "Blocks", "Places"]

NO_ROW = -1
"""Before a root, or not remembered."""

ORPHAN = -2
"""The parent of a block that was met without its chain."""

FATES: Sequence[Fate] = tuple(Fate)
"""By the number that stands for a fate in its column."""

Places = npt.NDArray[np.int32]
"""Rows of blocks."""

_FACTS = np.dtype(
    [
        ("parent", np.int32),
        ("place", np.int32),
        ("run", np.int32),
        ("number", np.int32),
        ("children", np.int32),
        ("kids", np.int32, len(LOWER_TIERS)),
        ("forks", np.uint8),
        ("uses", np.uint8),
        ("where", np.uint8),
        ("fate", np.uint8),
    ]
)
"""36 bytes a block."""


class Blocks:
    """Every block that is remembered, be it in a tier or a ghost."""

    def __init__(self) -> None:
        self._table = HashTable()
        self.parent: Places
        self.place: Places
        """In its chain, from 0 on."""
        self.run: Places
        self.number: Places
        """By which the user of the CPU tier knows it."""
        self.children: Places
        """How many that are remembered."""
        self.kids: npt.NDArray[np.int32]
        """By tier, how many of its children are there."""
        self.forks: npt.NDArray[np.uint8]
        """How many chains went on behind it, up to 255."""
        self.uses: npt.NDArray[np.uint8]
        """How many requests named it, up to 255."""
        self.where: npt.NDArray[np.uint8]
        """In which tiers it is, as bits."""
        self.fate: npt.NDArray[np.uint8]
        self.num_resident = 0
        """How many are in one tier at least."""
        self._facts = np.zeros(0, _FACTS)
        self._fit(self._table.capacity)
        self._last = (b"", NO_ROW)
        """The hash and row asked for last: what is proposed to go is named again as it leaves."""
        self._chain: dict[bytes, int] = {}
        """The rows of the chain touched last, which is asked for again as its blocks come in."""

    def __len__(self) -> int:
        return len(self._table)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Yield every block with its row."""
        return ((self.key(row), row) for row in self._table.rows().tolist())

    def key(self, row: int) -> bytes:
        """Return the hash of a row in use."""
        self._last = (self._table.keys[row].tobytes(), row)
        return self._last[0]

    def row(self, key: bytes) -> int:
        """Return a block's row, or ``NO_ROW``."""
        last, row = self._last
        return row if key == last else int(self.find([key])[0])

    def find(self, keys: Sequence[bytes]) -> Places:
        """Return each block's row, or ``NO_ROW``."""
        chain = self._chain
        rows = [chain.get(key, NO_ROW) for key in keys]
        if NO_ROW not in rows:
            return np.array(rows, np.int32)
        return self._table.find(as_keys(b"".join(keys))).astype(np.int32)

    def chain(self, keys: Sequence[bytes]) -> tuple[Places, int, list[int]]:
        """Return the rows of a chain, new ones where it goes on, and how many are known.

        Cut before the first block that is known to belong elsewhere, or comes twice: only a broken
        client sends such a chain. Also returns those of its rows that were orphans until now.
        """
        found = self.find(keys)
        num_known = self._num_known(found)
        end = len(keys)
        is_elsewhere = (found[num_known:] != NO_ROW) & (self.parent[found[num_known:]] != ORPHAN)
        if is_elsewhere.any():
            end = num_known + int(is_elsewhere.argmax())
        if len(set(keys[num_known:end])) < end - num_known:
            end = num_known + _num_distinct(keys[num_known:end])
        rows = found[:end]
        orphans = rows[num_known:][rows[num_known:] != NO_ROW].tolist()
        fresh = np.flatnonzero(rows == NO_ROW)
        rows[fresh] = self.add([keys[place] for place in fresh.tolist()])
        if num_known < end:
            self._link(rows, num_known)
        self._chain = dict(zip(keys, rows.tolist(), strict=False))
        return rows, num_known, orphans

    def _num_known(self, found: Places) -> int:
        """Return how many leading rows are those of one chain."""
        is_new = found == NO_ROW
        known = found[: int(is_new.argmax())] if is_new.any() else found
        if not len(known):
            return 0
        is_own = self.place[known] == np.arange(len(known))
        is_own &= self.parent[known] == np.concatenate([[NO_ROW], known[:-1]])
        return len(known) if is_own.all() else int(is_own.argmin())

    def _link(self, rows: Places, first: int) -> None:
        """Make each of a chain's rows from ``first`` on the child of the one before it."""
        more = rows[first:]
        parents = np.concatenate([[NO_ROW], rows])[first : len(rows)].astype(np.int32)
        self.parent[more] = parents
        self.place[more] = np.arange(first, len(rows))
        is_child = parents >= 0
        self.children[parents[is_child]] += 1
        where = self.where[more]
        if where.any():
            for tier in range(len(LOWER_TIERS)):
                is_here = is_child & (where & (1 << tier) > 0)
                self.kids[parents[is_here], tier] += 1

    def add(self, keys: Sequence[bytes]) -> Places:
        """Return rows for blocks that are not remembered, each named once."""
        # Before the table has them: whoever finds a row also finds its facts.
        if self._table.extent + len(keys) > len(self._facts):
            self._fit(max(2 * len(self._facts), self._table.extent + len(keys)))
        rows = self._table.add(as_keys(b"".join(keys)))
        self._facts[rows] = 0
        return rows.astype(np.int32)

    def remove(self, rows: Sequence[int]) -> None:
        """Forget blocks."""
        self._last = (b"", NO_ROW)
        if rows:
            self._chain = {}
            self._table.remove(self._table.keys[list(rows)])

    def _fit(self, capacity: int) -> None:
        facts = np.zeros(capacity, _FACTS)
        facts[: len(self._facts)] = self._facts
        self._facts = facts
        for name in _FACTS.names or ():
            setattr(self, name, facts[name])


def _num_distinct(keys: Sequence[bytes]) -> int:
    """Return how many leading hashes are there before one comes again."""
    seen = set[bytes]()
    for place, key in enumerate(keys):
        if key in seen:
            return place
        seen.add(key)
    return len(keys)
