"""Loads and stores that workers are carrying out, until all workers have ended them.

vLLM blocks that are being stored have an additional reference, so that they are not reused during
the copy, whatever happens to their request.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtier.connectors.vllm.jobs import LoadJob, LoadResult, StoreJob
from kvtier.connectors.vllm.request import PrefixLookup, TrackedRequest
from kvtier.core.residency import TierName

__all__ = ["OpenLoads", "OpenStores"]


@dataclass(slots=True)
class _Load:
    tracked: TrackedRequest
    lookup: PrefixLookup
    num_blocks: int
    ordered_s: float
    loaded: LoadResult | None = None


class OpenLoads:
    """The running loads; each holds the blocks of its lookup, so that the workers find them."""

    def __init__(self, num_workers: int, block_tokens: int, ratio: int) -> None:
        """``ratio`` vLLM blocks make one kvtier block of ``block_tokens``."""
        self._num_workers = num_workers
        self._engine_tokens = block_tokens // ratio
        self._ratio = ratio
        self._open: dict[str, _Load] = {}

    def __len__(self) -> int:
        return len(self._open)

    def order(
        self,
        tracked: TrackedRequest,
        lookup: PrefixLookup,
        blocks: Sequence[int],
        num_external: int,
        now_s: float,
    ) -> LoadJob:
        """Open a load of the leading tokens that a lookup holds, into vLLM's ``blocks``."""
        end = tracked.num_local + num_external
        wanted = range(tracked.num_local // self._engine_tokens, end // self._engine_tokens)
        into = _engine_blocks(blocks, wanted, lookup.first, self._ratio)
        order = LoadJob(
            tracked.request_id,
            tracked.tenant,
            tracked.chains.first(lookup.first + len(into)),
            lookup.first,
            into,
            tuple(lookup.decisions),
            lookup.good_until_s,
            tracked.traceparent,
        )
        self.forget(tracked.request_id)
        self._open[tracked.request_id] = _Load(tracked, lookup, len(into), now_s)
        tracked.num_offered = max(tracked.num_offered, lookup.first + len(into))
        return order

    def order_nothing(self, request_id: str, blocks: Sequence[int], num_local: int) -> LoadJob:
        """Return a job that loads nothing, for the blocks that vLLM had not filled itself."""
        fresh = blocks[num_local // self._engine_tokens :]  # those before are shared and valid
        return LoadJob(request_id, b"", (), 0, (tuple(fresh),))

    def tiers(self, request_id: str) -> Sequence[TierName]:
        """Return the tier of each block of a load."""
        load = self._open.get(request_id)
        return () if load is None else load.lookup.tiers[: load.num_blocks]

    def note_loaded(self, request_id: str, loaded: LoadResult, now_s: float) -> None:
        """Add the result of some workers; applied to the request once all have ended."""
        load = self._open.get(request_id)
        if load is None:
            return  # its request was aborted
        load.loaded = loaded if load.loaded is None else load.loaded.joined(loaded)
        if load.loaded.num_workers < self._num_workers:
            return
        self.forget(request_id)
        tracked, lookup = load.tracked, load.lookup
        num_filled = min(load.loaded.num_filled, load.num_blocks)
        copy_s = max(0.0, min(load.loaded.ended_s, now_s) - load.ordered_s)
        tracked.times.num_restored = num_filled
        tracked.times.restore_s = lookup.took_s + copy_s
        if num_filled < load.num_blocks:  # the request computes these, and may store them
            tracked.num_offered = min(tracked.num_offered, lookup.first + num_filled)

    def forget(self, request_id: str) -> None:
        """Release the blocks held for a load; a running copy has a lease of its own."""
        load = self._open.pop(request_id, None)
        if load is not None:
            load.lookup.release()


def _engine_blocks(
    blocks: Sequence[int], wanted: range, first: int, ratio: int
) -> tuple[tuple[int, ...], ...]:
    """Return, for each kvtier block from ``first`` on, the ``ratio`` vLLM blocks it is loaded into.

    Places that are not ``wanted``, because vLLM has their tokens or no room for them, are -1.
    """
    end = -(-wanted.stop // ratio)
    return tuple(
        tuple(
            blocks[place] if place in wanted else -1
            for place in range(index * ratio, (index + 1) * ratio)
        )
        for index in range(first, end)
    )


_STORES_MAX = 64
_POOL_SHARE_MAX = 0.25
"""Share of vLLM's blocks that stores may reference; the others stay for computing."""

_SOON_S = 0.25
"""An older store will not end within a step or two, and vLLM should not wait for it."""


@dataclass(frozen=True, slots=True)
class _Store:
    blocks: Sequence[int]
    began_s: float


class OpenStores:
    """The running stores; blocks are freed only when all workers have ended their store."""

    def __init__(self, num_workers: int, block_tokens: int, ratio: int) -> None:
        """``ratio`` vLLM blocks make one kvtier block of ``block_tokens``."""
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
        """Set vLLM's block pool."""
        self._pool = pool

    def order(self, tracked: TrackedRequest, num_computed: int, now_s: float) -> StoreJob | None:
        """Open a store of a request's computed blocks that were not offered, if there is room."""
        end = min(num_computed // self._block_tokens, len(tracked.chains))
        if tracked.offload_tokens is not None:
            end = min(end, tracked.offload_tokens // self._block_tokens)
        first, ratio = tracked.num_offered, self._ratio
        if end <= first:  # true in nearly all steps
            return None
        end = min(end, first + self._room() // ratio)  # the rest in a later step
        flat = tracked.blocks[first * ratio : end * ratio]
        if end <= first or tracked.is_stale or len(flat) < (end - first) * ratio:
            return None
        blocks = tuple(tuple(flat[at : at + ratio]) for at in range(0, len(flat), ratio))
        chains = tracked.chains.first(end)
        order = StoreJob(
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
        """Open a store that references ``blocks``; returns its number."""
        self._pool.touch(self._of_pool(blocks))
        number = next(self._numbers)
        self._open[number] = _Store(blocks, now_s)
        return number

    def note_done(self, stored: Mapping[int, int]) -> None:
        """Add how many more workers have ended each store; free the blocks of complete ones."""
        self._done.update({number: num for number, num in stored.items() if number in self._open})
        for number in [each for each, num in self._done.items() if num >= self._num_workers]:
            del self._done[number]
            store = self._open.pop(number)
            # In reverse, as vLLM does: it evicts blocks in the order in which they were freed.
            self._pool.free_blocks(self._of_pool(store.blocks[::-1]))

    def frees_soon(self, now_s: float) -> bool:
        """Return whether the end of a recent store will free a block."""
        return any(
            self._pool.blocks[block].ref_cnt == 1
            for store in self._open.values()
            if now_s < store.began_s + _SOON_S
            for block in store.blocks
        )

    def _room(self) -> int:
        """Return how many blocks another store may reference."""
        if self._pool is None or len(self._open) >= _STORES_MAX:
            return 0
        num_held = sum(len(store.blocks) for store in self._open.values())
        return max(0, int(len(self._pool.blocks) * _POOL_SHARE_MAX) - num_held)

    def _of_pool(self, blocks: Sequence[int]) -> list[Any]:
        return [self._pool.blocks[block] for block in blocks]
