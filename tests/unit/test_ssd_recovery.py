"""What recovery makes of many blocks: how much memory, and the right ones."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvtier.testing.block import make_block, make_chain
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.ssd.index import SegmentIndex
from kvtier.tiers.ssd.segment import ENTRY_DTYPE
from kvtier.tiers.ssd.store import SsdTier


def random_entries(count: int, seed: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    content = generator.integers(0, 256, (count, ENTRY_DTYPE.itemsize), dtype=np.uint8)
    return content.view(ENTRY_DTYPE).reshape(-1)


def grown_bytes() -> int:
    """Return what a quarter million blocks take, in pages that are resident.

    Rows are reserved at once, and paid for when they are written.
    """
    process = psutil.Process()
    index = SegmentIndex()
    index.put(random_entries(1000), 1)
    before_bytes = process.memory_info().rss
    for number in range(25):
        index.put(random_entries(10_000, seed=number + 2), 1)
    assert len(index) == 251_000
    return process.memory_info().rss - before_bytes


@pytest.mark.slow
def test_a_quarter_million_blocks_cost_at_most_sixty_bytes_each() -> None:
    """In a process where nothing else takes memory, and what is freed goes back at once."""
    code = "from tests.unit.test_ssd_recovery import grown_bytes; print(grown_bytes())"
    plain = {"MALLOC_MMAP_THRESHOLD_": "65536", "NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | plain,
        check=True,
        capture_output=True,
        timeout=60,
    )
    # Two huge pages for each large array, where the kernel gives them unasked.
    assert int(done.stdout) <= 60 * 250_000 + (8 << 20)


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
