"""The loads that workers have been ordered to make, until all of them are done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtier.connectors.vllm.jobs import LoadJob, LoadResult, StoreJob
from kvtier.connectors.vllm.prefix_lookup import PrefixLookup
from kvtier.connectors.vllm.request import TrackedRequest
from kvtier.core.residency import TierName

__all__ = ["OpenLoads", "OpenStores"]


@dataclass(slots=True)
class _Load:
    tracked: TrackedRequest
    search: PrefixLookup
    num_blocks: int
    ordered_s: float
    loaded: LoadResult | None = None


class OpenLoads:
    """Each keeps what its search holds, so that the workers find it where it was."""

    def __init__(self, num_workers: int, block_tokens: int, ratio: int) -> None:
        """``ratio`` of vLLM's blocks make one of ours, of ``block_tokens``."""
        self._num_workers = num_workers
        self._engine_tokens = block_tokens // ratio
        self._ratio = ratio
        self._open: dict[str, _Load] = {}

    def __len__(self) -> int:
        return len(self._open)

    def order(
        self,
        tracked: TrackedRequest,
        search: PrefixLookup,
        blocks: Sequence[int],
        num_external: int,
        now_s: float,
    ) -> LoadJob:
        """Open a load of the first tokens that a search holds, into the blocks that vLLM gave."""
        end = tracked.num_local + num_external
        wanted = range(tracked.num_local // self._engine_tokens, end // self._engine_tokens)
        into = _engine_blocks(blocks, wanted, search.first, self._ratio)
        order = LoadJob(
            tracked.request_id,
            tracked.tenant,
            tracked.chains.first(search.first + len(into)),
            search.first,
            into,
            tuple(search.decisions),
            search.good_until_s,
            tracked.traceparent,
        )
        self.forget(tracked.request_id)
        self._open[tracked.request_id] = _Load(tracked, search, len(into), now_s)
        tracked.num_offered = max(tracked.num_offered, search.first + len(into))
        return order

    def order_nothing(self, request_id: str, blocks: Sequence[int], num_local: int) -> LoadJob:
        """Return an order of which nothing comes, but into what vLLM had not filled itself."""
        fresh = blocks[num_local // self._engine_tokens :]  # those before are shared, and good
        return LoadJob(request_id, b"", (), 0, (tuple(fresh),))

    def tiers(self, request_id: str) -> Sequence[TierName]:
        """Return where the blocks of a load come from."""
        load = self._open.get(request_id)
        return () if load is None else load.search.tiers[: load.num_blocks]

    def note_loaded(self, request_id: str, loaded: LoadResult, now_s: float) -> None:
        """Hear how a load went for some workers; its request is told once it is over for all."""
        load = self._open.get(request_id)
        if load is None:
            return  # its request was aborted
        load.loaded = loaded if load.loaded is None else load.loaded.joined(loaded)
        if load.loaded.num_workers < self._num_workers:
            return
        self.forget(request_id)
        tracked, search = load.tracked, load.search
        num_filled = min(load.loaded.num_filled, load.num_blocks)
        copy_s = max(0.0, min(load.loaded.ended_s, now_s) - load.ordered_s)
        tracked.account.num_restored = num_filled
        tracked.account.restore_s = search.took_s + copy_s
        if num_filled < load.num_blocks:  # these it computes, and may offer
            tracked.num_offered = min(tracked.num_offered, search.first + num_filled)

    def forget(self, request_id: str) -> None:
        """Let go of what is held for a load; a copy under way has a lease of its own."""
        load = self._open.pop(request_id, None)
        if load is not None:
            load.search.release()


def _engine_blocks(
    blocks: Sequence[int], wanted: range, first: int, ratio: int
) -> tuple[tuple[int, ...], ...]:
    """Return for each of our blocks from ``first`` on the ``ratio`` blocks of vLLM it goes into.

    Where a place is not ``wanted``, because vLLM has its tokens or has no room for them, is -1.
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

    def order(self, tracked: TrackedRequest, num_computed: int, now_s: float) -> StoreJob | None:
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
