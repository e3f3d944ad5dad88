"""How full vLLM's own cache is: what the daemon calls the GPU tier."""

from typing import Any

from kvtier.client import OwnTier
from kvtier.core.layout import KVLayout

__all__ = ["own_tier"]


def own_tier(pool: Any, layout: KVLayout, ratio: int, hit_tokens: int | None) -> OwnTier:
    """Tell of vLLM's block pool, of whose blocks ``ratio`` make one of ours. From any thread.

    Each rank has its share of the bytes; tokens are told once, without ``hit_tokens`` not at all.
    A block is used where a request has it, and where it can be found again. Which are both, nobody
    counts, so the larger number is told: short by the few that requests are still filling.
    """
    num_blocks = len(pool.blocks) - 1  # the first one stands for none, and holds nothing
    num_taken = num_blocks - pool.get_num_free_blocks()
    num_used = min(num_blocks, max(num_taken, len(pool.cached_block_hash_to_block)))
    is_first = hit_tokens is not None
    return OwnTier(
        capacity_bytes=num_blocks * layout.block_bytes // ratio,
        used_bytes=num_used * layout.block_bytes // ratio,
        used_tokens=num_used * layout.block_tokens // ratio if is_first else 0,
        hit_tokens=hit_tokens or 0,
    )
