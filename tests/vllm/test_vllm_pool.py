"""What the daemon is told of vLLM's own cache."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.client import OwnTier
from kvtier.connectors.vllm.engine_state import own_tier
from kvtier.core.layout import KVLayout

LAYOUT = KVLayout("vllm-lbhnc", 1, 64, 4096, "float32", "small")
RATIO = 4
NUM_BLOCKS = 41
"""Of vLLM's, with the one that holds nothing: ten of ours."""


def pool(num_free: int, num_cached: int) -> Any:
    return SimpleNamespace(
        blocks=[None] * NUM_BLOCKS,
        get_num_free_blocks=lambda: num_free,
        cached_block_hash_to_block=[None] * num_cached,
    )


@pytest.mark.parametrize(
    ("num_free", "num_cached", "num_used"),
    [(40, 0, 0), (28, 0, 12), (28, 8, 12), (40, 20, 20), (0, 40, 40), (0, 60, 40)],
    ids=["empty", "filling", "some cached", "idle", "full", "known twice"],
)
def test_a_block_is_used_where_a_request_has_it_or_may_find_it(
    num_free: int, num_cached: int, num_used: int
) -> None:
    told = own_tier(pool(num_free, num_cached), LAYOUT, RATIO, hit_tokens=320)
    assert told == OwnTier(40 * 1024, num_used * 1024, num_used * 16, 320)


def test_of_ranks_each_has_its_bytes_and_one_the_tokens() -> None:
    ranks = [own_tier(pool(20, 20), LAYOUT, RATIO, hit_tokens=hits) for hits in (0, None)]
    assert [rank.used_bytes for rank in ranks] == [20 * 1024] * 2
    assert [rank.used_tokens for rank in ranks] == [20 * 16, 0]
    assert not any(rank.hit_tokens for rank in ranks)
