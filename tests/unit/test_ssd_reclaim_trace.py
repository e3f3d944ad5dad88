"""Which order of a real store serves more where some come back and most do not."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.core.fate import Fate
from kvtier.core.identity import BlockHash
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import History, Use
from kvtier.testing.block import make_chain
from kvtier.testing.tier_contract import fetch, soon
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.store import SsdTier

SECOND_NS = 10**9
SEGMENT_BYTES = 128 << 10
NUM_SEGMENTS = 12
"""Of fifteen small blocks each."""

ValuePerByte = Callable[[Sequence[BlockHash]], Sequence[float]]


def traffic(seed: int) -> Iterator[tuple[float, Sequence[BlockWrite]]]:
    """Yield when which chain is asked for: of users, who come back, and of passers-by."""
    draw = random.Random(seed)
    users = [make_chain(range(10 * user, 10 * user + 6), 100) for user in range(15)]
    now_s, stranger = 0.0, 100_000
    for _ in range(700):
        now_s += draw.expovariate(1.0)
        if draw.random() < 0.3:
            yield now_s, draw.choice(users)
        else:
            stranger += 10
            yield now_s, make_chain(range(stranger, stranger + 6), 100)


def hit_blocks(directory: Path, history: History, worth: ValuePerByte | None, seed: int) -> int:
    """Return how many leading blocks a store had when they were asked for, while it was full."""
    now_s = [0.0]
    options = SsdOptions(value_per_byte=worth, now_s=lambda: int(now_s[0]))
    capacity_bytes = NUM_SEGMENTS * SEGMENT_BYTES + METADATA_BYTES
    tier, num_hits = SsdTier(directory, capacity_bytes, SEGMENT_BYTES, options), 0
    for count, (at_s, chain) in enumerate(traffic(seed)):
        now_s[0] = at_s
        hashes = [block.header.block_hash for block in chain]
        now_ns = int(at_s * SECOND_NS) + SECOND_NS
        history.advance(now_ns)
        history.touch(Use(hashes, 100, 64), now_ns)
        there = [*tier.contains(hashes, soon()), False].index(False)
        assert fetch(tier, *chain[:there]) == [None] * there
        num_hits += there if count >= 250 else 0
        report = tier.write(chain, soon())
        history.enter(TierName.SSD, hashes)
        history.leave(TierName.SSD, report.evicted, Fate.EVICTED)
    moved, offered = (
        int(tier.usage().detail[f"written_{what}_bytes"]) for what in ("moved", "blocks")
    )
    print(f"hits {num_hits}, amplification {(moved + offered) / offered:.3f}")
    tier.close()
    return num_hits


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_worth_serves_more_than_counts_of_reads(tmp_path: Path, seed: int) -> None:
    began_s = time.monotonic()
    by_reads = hit_blocks(tmp_path / "reads", History(), None, seed)
    history = History()
    by_worth = hit_blocks(tmp_path / "worth", history, history.queues.scores, seed)
    print(f"seed {seed}: {by_reads} by reads, {by_worth} by worth")
    print(f"{time.monotonic() - began_s:.1f} s")
    assert by_worth >= 1.05 * by_reads
