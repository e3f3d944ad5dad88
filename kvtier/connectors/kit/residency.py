"""Which tiers have which blocks, as far as one client was told: 33 bytes a block."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.table import HashTable, Keys

__all__ = ["TIER_BIT", "BlockResidency"]

TIER_BIT: Mapping[TierName, int] = {tier: 1 << n for n, tier in enumerate(LOWER_TIERS)}
"""Which tiers have a block is one number."""


class BlockResidency:
    """Takes changes in and answers for many blocks at once. There is nothing it must be told."""

    def __init__(self) -> None:
        self._table = HashTable()
        self._bits = np.zeros(self._table.capacity, np.uint8)

    def __len__(self) -> int:
        return len(self._table)

    def note(self, keys: Keys, tier: TierName, *, is_there: bool) -> None:
        """Note that a tier has blocks, each given once, from now on, or has them no more."""
        bit = np.uint8(TIER_BIT[tier])
        rows = self._table.find(keys)
        if is_there:
            is_new = rows < 0
            rows[is_new] = self._table.add(keys[is_new])
            grown = self._table.capacity - len(self._bits)
            if grown:
                self._bits = np.concatenate([self._bits, np.zeros(grown, np.uint8)])
            self._bits[rows] |= bit
            return
        rows = rows[rows >= 0]
        self._bits[rows] &= ~bit
        self._table.remove(self._table.keys[rows[self._bits[rows] == 0]])

    def bits(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """Return which tiers have each block."""
        rows = self._table.find(keys)
        bits: npt.NDArray[np.uint8] = np.where(rows >= 0, self._bits[rows], np.uint8(0))
        return bits

    def clear(self) -> None:
        """Forget all blocks."""
        self._table = HashTable()
        self._bits = np.zeros(self._table.capacity, np.uint8)
