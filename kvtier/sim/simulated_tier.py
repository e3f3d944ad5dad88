"""A simulated tier: the fake tier, with methods that damage, lose and expire its blocks."""

import random

from kvtier.core.identity import BlockHash, Selection
from kvtier.core.residency import TierName
from kvtier.testing.block import payload_of
from kvtier.tiers.base import BlockWrite, Removed, WriteOutcome
from kvtier.tiers.memory import MemoryTier

__all__ = ["SimulatedTier"]

_FAR_NS = 1 << 62


class SimulatedTier(MemoryTier):
    """Stores blocks until they are corrupted, lost or expired; rejects new ones while full."""

    def __init__(self, capacity_bytes: int, name: TierName, draw: random.Random) -> None:
        super().__init__(capacity_bytes, name=name)
        self.is_full = False
        """Reject new blocks, as a full or read-only volume does."""
        self._draw = draw

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Remove the blocks of a selection, going by their present headers."""
        is_meant = selection.mask(self._headers()["space"]).tolist()
        meant = [each for each, is_in in zip(self._blocks, is_meant, strict=True) if is_in]
        return self.remove(meant, deadline_ns)

    def rot(self) -> None:
        """Flip one bit of a block, in its header or payload."""
        if self._blocks:
            block = self._blocks[self._draw.choice(list(self._blocks))]
            block[self._draw.randrange(len(block))] ^= 1 << self._draw.randrange(8)

    def tear(self, block: BlockWrite) -> None:
        """Store only the first part of a block, with zeros for the rest."""
        size = block.header.payload_bytes
        torn = payload_of(block.header)[: self._draw.randrange(size)].ljust(size, b"\0")
        super().write([BlockWrite(block.header, memoryview(torn))], _FAR_NS)

    def lose(self) -> None:
        """Lose a few blocks silently."""
        self.remove(self._some(), _FAR_NS)

    def expire(self) -> list[BlockHash]:
        """Expire a few blocks and return their hashes."""
        old = self._some()
        self.remove(old, _FAR_NS)
        return old

    def _keep(
        self, block: BlockWrite, named: set[BlockHash], evicted: list[BlockHash]
    ) -> WriteOutcome:
        if self.is_full and block.header.block_hash not in self._blocks:
            return WriteOutcome.REJECTED
        return super()._keep(block, named, evicted)

    def _some(self) -> list[BlockHash]:
        return self._draw.sample(list(self._blocks), min(len(self._blocks), 3))
