"""Tracks which tiers hold which blocks, from the changes that one client receives."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.table import HashTable, Keys

__all__ = ["TIER_BIT", "BlockResidency"]

TIER_BIT: Mapping[TierName, int] = {tier: 1 << n for n, tier in enumerate(LOWER_TIERS)}
"""The tiers that hold a block, as bits of one number."""


class BlockResidency:
    """The tiers of each block, as bits, for many blocks at once; takes 33 bytes per block."""

    def __init__(self) -> None:
        self._table = HashTable()
        self._bits = np.zeros(self._table.capacity, np.uint8)

    def __len__(self) -> int:
        return len(self._table)

    def note(self, keys: Keys, tier: TierName, *, is_there: bool) -> None:
        """Record that a tier holds blocks from now on, or no longer; each key is given once."""
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
        """Return the tiers that hold each block, as bits."""
        rows = self._table.find(keys)
        bits: npt.NDArray[np.uint8] = np.where(rows >= 0, self._bits[rows], np.uint8(0))
        return bits

    def clear(self) -> None:
        """Drop all blocks."""
        self._table = HashTable()
        self._bits = np.zeros(self._table.capacity, np.uint8)
