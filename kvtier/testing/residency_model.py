"""A naive model of where blocks are, built from residency changes."""

import threading
from collections.abc import Sequence

from kvtier.core.identity import split_hashes
from kvtier.core.residency import TierName
from kvtier.core.residency_change import ResidencyChange

__all__ = ["ResidencyModel"]


class ResidencyModel:
    """The blocks in each tier, as far as reported. Called with changes, from any thread."""

    def __init__(self) -> None:
        self.num_starts = 0
        """Number of resyncs, each of which clears the model."""
        self._lock = threading.Lock()
        self._blocks: dict[TierName, set[bytes]] = {}

    def __call__(self, changes: Sequence[ResidencyChange]) -> None:
        """Apply changes in order."""
        with self._lock:
            for change in changes:
                if change.tier is None:
                    self.num_starts += 1
                    self._blocks.clear()
                    continue
                hashes = set(split_hashes(change.keys.tobytes()))
                there = self._blocks.setdefault(change.tier, set())
                self._blocks[change.tier] = there | hashes if change.is_there else there - hashes

    def blocks(self, tier: TierName) -> set[bytes]:
        """Return the hashes of the blocks that a tier has, as far as reported."""
        with self._lock:
            return set(self._blocks.get(tier, ()))
