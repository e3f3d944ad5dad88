"""The loads that workers have been ordered to make, until all of them are done."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.connectors.vllm.order import WorkerLoaded, WorkerLoadOrder
from kvtier.connectors.vllm.search import Search
from kvtier.connectors.vllm.tracked import Tracked
from kvtier.core.residency import TierName

__all__ = ["OpenLoads"]


@dataclass(slots=True)
class _Load:
    tracked: Tracked
    search: Search
    num_blocks: int
    ordered_s: float
    loaded: WorkerLoaded | None = None


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
        tracked: Tracked,
        search: Search,
        blocks: Sequence[int],
        num_external: int,
        now_s: float,
    ) -> WorkerLoadOrder:
        """Open a load of the first tokens that a search holds, into the blocks that vLLM gave."""
        end = tracked.num_local + num_external
        wanted = range(tracked.num_local // self._engine_tokens, end // self._engine_tokens)
        into = _engine_blocks(blocks, wanted, search.first, self._ratio)
        order = WorkerLoadOrder(
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

    def order_nothing(
        self, request_id: str, blocks: Sequence[int], num_local: int
    ) -> WorkerLoadOrder:
        """Return an order of which nothing comes, but into what vLLM had not filled itself."""
        fresh = blocks[num_local // self._engine_tokens :]  # those before are shared, and good
        return WorkerLoadOrder(request_id, b"", (), 0, (tuple(fresh),))

    def tiers(self, request_id: str) -> Sequence[TierName]:
        """Return where the blocks of a load come from."""
        load = self._open.get(request_id)
        return () if load is None else load.search.tiers[: load.num_blocks]

    def note_loaded(self, request_id: str, loaded: WorkerLoaded, now_s: float) -> None:
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
