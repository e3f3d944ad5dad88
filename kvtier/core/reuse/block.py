"""Columns of remembered blocks: parent, run, and the tiers that hold each block.

A hash table and numpy columns take 90 bytes per block; a dictionary with a million hashes and lists
would take 250. Most calls concern a whole chain, for which an array operation costs no more than a
loop over Python objects.
"""

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvtier.core.fate import Fate
from kvtier.core.identity import BlockHash
from kvtier.core.residency import LOWER_TIERS
from kvtier.core.table import HashTable, as_keys

__all__ = ["FATES", "NO_ROW", "ORPHAN", "BlockRows", "RememberedBlocks", "pieces"]

NO_ROW = -1
"""The row before a root, or of a block that is not remembered."""

ORPHAN = -2
"""The parent of an orphan: a block that is known only as the parent of others."""

FATES: Sequence[Fate] = tuple(Fate)
"""Fates by their number in the ``fate`` column."""

BlockRows = npt.NDArray[np.int32]
"""Rows of blocks."""

_FACTS = np.dtype(
    [
        ("parent", np.int32),
        ("position", np.int32),
        ("run", np.int32),
        ("index_row", np.int32),
        ("children", np.int32),
        ("tier_children", np.int32, len(LOWER_TIERS)),
        ("forks", np.uint8),
        ("uses", np.uint8),
        ("tiers", np.uint8),
        ("fate", np.uint8),
    ]
)
"""36 bytes per block."""


