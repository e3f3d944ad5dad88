"""The stores that workers have been ordered to make, until all of them are done.

vLLM's blocks under a store have a reference of ours, so that they are not used again below the
copy, whatever becomes of their request.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtier.connectors.vllm.order import WorkerStoreOrder
from kvtier.connectors.vllm.tracked import Tracked

__all__ = ["OpenStores"]

_STORES_MAX = 64
_POOL_SHARE_MAX = 0.25
"""Of vLLM's blocks: the others stay for computing."""

_SOON_S = 0.25
"""A store that is older does not end within a step or two, and vLLM is not to wait for it."""


@dataclass(frozen=True, slots=True)
class _Store:
    blocks: Sequence[int]
    began_s: float


class OpenStores:
    """Nothing is let go of before its workers say so: they read it until then."""

    def __init__(self, num_workers: int, block_tokens: int, ratio: int) -> None:
        """``ratio`` of vLLM's blocks make one of ours, of ``block_tokens``."""
        self._num_workers = num_workers
        self._block_tokens = block_tokens
        self._ratio = ratio
        self._pool: Any = None
        self._open: dict[int, _Store] = {}
        self._done: Counter[int] = Counter()
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._open)

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool

    def order(self, tracked: Tracked, num_computed: int, now_s: float) -> WorkerStoreOrder | None:
        """Open a store of what a request has computed and not offered, as far as there is room."""
        end = min(num_computed // self._block_tokens, len(tracked.chains))
        if tracked.offload_tokens is not None:
            end = min(end, tracked.offload_tokens // self._block_tokens)
        first, ratio = tracked.num_offered, self._ratio
        if end <= first:  # as in nearly all steps
            return None
        end = min(end, first + self._room() // ratio)  # the others with a later step
        flat = tracked.blocks[first * ratio : end * ratio]
        if end <= first or tracked.is_old or len(flat) < (end - first) * ratio:
            return None
        blocks = tuple(tuple(flat[at : at + ratio]) for at in range(0, len(flat), ratio))
        chains = tracked.chains.first(end)
        order = WorkerStoreOrder(
            self.open(flat, now_s),
            tracked.tenant,
            chains,
            first,
            blocks,
            tracked.traits,
            tracked.request.num_prompt_tokens // self._block_tokens,
            tracked.traceparent,
        )
        tracked.num_offered = end
        return order

    def open(self, blocks: Sequence[int], now_s: float) -> int:
        """Keep blocks under a new store, and return its number."""
        self._pool.touch(self._of_pool(blocks))
        number = next(self._numbers)
        self._open[number] = _Store(blocks, now_s)
        return number

    def note_done(self, stored: Mapping[int, int]) -> None:
        """Hear by store how many workers more are done; of those that all are, let go."""
        self._done.update({number: num for number, num in stored.items() if number in self._open})
        for number in [each for each, num in self._done.items() if num >= self._num_workers]:
            del self._done[number]
            store = self._open.pop(number)
            # From the back, as vLLM does: it evicts in the order in which blocks become free.
            self._pool.free_blocks(self._of_pool(store.blocks[::-1]))

    def frees_soon(self, now_s: float) -> bool:
        """Tell whether the end of a young store will make a block free."""
        return any(
            self._pool.blocks[block].ref_cnt == 1
            for store in self._open.values()
            if now_s < store.began_s + _SOON_S
            for block in store.blocks
        )

    def _room(self) -> int:
        """Return how many blocks one store more may keep."""
        if self._pool is None or len(self._open) >= _STORES_MAX:
            return 0
        num_held = sum(len(store.blocks) for store in self._open.values())
        return max(0, int(len(self._pool.blocks) * _POOL_SHARE_MAX) - num_held)

    def _of_pool(self, blocks: Sequence[int]) -> list[Any]:
        return [self._pool.blocks[block] for block in blocks]
