"""The loads that workers have been ordered to make, until all of them are done."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.connectors.vllm.order import Loaded
from kvtier.connectors.vllm.search import Search
from kvtier.core.residency import TierName

__all__ = ["EndedLoad", "OpenLoads", "engine_blocks"]


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that all workers are done with."""

    first: int
    num_blocks: int
    num_filled: int
    """Of them, from the first one on."""
    seconds: float
    """With the search for them."""


@dataclass(slots=True)
class _Load:
    search: Search
    num_blocks: int
    ordered_s: float
    loaded: Loaded | None = None


class OpenLoads:
    """Each keeps what its search holds, so that the workers find it where it was."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._open: dict[str, _Load] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str, search: Search, num_blocks: int, now_s: float) -> None:
        """Note a load of the first blocks that a search holds."""
        self.forget(request_id)
        self._open[request_id] = _Load(search, num_blocks, now_s)

    def tiers(self, request_id: str) -> Sequence[TierName]:
        """Return where the blocks of a load come from."""
        load = self._open.get(request_id)
        return () if load is None else load.search.tiers[: load.num_blocks]

    def note_loaded(self, request_id: str, loaded: Loaded, now_s: float) -> EndedLoad | None:
        """Hear how a load went for some workers; returns it once it is over for all."""
        load = self._open.get(request_id)
        if load is None:
            return None  # its request was aborted
        load.loaded = loaded if load.loaded is None else load.loaded.joined(loaded)
        if load.loaded.num_workers < self._num_workers:
            return None
        self.forget(request_id)
        copy_s = max(0.0, min(load.loaded.ended_s, now_s) - load.ordered_s)
        num_filled = min(load.loaded.num_filled, load.num_blocks)
        return EndedLoad(
            load.search.first, load.num_blocks, num_filled, load.search.took_s + copy_s
        )

    def forget(self, request_id: str) -> None:
        """Let go of what is held for a load; a copy under way has a lease of its own."""
        load = self._open.pop(request_id, None)
        if load is not None:
            load.search.release()


def engine_blocks(
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
