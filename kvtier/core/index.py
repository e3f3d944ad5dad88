"""The index of blocks: one row per block, one numpy field per attribute.

Theory
------
One Python object per block would take half a gigabyte per million blocks. Columns take 72 bytes per
row, and answer for a whole prefix in a few array operations. Rows come from a ``HashTable`` and are
reused, so a row number is only valid until the next ``forget_absent``.

A row exists while its block is in some tier in some state. The index knows nothing about the
contents of slots, sessions or time; recency is a stamp that the caller sets.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.ma  # np.unique imports it on first use, when there may be no file descriptor left
import numpy.typing as npt

from kvtier.core.identity import BlockHash, BlockHeader, Headers, Selection, split_hashes
from kvtier.core.key_space_usage import BlockTotals, KeySpaceUsage
from kvtier.core.limits import INDEX_ROWS_MAX, SCOPES_WITHOUT_BLOCKS_MAX
from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, Residency, TierName
from kvtier.core.table import HashTable, Keys, Rows

__all__ = [
    "IS_KEPT",
    "NEEDED_BY",
    "NO_SLOT",
    "WAS_DEMOTED",
    "WAS_FLUSHED",
    "WAS_REFUSED",
    "WAS_USED",
    "BlockIndex",
    "MoveListener",
    "NewBlocks",
    "Scope",
]

NO_SLOT = -1
"""The slot of a block that is not in the arena."""

WAS_USED = 1
"""Bit of ``flags``: the block was loaded since it entered the CPU tier."""

WAS_DEMOTED = 2
"""Bit of ``flags``: it was offered to slower tiers ahead of eviction since its last use."""

WAS_REFUSED = 4
"""Bit of ``flags``: that offer was refused."""

WAS_FLUSHED = 8
"""Bit of ``flags``: it was written to a slower tier long before its eviction."""

IS_KEPT = 16
"""Bit of ``flags``: it is only evicted if no other block can be."""

NEEDED_BY: Mapping[TierName, int] = {tier: 32 << n for n, tier in enumerate(SLOW_TIERS)}
"""Bits of ``flags``: the tier holds a child of the block, found only through this block."""
assert max(NEEDED_BY.values()) < 256, "widen ``flags``, one byte per block, for a fourth slow tier"

MoveListener = Callable[[Rows, TierName, npt.NDArray[np.uint8], Residency], None]
"""Called after a move with the rows, the tier, their previous states, and their new state."""

_COLUMN: Mapping[TierName, int] = {tier: column for column, tier in enumerate(LOWER_TIERS)}
_FACTS = np.dtype(
    [
        ("parent", np.uint64, 2),
        ("position", np.uint32),
        ("scope", np.uint32),
        ("payload_bytes", np.uint32),
        ("state", np.uint8, len(LOWER_TIERS)),
        ("flags", np.uint8),
        ("slot", np.int64),
        ("stamp", np.int64),
        ("checksum", np.uint64, 2),
        ("pins", np.int32),
    ],
    align=True,
)
"""A row has 72 contiguous bytes, so that a lookup touches two cache lines instead of nine."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The owner of a block: its key space and its tenant."""

    key_space: bytes
    tenant: bytes


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Distinct blocks of one chain to add: ``parents[i]`` is the hash before ``keys[i]``."""

    keys: Keys
    parents: Keys
    first_position: int
    scope: int
    payload_bytes: int


class BlockIndex:
    """All blocks in the CPU, SSD and remote tiers."""

    def __init__(self) -> None:
        self.listeners: tuple[MoveListener, ...] = ()
        """Called in this order after every change of residency except those of ``restore``."""
        self.num_restored = 0
        """Number of blocks that ``restore`` added, whether still present or not."""
        self.key_space_usage = KeySpaceUsage()
        self._table = HashTable(INDEX_ROWS_MAX)
        self._scopes: list[Scope] = []
        self._free_scopes: list[int] = []
        self._num_scopes_with_blocks = 0
        """Number of scopes with blocks when it was last counted."""
        self._scope_ids: dict[Scope, int] = {}
        self._counts: npt.NDArray[np.int64] = np.zeros(
            (len(LOWER_TIERS), len(Residency)), dtype=np.int64
        )
        self.parent: Keys
        self.position: npt.NDArray[np.uint32]
        self.scope: npt.NDArray[np.uint32]
        self.payload_bytes: npt.NDArray[np.uint32]
        self.state: npt.NDArray[np.uint8]
        """Residency by row and lower tier."""
        self.flags: npt.NDArray[np.uint8]
        """What happened to the block in the CPU tier, as flags; 0 when it enters the tier."""
        self.slot: npt.NDArray[np.int64]
        """Offset in the arena, or ``NO_SLOT``."""
        self.pins: npt.NDArray[np.int32]
        """Number of leases and transfers that hold the block in the CPU tier."""
        self.stamp: npt.NDArray[np.int64]
        """Recency: the larger, the more recent. A parent's is never smaller than its child's."""
        self.checksum: Keys
        """Checksum of header and payload in the arena; zero while the block is not served."""
        self._facts = np.zeros(0, dtype=_FACTS)
        self._fit()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def extent(self) -> int:
        """Return the first row number that was never used."""
        return self._table.extent

    def rows(self) -> Rows:
        """Return the rows of all blocks."""
        return self._table.rows()

    def find(self, keys: Keys) -> Rows:
        """Return the row of each block, -1 if unknown. Changes nothing."""
        return self._table.find(keys)

    def facts(self, rows: Rows) -> npt.NDArray[np.void]:
        """Return copies of rows, with a field per column; -1 gives an arbitrary row."""
        return self._facts.take(rows)

    def scope_id(self, scope: Scope) -> int:
        """Return the number of a scope in the ``scope`` column, assigning one if necessary."""
        number = self._scope_ids.get(scope)
        if number is not None:
            return number
        most = self._num_scopes_with_blocks * 2 + SCOPES_WITHOUT_BLOCKS_MAX
        if not self._free_scopes and len(self._scopes) >= most:
            self._forget_scopes()
        if self._free_scopes:
            number = self._free_scopes.pop()
            self._scopes[number] = scope
        else:
            number = len(self._scopes)
            self._scopes.append(scope)
        self._scope_ids[scope] = number
        self.key_space_usage.add_scope(number, scope.key_space)
        return number

    def known_scope(self, scope: Scope) -> int:
        """Return a scope's number, or -1 if it has none. Changes nothing."""
        return self._scope_ids.get(scope, -1)

    def add(self, blocks: NewBlocks, found: Rows | None = None) -> Rows:
        """Return the rows of blocks, adding unknown ones as absent everywhere.

        ``found``: the result of ``find`` for these blocks, if the caller has it.
        """
        rows = self._table.find(blocks.keys) if found is None else found.copy()
        places = np.flatnonzero(rows < 0)
        if len(places):
            fresh = self._table.add(blocks.keys[places])
            self._fit()
            rows[places] = fresh
            self._facts[fresh] = 0
            self.parent[fresh] = blocks.parents[places]
            self.position[fresh] = places + blocks.first_position
            self.scope[fresh] = blocks.scope
            self.payload_bytes[fresh] = blocks.payload_bytes
            self.slot[fresh] = NO_SLOT
            self.key_space_usage.note_size(blocks.scope, blocks.payload_bytes)
        return rows

    def restore(self, headers: Headers, tier: TierName) -> Rows:
        """Add blocks that a persistent tier holds, as ready and older than all others.

        The blocks must be distinct and not in the index. Returns their rows.
        """
        rows = self._table.insert(np.ascontiguousarray(headers["block_hash"]))
        self._fit()
        self._facts[rows] = 0
        self.parent[rows] = headers["parent_hash"]
        self.position[rows] = headers["position"]
        self.payload_bytes[rows] = headers["payload_bytes"]
        self.slot[rows] = NO_SLOT
        spaces, numbers = np.unique(headers["space"], axis=0, return_inverse=True)
        for number, space in enumerate(spaces):
            # One by one: a scope is only known to be in use once it is in the column.
            scope = Scope(space[:2].tobytes(), space[2:].tobytes())
            own = rows[numbers.reshape(-1) == number]
            self.scope[own] = self.scope_id(scope)
            self.key_space_usage.note_size(int(self.scope[own[0]]), int(self.payload_bytes[own[0]]))
        self._set(rows, tier, Residency.READY)
        self.num_restored += len(rows)
        return rows

    def is_alike(self, rows: Rows, headers: Headers) -> npt.NDArray[np.bool_]:
        """Return which rows match the given headers: a client may have lied about a block."""
        spaces, numbers = np.unique(headers["space"], axis=0, return_inverse=True)
        scopes = [Scope(space[:2].tobytes(), space[2:].tobytes()) for space in spaces]
        known = np.array([self.known_scope(scope) for scope in scopes], np.int64)
        is_alike: npt.NDArray[np.bool_] = self.scope[rows] == known[numbers.reshape(-1)]
        is_alike &= (self.parent[rows] == headers["parent_hash"]).all(axis=1)
        is_alike &= self.position[rows] == headers["position"]
        is_alike &= self.payload_bytes[rows] == headers["payload_bytes"]
        return is_alike

    def forget_absent(self, rows: Rows) -> None:
        """Remove the rows that are in no tier; their numbers become free."""
        rows = np.unique(rows[rows >= 0]) if len(rows) > 1 else rows[rows >= 0]
        gone = rows[(self.state[rows] == Residency.ABSENT).all(axis=1)]
        assert not self.pins[gone].any(), "a pinned block must be in a tier"
        if len(gone):
            self._table.remove(self._table.keys[gone])

    def residency(self, rows: Rows, tier: TierName) -> npt.NDArray[np.uint8]:
        """Return the state of each row in a tier."""
        column: npt.NDArray[np.uint8] = self.state[rows, _COLUMN[tier]]
        return column

    def lacks(self, rows: Rows, tier: TierName) -> npt.NDArray[np.bool_]:
        """Return which rows have to be written to a tier: absent there, or unverified."""
        state = self.residency(rows, tier)
        is_lacking: npt.NDArray[np.bool_] = state == Residency.ABSENT
        is_lacking |= state == Residency.UNVERIFIED
        return is_lacking

    def held(self, rows: Rows, tier: TierName) -> Rows:
        """Return the rows that a tier holds, verified or not."""
        state = self.residency(rows, tier)
        held: Rows = rows[(state == Residency.READY) | (state == Residency.UNVERIFIED)]
        return held

    def cell(self, row: int, tier: TierName) -> int:
        """Return the state of one row in a tier."""
        return int(self.state[row, _COLUMN[tier]])

    def evictable(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows may leave the CPU tier: ready there, neither pinned nor kept."""
        is_ready = self.residency(rows, TierName.CPU) == Residency.READY
        is_free: npt.NDArray[np.bool_] = is_ready & (self.pins[rows] == 0)
        is_free &= self.flags[rows] & IS_KEPT == 0
        return is_free

    def is_evictable(self, row: int) -> bool:
        """Return whether one row may leave the CPU tier."""
        return bool(
            self.pins[row] == 0
            and not self.flags[row] & IS_KEPT
            and self.cell(row, TierName.CPU) == Residency.READY
        )

    def add_listener(self, listener: MoveListener) -> None:
        """Call ``listener`` after each move from now on."""
        self.listeners = (*self.listeners, listener)

    def remove_listener(self, listener: MoveListener) -> None:
        """Stop calling a listener."""
        self.listeners = tuple(each for each in self.listeners if each != listener)

    def move(self, rows: Rows | int, tier: TierName, state: Residency) -> None:
        """Set the state of distinct rows in a tier."""
        before = self._set(rows, tier, state)
        for listener in self.listeners:
            listener(np.atleast_1d(rows), tier, before, state)

    def _set(self, rows: Rows | int, tier: TierName, state: Residency) -> npt.NDArray[np.uint8]:
        column = _COLUMN[tier]
        before = np.atleast_1d(self.state[rows, column])
        self._counts[column] -= np.bincount(before, minlength=len(Residency))
        self._counts[column, state] += len(before)
        is_ready, was_ready = state == Residency.READY, before == Residency.READY
        if (is_ready and len(before)) or np.count_nonzero(was_ready):
            scopes = np.atleast_1d(self.scope[rows])
            self.key_space_usage.note_change(scopes, column, was_ready, is_ready=is_ready)
        self.state[rows, column] = state
        return before

    def num_in(self, tier: TierName, state: Residency) -> int:
        """Return how many blocks have a state, other than absent, in a tier."""
        assert state is not Residency.ABSENT
        return int(self._counts[_COLUMN[tier], state])

    def held_in(self, tier: TierName) -> dict[bytes, BlockTotals]:
        """Return the totals of the blocks that a tier can serve, by key space."""
        return dict(self.key_space_usage.totals(_COLUMN[tier]))

    def in_state(self, tier: TierName, state: Residency) -> Rows:
        """Return the rows in a state in a tier."""
        rows = self.rows()
        matches: Rows = rows[self.residency(rows, tier) == state]
        return matches

    def selected(self, rows: Rows, selection: Selection) -> Rows:
        """Return the rows that a selection includes."""
        if selection.is_all:
            return rows
        scopes = self._scope_ids.items()
        meant = [number for each, number in scopes if selection.has(each.key_space, each.tenant)]
        return rows[np.isin(self.scope[rows], meant)]

    def keys_of(self, rows: Rows) -> Keys:
        """Return the block hashes of rows, as an array."""
        return self._table.keys[rows]

    def hash_of(self, row: int) -> BlockHash:
        """Return the block hash of a row."""
        return BlockHash(self._table.keys[row].tobytes())

    def hashes_of(self, rows: Rows) -> list[BlockHash]:
        """Return the block hashes of rows."""
        return split_hashes(self._table.keys[rows].tobytes())

    def header_of(self, row: int) -> BlockHeader:
        """Return a row's header, including its checksum if it has one."""
        scope = self._scopes[self.scope[row]]
        return BlockHeader(
            key_space=scope.key_space,
            tenant=scope.tenant,
            block_hash=self.hash_of(row),
            parent_hash=BlockHash(self.parent[row].tobytes()),
            position=int(self.position[row]),
            payload_bytes=int(self.payload_bytes[row]),
            checksum=self.checksum[row].tobytes(),
        )

    def parent_rows(self, rows: Rows) -> Rows:
        """Return the row of each row's parent, -1 if the parent is a root or unknown."""
        return self._table.find(self.parent[rows])

    def scope_of(self, row: int) -> Scope:
        """Return the scope of a row."""
        scope: Scope = self._scopes[self.scope[row]]
        return scope

    def scopes(self) -> Iterator[tuple[int, Scope]]:
        """Yield every known scope with its number."""
        for scope, number in self._scope_ids.items():
            yield number, scope

    def _forget_scopes(self) -> None:
        """Free the numbers of scopes without blocks."""
        in_use = np.zeros(len(self._scopes), dtype=bool)
        in_use[self.scope[self.rows()]] = True
        self._num_scopes_with_blocks = int(in_use.sum())
        self._free_scopes = np.flatnonzero(~in_use).tolist()
        for number in self._free_scopes:
            del self._scope_ids[self._scopes[number]]
        self.key_space_usage.keep_only({scope.key_space for scope in self._scope_ids})

    def _fit(self) -> None:
        """Grow the columns to the table's capacity."""
        known = len(self._facts)
        if known < self._table.capacity:
            facts = np.zeros(self._table.capacity, dtype=_FACTS)
            facts[:known] = self._facts
            self._facts = facts
            for name in _FACTS.names or ():
                setattr(self, name, self._facts[name])
