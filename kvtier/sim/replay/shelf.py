"""An SSD tier without bytes: which blocks it has, and which go when it is full."""

from collections.abc import Sequence
from itertools import islice

from kvtier.core.fate import Fate
from kvtier.core.identity import BlockHash
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import History
from kvtier.node.action import TransferBlock
from kvtier.tiers.base import MissReason, WriteOutcome

__all__ = ["Shelf"]


class Shelf:
    """Keeps ``num_blocks`` blocks: those worth most where there is a history, else by age of use.

    By age, a parent is younger than its child as long as ``touch`` is told of each use.
    """

    def __init__(self, num_blocks: int, history: History | None) -> None:
        self._num_blocks = num_blocks
        self._history = history
        self._blocks: dict[BlockHash, int] = {}
        """With the size of each, oldest use first."""
        self.num_written = 0
        self.num_read = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def touch(self, chain: Sequence[BlockHash]) -> None:
        """Note one use of a chain."""
        for block in reversed(chain):
            size = self._blocks.pop(block, None)
            if size is not None:
                self._blocks[block] = size

    def read(self, blocks: Sequence[TransferBlock]) -> tuple[bytes | MissReason, ...]:
        """Return a checksum for each block that is here."""
        here = [block.header.block_hash in self._blocks for block in blocks]
        self.num_read += sum(here)
        return tuple(bytes(16) if is_here else MissReason.ABSENT for is_here in here)

    def write(self, blocks: Sequence[TransferBlock]) -> tuple[tuple[WriteOutcome, ...], bytes]:
        """Keep blocks; returns what became of each, and the hashes of those that had to go."""
        named = {block.header.block_hash for block in blocks}
        for block in blocks:
            self._blocks.pop(block.header.block_hash, None)
            self._blocks[block.header.block_hash] = block.header.payload_bytes
        self.num_written += len(blocks)
        evicted: list[BlockHash] = []
        num_over = len(self._blocks) - self._num_blocks
        if num_over > 0:
            evicted = self._victims(blocks[0].header.payload_bytes, named, num_over)
            for victim in evicted:
                del self._blocks[victim]
        return (WriteOutcome.STORED,) * len(blocks), b"".join(evicted)

    def _victims(self, size: int, named: set[BlockHash], count: int) -> list[BlockHash]:
        """Return those that have to go: the least worth, without what is being written now."""
        history = self._history
        if history is None:
            order = iter(block for block in self._blocks if block not in named)
            return [*islice(order, count)]
        found: list[BlockHash] = []
        for each in history.orders.victims(TierName.SSD, size, named.__contains__):
            found.append(BlockHash(each))
            # So that its parent may be the next; the node says it once more, which changes nothing.
            history.leave(TierName.SSD, [each], Fate.EVICTED)
            if len(found) == count:
                break
        return found
