"""Whereabouts: tells the history which blocks came to a tier and which left one, and why.

All moves of blocks go through the index, and this module listens there. Arrivals are passed on in
batches, because a store publishes block by block and a call costs as much for one block as for
fifty. Departures are passed on at once, after all earlier arrivals. Blocks that a disk was found to
hold at the start are passed on when a request asks for them: there may be millions of them, and
most are never asked for again.

The index is the source of parents that no request has named: a block that the history does not know
is adopted with its parent from the index. So both agree however a block came to a tier: by a store,
by warming, from another node, or from a disk that was attached.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier.core.fate import Fate
from kvtier.core.identity import split_hashes
from kvtier.core.index import BlockIndex
from kvtier.core.limits import HISTORY_BATCH_BLOCKS
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.table import Keys, Rows, as_keys

__all__ = ["ResidencyListener"]


class ResidencyListener:
    """Listens to an index on behalf of a history, if there is one."""

    def __init__(self, index: BlockIndex, history: History | None) -> None:
        self._index = index
        self._history = history
        self._arrivals: list[tuple[TierName, Rows]] = []
        """Tiers and rows that are ready there now, in the order in which they came."""
        self._num_arrived = 0
        """Of all these rows."""
        self._fate = Fate.EVICTED
        """Of what leaves now."""
        if history is not None:
            index.add_listener(self._moved)

    def tell(self) -> None:
        """Let the history know of all that came."""
        if self._history is None or not self._arrivals:
            return
        arrivals, self._arrivals, self._num_arrived = self._arrivals, [], 0
        for tier in LOWER_TIERS:
            came = [rows for each, rows in arrivals if each is tier]
            if came:
                self._enter(self._history, tier, np.concatenate(came))

    def num_restored(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain are somewhere, if a tier was found not empty.

        Otherwise the history knows them anyway, and 0 is returned.
        """
        if not self._index.num_restored:
            return 0
        rows = self._index.find(as_keys(b"".join(keys)))
        is_there = (self._index.facts(rows)["state"] == Residency.READY).any(axis=1) & (rows >= 0)
        return len(rows) if is_there.all() else int(is_there.argmin())

    def tell_restored(self, rows: Rows, tier: TierName) -> None:
        """Tell the history which of the blocks that it remembers were found in a tier."""
        if self._history is not None and self._history.num_remembered:
            needs_adoption = self._history.needs_adoption(self._keys(rows))
            self._enter(self._history, tier, rows[~needs_adoption])

    def tell_found(self, keys: Sequence[bytes]) -> None:
        """Tell the history in which tiers blocks are that a request has just named.

        This is only needed for blocks that were found at the start; others are told on arrival.
        """
        if self._history is None or not self._index.num_restored:
            return
        rows = self._index.find(as_keys(b"".join(keys)))
        rows = rows[rows >= 0]
        for tier in LOWER_TIERS:
            here = rows[self._index.residency(rows, tier) == Residency.READY]
            if len(here):
                self._enter(self._history, tier, here)

    @contextmanager
    def leaving(self, fate: Fate) -> Iterator[None]:
        """Set why blocks leave their tiers in this context, if not to make room."""
        before, self._fate = self._fate, fate
        try:
            yield
        finally:
            self._fate = before

    def _enter(self, history: History, tier: TierName, rows: Rows) -> None:
        needs_adoption = history.needs_adoption(self._keys(rows))
        if needs_adoption.any():
            self._adopt(history, rows[needs_adoption])
        history.enter(tier, self._keys(rows), rows.tolist())

    def _adopt(self, history: History, rows: Rows) -> None:
        """Tell the history the parents of blocks that it does not know, and all their tiers."""
        index = self._index
        sizes = index.payload_bytes[rows]
        for size in sorted(set(sizes.tolist())):
            alike = rows[sizes == size]
            parents = list(split_hashes(index.parent[alike].tobytes()))
            history.adopt(self._keys(alike), parents, index.position[alike], size)
        for tier in LOWER_TIERS:
            here = rows[index.residency(rows, tier) == Residency.READY]
            history.enter(tier, self._keys(here), here.tolist())

    def _moved(
        self, rows: Rows, tier: TierName, before: npt.NDArray[np.uint8], state: Residency
    ) -> None:
        assert self._history is not None
        changed = rows[(before == Residency.READY) != (state == Residency.READY)]
        if not len(changed):
            return
        if state == Residency.READY:
            self._arrivals.append((tier, changed))
            self._num_arrived += len(changed)
            if self._num_arrived >= HISTORY_BATCH_BLOCKS:
                self.tell()
            return
        self.tell()
        self._history.leave(tier, self._keys(changed), self._fate)

    def _keys(self, rows: Rows) -> list[bytes]:
        keys: Keys = self._index.keys_of(rows)
        return list(split_hashes(keys.tobytes()))