class RememberedBlocks:
    """All remembered blocks: those in a tier, and ghosts."""

    def __init__(self) -> None:
        self._table = HashTable()
        self.parent: BlockRows
        self.position: BlockRows
        """Position in its chain, from 0."""
        self.run: BlockRows
        self.index_row: BlockRows
        """The block's row in the index of the CPU tier."""
        self.children: BlockRows
        """Number of remembered children."""
        self.tier_children: npt.NDArray[np.int32]
        """By tier, the number of children in it."""
        self.forks: npt.NDArray[np.uint8]
        """Number of chains that diverged behind it, up to 255."""
        self.uses: npt.NDArray[np.uint8]
        """Number of requests for it, up to 255."""
        self.tiers: npt.NDArray[np.uint8]
        """The tiers that hold it, as bits."""
        self.fate: npt.NDArray[np.uint8]
        self.num_resident = 0
        """Number of blocks in at least one tier."""
        self._facts = np.zeros(0, _FACTS)
        self._fit(self._table.capacity)
        self._last = (BlockHash(b""), NO_ROW)
        """The last hash and row looked up: a block that is proposed as a victim is looked up again
        when it leaves."""
        self._chain: dict[BlockHash, int] = {}
        """Rows of the last chain touched, which is looked up again as its blocks are stored."""

    def __len__(self) -> int:
        return len(self._table)

    def items(self) -> Iterator[tuple[BlockHash, int]]:
        """Yield every block with its row."""
        return ((self.key(row), row) for row in self._table.rows().tolist())

    def key(self, row: int) -> BlockHash:
        """Return the hash of a row in use."""
        self._last = (BlockHash(self._table.keys[row].tobytes()), row)
        return self._last[0]

    def row(self, key: BlockHash) -> int:
        """Return a block's row, or ``NO_ROW``."""
        last, row = self._last
        return row if key == last else int(self.find([key])[0])

    def find(self, keys: Sequence[BlockHash]) -> BlockRows:
        """Return each block's row, or ``NO_ROW``."""
        chain = self._chain
        rows = [chain.get(key, NO_ROW) for key in keys]
        if NO_ROW not in rows:
            return np.array(rows, np.int32)
        return self._table.find(as_keys(b"".join(keys))).astype(np.int32)

    def chain(self, keys: Sequence[BlockHash]) -> tuple[BlockRows, int, list[int]]:
        """Return a chain's rows, how many leading ones were known, and former orphans.

        Adds blocks that are not remembered. The chain is cut before the first block that belongs
        elsewhere or is repeated: only a broken client sends such a chain.
        """
        found = self.find(keys)
        is_own = self._is_own(found)
        num_known = len(keys) if is_own.all() else int(is_own.argmin())
        is_orphan = (self.parent[found] == ORPHAN) & (self.position[found] == np.arange(len(found)))
        is_elsewhere = (found != NO_ROW) & ~is_own & ~is_orphan
        end = int(is_elsewhere.argmax()) if is_elsewhere.any() else len(keys)
        if len(set(keys[num_known:end])) < end - num_known:
            end = num_known + _num_distinct(keys[num_known:end])
        rows = found[:end]
        adopted = rows[num_known:][rows[num_known:] != NO_ROW].tolist()
        fresh = np.flatnonzero(rows == NO_ROW)
        rows[fresh] = self.add([keys[place] for place in fresh.tolist()])
        self.position[rows[fresh]] = fresh
        if num_known < end:
            unlinked = np.flatnonzero(self.parent[rows] == ORPHAN)
            self._link(rows[unlinked], np.concatenate([[NO_ROW], rows])[unlinked])
        self._chain = dict(zip(keys, rows.tolist(), strict=False))
        return rows, num_known, adopted

    def adopt(
        self, keys: Sequence[BlockHash], parents: Sequence[BlockHash], places: BlockRows
    ) -> BlockRows:
        """Remember distinct blocks and link them to their parents; returns the new rows.

        An unknown parent is added as an orphan, and linked when it is adopted itself or named by a
        request. Existing links do not change. A block whose position does not follow its parent's
        stays an orphan: only a broken client names such a block.
        """
        is_child = places > 0
        place_of = dict(zip(compress(parents, is_child), places[is_child] - 1, strict=True))
        place_of.update(zip(keys, places, strict=True))
        found = self.find([*place_of])
        unknown = [*compress(place_of, found == NO_ROW)]
        fresh = self.add(unknown)
        self.position[fresh] = [place_of[key] for key in unknown]
        rows, above = self.find(keys), np.where(is_child, self.find(parents), NO_ROW)
        fits = (self.parent[rows] == ORPHAN) & (self.position[rows] == places)
        fits &= ~is_child | (self.position[above] == places - 1)
        self._link(rows[fits], above[fits])
        return fresh

    def _is_own(self, found: BlockRows) -> npt.NDArray[np.bool_]:
        """Return which rows of a chain are linked as children of the row before them."""
        before = np.concatenate([[NO_ROW], found[:-1]])
        is_own: npt.NDArray[np.bool_] = (found != NO_ROW) & (self.parent[found] == before)
        is_own &= self.position[found] == np.arange(len(found))
        return is_own

    def _link(self, rows: BlockRows, parents: BlockRows) -> None:
        """Set the parents of distinct orphans; ``NO_ROW`` for the first block of a chain."""
        self.parent[rows] = parents
        rows, parents = rows[parents >= 0], parents[parents >= 0]
        np.add.at(self.children, parents, 1)
        where = self.tiers[rows]
        if where.any():
            for tier in range(len(LOWER_TIERS)):
                np.add.at(self.tier_children[:, tier], parents[where & (1 << tier) > 0], 1)

    def add(self, keys: Sequence[BlockHash]) -> BlockRows:
        """Add distinct, unknown blocks as orphans; returns their rows."""
        # Grow before adding to the table: a thread that finds a row must find its columns, too.
        if self._table.extent + len(keys) > len(self._facts):
            self._fit(max(2 * len(self._facts), self._table.extent + len(keys)))
        rows = self._table.add(as_keys(b"".join(keys)))
        self._facts[rows] = 0
        self.parent[rows] = ORPHAN
        return rows.astype(np.int32)

    def remove(self, rows: Sequence[int]) -> None:
        """Forget blocks."""
        self._last = (BlockHash(b""), NO_ROW)
        if rows:
            self._chain = {}
            self._table.remove(self._table.keys[list(rows)])

    def _fit(self, capacity: int) -> None:
        facts = np.zeros(capacity, _FACTS)
        facts[: len(self._facts)] = self._facts
        self._facts = facts
        for name in _FACTS.names or ():
            setattr(self, name, facts[name])


def _num_distinct(keys: Sequence[BlockHash]) -> int:
    """Return the number of leading hashes before the first repetition."""
    seen = set[BlockHash]()
    for place, key in enumerate(keys):
        if key in seen:
            return place
        seen.add(key)
    return len(keys)


def pieces(numbers: BlockRows | npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Split an array where its value changes: (value, first, end) of each piece."""
    if not len(numbers):
        return []
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
    return list(zip(numbers[starts].tolist(), starts, [*starts[1:], len(numbers)], strict=True))
