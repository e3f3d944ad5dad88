"""What recovery makes of many blocks: how much memory, and the right ones."""

import tracemalloc
from pathlib import Path

import numpy as np

from kvtier.testing.block import make_block, make_chain
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.ssd import SsdTier
from kvtier.tiers.ssd.index import Index
from kvtier.tiers.ssd.segment import ENTRY_DTYPE


def random_entries(count: int) -> np.ndarray:
    generator = np.random.default_rng(1)
    content = generator.integers(0, 256, (count, ENTRY_DTYPE.itemsize), dtype=np.uint8)
    return content.view(ENTRY_DTYPE).reshape(-1)


def test_a_hundred_thousand_blocks_cost_at_most_sixty_bytes_each() -> None:
    entries = random_entries(100_000)
    tracemalloc.start()
    try:
        index = Index()
        for start in range(0, len(entries), 10_000):
            index.put(entries[start : start + 10_000], 1)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == 100_000
    # The table doubles: 100,000 blocks stand in 131,072 rows.
    assert held_bytes <= 60 * 131_072


def test_of_two_records_of_a_block_the_later_counts(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 4 << 20, 1 << 20)
    blocks = make_chain(range(3), 9000)
    store(tier, *blocks)
    with next(tmp_path.glob("*.segment")).open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\0" * 100)  # in the first block's payload
    assert fetch(tier, *blocks)[0] is not None
    store(tier, blocks[0])
    tier.close()
    tier = SsdTier(tmp_path, 4 << 20, 1 << 20)
    assert tier.usage().num_blocks == 3
    assert fetch(tier, *blocks) == [None] * 3
    tier.close()


def test_an_emptied_segment_is_given_back_at_the_next_start(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 4 << 20, 1 << 20)
    block = make_block(1, 9000)
    store(tier, block)
    assert tier.remove([block.header.block_hash], soon()).num_blocks == 1
    assert tier.usage().used_bytes == 0
    tier.close()
    tier = SsdTier(tmp_path, 4 << 20, 1 << 20)
    assert tier.usage().used_bytes == 0
    tier.close()
