"""Stores in flight: offers computed blocks to the tiers below.

Every full computed block is offered once while the GPU holds it; a mark on its last engine block
records that. If too many stores are open, the block is skipped; a later request that hits it offers
it again.
"""

from collections.abc import Iterator

from kvtier.engine.pool import BlockPool
from kvtier.engine.port import KVPort, StoreEnded, StoreOffer
from kvtier.engine.sequence import Sequence

__all__ = ["OPEN_STORES_MAX", "Offload"]

OPEN_STORES_MAX = 64
"""Each is one step's part of a prompt, 8 blocks of 64 tokens: enough to hide a tier's latency."""

_POOL_SHARE_MAX = 0.5
"""Largest share of the pool's blocks in open stores; the rest stays available for computing."""


class Offload:
    """Offers computed blocks, with a reference to each until the port is done with it."""

    def __init__(self, pool: BlockPool, port: KVPort) -> None:
        self._pool = pool
        self._port = port
        self._ratio = port.block_tokens // pool.shape.block_tokens
        self._open: dict[int, list[list[int]]] = {}
        self._num_held = 0
        self.num_skipped = 0
        """Number of the port's blocks that were not offered because too many were in flight."""

    @property
    def num_open(self) -> int:
        """Return the number of stores in flight."""
        return len(self._open)

    def offer(self, sequence: Sequence) -> None:
        """Offer every complete block of a sequence that was not considered yet."""
        end = sequence.num_computed // self._port.block_tokens
        most = sequence.request.max_offload_tokens
        if most is None:
            most = sequence.advised_offload_tokens
        if most is not None:
            end = min(end, most // self._port.block_tokens)
        for first, last in self._unmarked_runs(sequence, sequence.num_offered, end):
            self._store(sequence, first, last)
        sequence.num_offered = max(sequence.num_offered, end)

    def stored(self, event: StoreEnded) -> None:
        """Release a store's blocks; those that were not taken may be offered again."""
        blocks = self._open.pop(event.store_id)
        self._num_held -= len(blocks) * self._ratio
        for group in blocks[event.num_blocks :]:
            self._pool.unmark(group[-1])
        self._pool.release([block for group in blocks for block in group])

    def _unmarked_runs(self, sequence: Sequence, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the half-open runs of blocks that were not offered yet."""
        start = first
        for index in range(first, end):
            last = (index + 1) * self._ratio - 1
            if self._pool.is_marked(sequence.blocks[last], sequence.chain.hashes[last]):
                if start < index:
                    yield start, index
                start = index + 1
        if start < end:
            yield start, end

    def _store(self, sequence: Sequence, first: int, end: int) -> None:
        num_blocks = (end - first) * self._ratio
        is_full = self._num_held + num_blocks > self._pool.num_blocks * _POOL_SHARE_MAX
        if is_full or len(self._open) >= OPEN_STORES_MAX:
            self.num_skipped += end - first
            return
        blocks = [
            sequence.blocks[index * self._ratio : (index + 1) * self._ratio]
            for index in range(first, end)
        ]
        for group in blocks:
            self._pool.retain(group)
            self._pool.mark(group[-1])
        self._num_held += num_blocks
        chain = sequence.chain_below(end)
        offer = StoreOffer(sequence.traits, sequence.num_prompt // self._port.block_tokens)
        self._open[self._port.store(chain, first, blocks, offer)] = blocks
