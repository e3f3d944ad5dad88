"""What has to be known before the scheduler half can begin: what blocks are, and which weights'.

Until then vLLM serves on without us; what can never be known is said once, in one line.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.connectors.kit.adapters import AdapterFingerprints
from kvtier.connectors.kit.weights import FileDigests, WeightsFingerprint, began_ns, record_path
from kvtier.connectors.vllm.jobs import RankReport
from kvtier.core.identity import KeySpace
from kvtier.observe.log import Log

__all__ = ["KeySpaceResolver"]

_log = Log("kvtier.vllm")

_WAIT_S = 5.0
"""vLLM's start takes longer; weights whose digests are on record are known at once."""


class KeySpaceResolver:
    """Made where the scheduler half will be; ``close`` ends what it has begun."""

    def __init__(self, find_model: Callable[[], Path], refusal: str) -> None:
        """Begin to find out which weights ``find_model`` leads to, where nothing is refused."""
        since_ns = began_ns()
        self._digests = FileDigests(record_path())
        self._fingerprint = WeightsFingerprint(find_model, since_ns, self._digests)
        self._ranks: Sequence[RankReport] = ()
        self._is_over = False
        self.adapters = AdapterFingerprints(self._digests, since_ns)
        if refusal:
            self._refuse(refusal)
        else:
            self._fingerprint.start()

    @property
    def weights(self) -> bytes:
        """Return what stands for the weights; empty while it is not known."""
        return self._fingerprint.weights

    def tell(self, ranks: Sequence[RankReport]) -> None:
        """Take what the blocks of each rank are, in their order."""
        self._ranks = ranks
        if not self._is_over:
            self._fingerprint.wait(_WAIT_S)

    def take_spaces(self) -> list[KeySpace]:
        """Take the key space of each rank; nothing while it is not known, and but once."""
        if self._is_over or not self._ranks or not self._fingerprint.wait(0):
            return []
        self._is_over = True
        if reason := _refusal(self._ranks) or self._fingerprint.refusal:
            self._refuse(reason)
            return []
        return [rank.blocks.space(self.weights) for rank in self._ranks if rank.blocks]

    @property
    def num_engine_blocks(self) -> int:
        """Return how many of vLLM's blocks make one of ours, once there are key spaces."""
        return next(rank.blocks.num_engine_blocks for rank in self._ranks if rank.blocks)

    def close(self) -> None:
        """End what is being read."""
        self._digests.end()
        self.adapters.close()

    def _refuse(self, reason: str) -> None:
        self._is_over = True
        _log.error("vLLM's blocks are not cached", reason=reason)


def _refusal(ranks: Sequence[RankReport]) -> str:
    """Return why the ranks' blocks cannot be kept, or not together; empty where they can."""
    if reasons := {rank.refusal for rank in ranks if rank.blocks is None}:
        return "; ".join(sorted(reasons))
    blocks = [rank.blocks for rank in ranks if rank.blocks]
    places = [(each.parallel_rank, each.parallel_size) for each in blocks]
    if places != [(rank, places[0][1]) for rank in range(places[0][1])]:
        told = ", ".join(f"{rank} of {size}" for rank, size in places)
        return f"not every rank has told of its blocks, in order, but {told}"
    sizes = {(each.layout.block_tokens, each.num_engine_blocks) for each in blocks}
    if len(sizes) > 1:
        told = " and ".join(f"{tokens} in {ratio}" for tokens, ratio in sorted(sizes))
        return f"ranks have blocks of different size: tokens {told} of vLLM's"
    return ""
