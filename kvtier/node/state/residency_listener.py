"""Reports to the history which blocks entered or left a tier, and why they left.

Listens to the index, through which all moves of blocks go. Arrivals are reported in batches: a
store publishes block by block, and a call costs as much for one block as for fifty. Departures are
reported at once, after all earlier arrivals. Blocks found on a disk at the start are reported when
they are requested: there may be millions, and most are never requested again.

A block that the history does not know is adopted with its parent from the index. So both agree
however a block came to a tier: by a store, a prefetch, another node, or an attached disk.
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
from kvtier.core.table import Rows, as_keys

__all__ = ["ResidencyListener"]


class ResidencyListener:
    """Listens to an index on behalf of a history, if there is one."""

    def __init__(self, index: BlockIndex, history: History | None) -> None:
        self._index = index
        self._history = history
        self._arrivals: list[tuple[TierName, Rows]] = []
        """Tiers and the rows that became ready there, in order of arrival; not reported yet."""
        self._num_arrived = 0
        """Number of rows in ``_arrivals``."""
        self._fate = Fate.EVICTED
        """The reason given for blocks that leave a tier now."""
        if history is not None:
            index.add_listener(self._moved)

    def report_arrivals(self) -> None:
        """Report all arrivals so far to the history."""
        if self._history is None or not self._arrivals:
            return
        arrivals, self._arrivals, self._num_arrived = self._arrivals, [], 0
        for tier in LOWER_TIERS:
            came = [rows for each, rows in arrivals if each is tier]
            if came:
                self._enter(self._history, tier, np.concatenate(came))

    def num_restored(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain some tier has.

        Returns 0 if every tier was empty when opened: the history then knows all blocks.
        """
        if not self._index.num_restored:
            return 0
        rows = self._index.find(as_keys(b"".join(keys)))
        is_there = (self._index.facts(rows)["state"] == Residency.READY).any(axis=1) & (rows >= 0)
        return len(rows) if is_there.all() else int(is_there.argmin())

    def report_restored(self, rows: Rows, tier: TierName) -> None:
        """Report blocks found in a tier that the history remembers."""
        if self._history is not None and self._history.num_remembered:
            needs_adoption = self._history.needs_adoption(self._index.hashes_of(rows))
            self._enter(self._history, tier, rows[~needs_adoption])

    def report_found(self, keys: Sequence[bytes]) -> None:
        """Report the tiers of the blocks of a new request.

        Needed only for blocks found at the start; others are reported on arrival.
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
        """Set why blocks leave their tiers in this context; otherwise they are evicted."""
        before, self._fate = self._fate, fate
        try:
            yield
        finally:
            self._fate = before

    def _enter(self, history: History, tier: TierName, rows: Rows) -> None:
        needs_adoption = history.needs_adoption(self._index.hashes_of(rows))
        if needs_adoption.any():
            self._adopt(history, rows[needs_adoption])
        history.enter(tier, self._index.hashes_of(rows), rows.tolist())

    def _adopt(self, history: History, rows: Rows) -> None:
        """Add blocks unknown to the history, with their parents and all their tiers."""
        index = self._index
        sizes = index.payload_bytes[rows]
        for size in sorted(set(sizes.tolist())):
            alike = rows[sizes == size]
            parents = split_hashes(index.parent[alike].tobytes())
            history.adopt(self._index.hashes_of(alike), parents, index.position[alike], size)
        for tier in LOWER_TIERS:
            here = rows[index.residency(rows, tier) == Residency.READY]
            history.enter(tier, self._index.hashes_of(here), here.tolist())

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
                self.report_arrivals()
            return
        self.report_arrivals()
        self._history.leave(tier, self._index.hashes_of(changed), self._fate)
