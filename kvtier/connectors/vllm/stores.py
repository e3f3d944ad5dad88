"""vLLM's blocks under stores: each has a reference of ours until all workers are done with it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

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

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: Any = None
        self._open: dict[int, _Store] = {}
        self._done: Counter[int] = Counter()
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._open)

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool

    def room(self) -> int:
        """Return how many blocks one store more may keep."""
        if self._pool is None or len(self._open) >= _STORES_MAX:
            return 0
        num_held = sum(len(store.blocks) for store in self._open.values())
        return max(0, int(len(self._pool.blocks) * _POOL_SHARE_MAX) - num_held)

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

    def _of_pool(self, blocks: Sequence[int]) -> list[Any]:
        return [self._pool.blocks[block] for block in blocks]
