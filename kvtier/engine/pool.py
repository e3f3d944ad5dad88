"""The block pool: all K and V of the engine, in one tensor allocated once.

Theory
------
The layout is block-outermost, (block, layer, K/V, token, KV head, head dim): an engine block is
contiguous, so moving it out of the GPU is one copy. Attention reads it as a matrix with one row per
(block, layer, K/V), see ``rows``.

A block is *used* while it has references (of sequences, loads and stores, one each), else *cached*
if its content has a hash, else *free*. Cached blocks are evicted least recently used first, and
leaves before parents, since a child without its parent is never found.

Rules
-----
* A block with a reference is never allocated again.
* A block gets its hash only when its content is complete and verified (``publish``).
* Only the engine's thread may call its methods, except the copies, which any thread may call for
  blocks it holds a reference to.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.identity import BlockHash

__all__ = ["BlockPool", "PoolCounts", "PoolDropped", "PoolShape"]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The dimensions of a block."""

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        row = self.block_tokens * self.num_kv_heads * self.head_dim
        return self.num_layers * 2 * row * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The number of blocks in each state; they add up to the pool."""

    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class PoolDropped:
    """What ``drop`` removed, and how many blocks stay because they are in use."""

    num_blocks: int
    num_bytes: int
    num_kept: int


class BlockPool:
    """Blocks, their references, and the prefix cache."""

    def __init__(
        self, shape: PoolShape, num_blocks: int, *, device: str = "cpu", is_poisoned: bool = False
    ) -> None:
        """Allocate and touch the memory. ``is_poisoned`` fills allocated blocks with NaN."""
        assert num_blocks > 0, "the pool must have blocks"
        self.shape = shape
        self.num_blocks = num_blocks
        dimensions = (
            num_blocks,
            shape.num_layers,
            2,
            shape.block_tokens,
            shape.num_kv_heads,
            shape.head_dim,
        )
        # Touch it now, so that a lack of memory shows at startup and not during a request.
        self.tensor = torch.empty(dimensions, dtype=shape.dtype, device=device).zero_()
        self._bytes = self.tensor.view(torch.uint8).view(num_blocks, shape.block_bytes)
        self._host_bytes: npt.NDArray[np.uint8] | None = (
            self._bytes.numpy() if self.tensor.device.type == "cpu" else None
        )
        self._is_poisoned = is_poisoned

        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks
        self._num_unreferenced_cached = 0
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._parent_of: list[BlockHash | None] = [None] * num_blocks
        self._num_children: dict[BlockHash, int] = {}
        self._is_marked = bytearray(num_blocks)
        self._last_use = [0] * num_blocks
        self._use = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (last use, block), some stale
        self.generation = 0
        """Changes with every hash added or removed, so that results of ``match`` can be cached."""

    # Counting

    @property
    def num_available(self) -> int:
        """Return how many blocks ``allocate`` could return now."""
        return len(self._free) + self._num_unreferenced_cached

    def counts(self) -> PoolCounts:
        """Return how many blocks are used, cached and free."""
        used = self.num_blocks - self.num_available
        return PoolCounts(used, self._num_unreferenced_cached, len(self._free))

    # References

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return blocks of undefined content, one reference each; all of them or None."""
        if num_blocks > self.num_available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
            self._is_marked[block] = 0
        if self._is_poisoned and blocks:
            self.tensor[blocks] = float("nan")
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which are in use or cached."""
        for block in blocks:
            if self._num_references[block] == 0:
                assert self._hash_of[block] is not None, "a free block cannot be retained"
                self._num_unreferenced_cached -= 1
            self._num_references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of ``blocks``, which are in the order of their chain."""
        for block in reversed(blocks):  # last first: the deepest is evicted first
            assert self._num_references[block] > 0, "released more often than retained"
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
                continue
            self._num_unreferenced_cached += 1
            self._use += 1
            self._last_use[block] = self._use
            self._push_if_leaf(block)

    # The prefix cache

    def match(self, hashes: Sequence[BlockHash], limit: int) -> int:
        """Return how many leading blocks, at most ``limit``, are cached. Changes nothing."""
        count = 0
        while count < min(limit, len(hashes)) and hashes[count] in self._block_of:
            count += 1
        return count

    def acquire(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of ``hashes``, all of which are cached, with a reference to each."""
        blocks = [self._block_of[block_hash] for block_hash in hashes]
        self.retain(blocks)
        return blocks

    def publish(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        """Make a complete block findable; does nothing if its hash is already known."""
        assert self._num_references[block] > 0, "only a block in use can be published"
        if block_hash in self._block_of or self._hash_of[block] is not None:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._parent_of[block] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self.generation += 1

    def mark(self, block: int) -> None:
        """Record that the content of ``block`` was offered to the tiers below."""
        self._is_marked[block] = 1

    def unmark(self, block: int) -> None:
        """Remove a mark."""
        self._is_marked[block] = 0

    def is_marked(self, block: int, block_hash: BlockHash) -> bool:
        """Return whether this content was offered, from this block or from the cached one."""
        cached = self._block_of.get(block_hash, block)
        return bool(self._is_marked[block] or self._is_marked[cached])

    def drop(self) -> PoolDropped:
        """Forget all hashes. Blocks in use stay with their users, but can no longer be found."""
        num_dropped = num_kept = 0
        for block in list(self._block_of.values()):
            self._forget(block)
            if self._num_references[block]:
                num_kept += 1
                continue
            num_dropped += 1
            self._num_unreferenced_cached -= 1
            self._free.append(block)
        self._leaves.clear()
        return PoolDropped(num_dropped, num_dropped * self.shape.block_bytes, num_kept)

    def _forget(self, block: int) -> None:
        block_hash, parent = self._hash_of[block], self._parent_of[block]
        assert block_hash is not None
        assert parent is not None
        del self._block_of[block_hash]
        self._hash_of[block] = self._parent_of[block] = None
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._block_of:
                self._push_if_leaf(self._block_of[parent])
        self.generation += 1

    def _is_evictable_leaf(self, block: int) -> bool:
        block_hash = self._hash_of[block]
        return (
            block_hash is not None
            and not self._num_references[block]
            and block_hash not in self._num_children
        )

    def _push_if_leaf(self, block: int) -> None:
        if not self._is_evictable_leaf(block):
            return
        if len(self._leaves) > 2 * self.num_blocks:  # stale entries, one per hit
            fresh = [b for b in range(self.num_blocks) if b != block and self._is_evictable_leaf(b)]
            self._leaves = [(self._last_use[b], b) for b in fresh]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (self._last_use[block], block))

    def _evict(self) -> int:
        block = self._pop_leaf()
        self._num_unreferenced_cached -= 1
        self._forget(block)
        return block

    def _pop_leaf(self) -> int:
        while self._leaves:
            use, block = heapq.heappop(self._leaves)
            if self._is_evictable_leaf(block) and self._last_use[block] == use:
                return block
        # Every unreferenced block has a child that a store or load still holds: evict the oldest.
        # Its children are not found until it is computed again.
        unreferenced = (b for b in self._block_of.values() if not self._num_references[b])
        return min(unreferenced, key=self._last_use.__getitem__)

    # Bytes

    def rows(self) -> torch.Tensor:
        """Return the pool as a matrix: row ``(block * num_layers + layer) * 2 + is_value``."""
        return self.tensor.view(self.num_blocks * self.shape.num_layers * 2, -1)

    def token_rows(self) -> torch.Tensor:
        """Return the pool as a matrix of tokens: ``block_tokens`` rows per row of ``rows``."""
        width = self.shape.num_kv_heads * self.shape.head_dim
        return self.tensor.view(-1, width)

    def block_bytes(self, block: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a block in host memory, as a writable view."""
        assert self._host_bytes is not None, "a pool on a device has no host view"
        view: npt.NDArray[np.uint8] = self._host_bytes[block]
        return view

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy a whole block into host memory; releases the GIL."""
        target = np.frombuffer(into, dtype=np.uint8)
        if self._host_bytes is not None:
            np.copyto(target, self._host_bytes[block])
        else:
            torch.from_numpy(target).copy_(self._bytes[block])

    def write_block(self, block: int, source: memoryview | bytes) -> None:
        """Copy host memory to a whole block; releases the GIL, and returns when complete."""
        content = np.frombuffer(source, dtype=np.uint8)
        if self._host_bytes is not None:
            np.copyto(self._host_bytes[block], content)
            return
        self._bytes[block].copy_(torch.tensor(content))
        torch.cuda.current_stream(self.tensor.device).synchronize()

    def check(self) -> None:
        """Check that references, hashes and lists agree; raises AssertionError if not."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        unreferenced = 0
        children: dict[BlockHash, int] = {}
        for block in range(self.num_blocks):
            block_hash, parent = self._hash_of[block], self._parent_of[block]
            is_free = block in free
            assert is_free == (not self._num_references[block] and block_hash is None)
            assert (block_hash is None) == (parent is None)
            if block_hash is None or parent is None:
                continue
            assert self._block_of[block_hash] == block, "a hash must lead to its block"
            children[parent] = children.get(parent, 0) + 1
            unreferenced += not self._num_references[block]
            if self._is_evictable_leaf(block):
                assert (self._last_use[block], block) in self._leaves, (
                    "an evictable leaf is not in the heap"
                )
        assert children == self._num_children
        assert unreferenced == self._num_unreferenced_cached
        assert len(self._block_of) == sum(h is not None for h in self._hash_of)
