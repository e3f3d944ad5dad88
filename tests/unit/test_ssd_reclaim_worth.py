"""What is kept when space is needed and a store is told what its blocks are worth."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.identity import PACKED_HEADER, BlockHash, unpack_headers
from kvtier.testing.block import make_block, make_chain
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.ssd.index import SegmentIndex
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.segment import ENTRY_DTYPE
from kvtier.tiers.ssd.store import SsdTier
from kvtier.tiers.ssd.victim import MOVED_SHARE, ValueOrder

SEGMENT_BYTES = 1 << 20
CAPACITY_BYTES = 6 * SEGMENT_BYTES + METADATA_BYTES
BLOCK_BYTES = 16_000
PER_SEGMENT = 50

Opened = Callable[..., SsdTier]


class Appraiser:
    """Knows what a byte of some blocks is worth; of the others it is ``usual``."""

    def __init__(self, usual: float = 1.0) -> None:
        self.usual = usual
        self.worth: dict[BlockHash, float] = {}
        self.num_asked = 0

    def set(self, blocks: Sequence[BlockWrite], worth: float) -> None:
        self.worth.update((block.header.block_hash, worth) for block in blocks)

    def __call__(self, hashes: Sequence[BlockHash]) -> list[float]:
        self.num_asked += len(hashes)
        return [self.worth.get(each, self.usual) for each in hashes]


def blocks_of(numbers: range) -> list[BlockWrite]:
    return [make_block(number, BLOCK_BYTES) for number in numbers]


@pytest.fixture
def opened(tmp_path: Path):
    tiers: list[SsdTier] = []

    def open_tier(worth: Appraiser, **options: object) -> SsdTier:
        told = replace(SsdOptions(value_per_byte=worth), **options)
        tiers.append(SsdTier(tmp_path / "ssd", CAPACITY_BYTES, SEGMENT_BYTES, told))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def present(tier: SsdTier, blocks: Sequence[BlockWrite]) -> list[bool]:
    return tier.contains([block.header.block_hash for block in blocks], soon())


def scan(tier: SsdTier, num_blocks: int, start: int = 1000) -> None:
    for block in blocks_of(range(start, start + num_blocks)):
        tier.write([block], soon())


def written(tier: SsdTier, what: str) -> int:
    return int(tier.usage().detail[f"written_{what}_bytes"])


@pytest.mark.slow
def test_what_is_worth_much_survives_a_scan_though_nobody_reads_it(opened: Opened) -> None:
    worth = Appraiser()
    tier = opened(worth)
    hot = blocks_of(range(12))
    worth.set(hot, 100.0)
    store(tier, *hot)
    scan(tier, 4 * 6 * PER_SEGMENT)
    assert fetch(tier, *hot) == [None] * 12
    moved, offered = written(tier, "moved"), written(tier, "blocks")
    assert 0 < moved / offered <= MOVED_SHARE / (1 - MOVED_SHARE)


@pytest.mark.slow
def test_where_nothing_stands_out_the_oldest_goes_and_nothing_is_moved(opened: Opened) -> None:
    tier = opened(Appraiser())
    blocks = blocks_of(range(10 * PER_SEGMENT))
    evicted: list[BlockHash] = []
    for block in blocks:
        evicted += tier.write([block], soon()).evicted
    assert evicted
    assert set(evicted) == {block.header.block_hash for block in blocks[: len(evicted)]}
    assert written(tier, "moved") == 0


def test_the_segment_that_is_worth_least_goes_whatever_its_age(opened: Opened) -> None:
    worth = Appraiser()
    tier = opened(worth)
    parts = [blocks_of(range(100 * number, 100 * number + PER_SEGMENT)) for number in range(6)]
    for number, part in enumerate(parts):
        worth.set(part, 2.0 if number != 3 else 1.0)
        store(tier, *part)
    scan(tier, 1)
    scan(tier, PER_SEGMENT, start=2000)
    assert [any(present(tier, part)) for part in parts] == [True] * 3 + [False] + [True] * 2


def test_a_segment_of_which_part_is_gone_is_worth_less(opened: Opened) -> None:
    tier = opened(Appraiser())
    parts = [blocks_of(range(100 * number, 100 * number + PER_SEGMENT)) for number in range(6)]
    for part in parts:
        store(tier, *part)
    tier.remove([block.header.block_hash for block in parts[2][:20]], soon())
    scan(tier, PER_SEGMENT, start=2000)
    assert [any(present(tier, part)) for part in parts] == [True] * 2 + [False] + [True] * 3


@pytest.mark.slow
def test_a_parent_is_kept_with_its_child_and_the_front_of_a_chain_first(opened: Opened) -> None:
    worth = Appraiser()
    tier = opened(worth)
    chain = make_chain(range(PER_SEGMENT), BLOCK_BYTES)
    worth.set(chain[20:], 100.0)
    store(tier, *chain)
    for part in range(5):
        others = blocks_of(range(1000 + 100 * part, 1000 + 100 * part + PER_SEGMENT))
        worth.set(others, 100.0)
        store(tier, *others)
    worth.usual = 0.1
    worth.worth.clear()
    worth.set(chain[5:6], 50.0)
    scan(tier, 6 * PER_SEGMENT, start=5000)
    assert present(tier, chain) == [True] * 6 + [False] * (PER_SEGMENT - 6)
    assert fetch(tier, *chain[:6]) == [None] * 6


@pytest.mark.slow
def test_of_equals_the_front_of_a_chain_is_moved_though_it_was_written_last(opened: Opened) -> None:
    worth = Appraiser(0.1)
    tier = opened(worth)
    chain = make_chain(range(PER_SEGMENT), BLOCK_BYTES)
    worth.set(chain, 1.0)
    for block in reversed(chain):  # as a cache lets go of it
        store(tier, block)
    scan(tier, 6 * PER_SEGMENT)
    kept = present(tier, chain)
    length = kept.index(False) if False in kept else len(kept)
    assert length >= 10, "all that may be moved of it"
    assert kept == [True] * length + [False] * (PER_SEGMENT - length)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1e300, 1e300])
def test_nonsense_of_worth_is_bounded(opened: Opened, wrong: float) -> None:
    worth = Appraiser()
    tier = opened(worth)
    odd = blocks_of(range(5))
    worth.set(odd, wrong)
    store(tier, *odd)
    scan(tier, 12 * PER_SEGMENT)
    moved, offered = written(tier, "moved"), written(tier, "blocks")
    assert moved / offered <= MOVED_SHARE / (1 - MOVED_SHARE)
    assert tier.usage().used_bytes <= CAPACITY_BYTES


@pytest.mark.slow
def test_a_footer_that_cannot_be_read_costs_what_would_have_been_moved(opened: Opened) -> None:
    worth = Appraiser()
    tier = opened(worth)
    hot = blocks_of(range(5))
    worth.set(hot, 100.0)
    store(tier, *hot)
    scan(tier, 5 * PER_SEGMENT)
    for path in sorted(Path(tier._disk.directory).glob("*.segment"))[:1]:
        path.unlink()
    scan(tier, 3 * PER_SEGMENT, start=5000)
    assert tier.usage().used_bytes <= CAPACITY_BYTES


@pytest.mark.slow
def test_what_a_store_found_at_its_start_is_weighed_too(opened: Opened, tmp_path: Path) -> None:
    worth = Appraiser()
    first = opened(worth)
    hot = blocks_of(range(12))
    store(first, *hot)
    scan(first, 5 * PER_SEGMENT)
    first.close()
    worth.set(hot, 100.0)
    tier = opened(worth)
    scan(tier, 12 * PER_SEGMENT, start=5000)
    assert fetch(tier, *hot) == [None] * 12


def _index_of(num_segments: int, per_segment: int) -> SegmentIndex:
    """Return an index of so many full segments."""
    index = SegmentIndex()
    random = np.random.default_rng(7)
    for number in range(1, num_segments + 1):
        entries = np.zeros(per_segment, ENTRY_DTYPE)
        headers = np.zeros(per_segment, PACKED_HEADER)
        headers["block_hash"] = random.integers(0, 2**63, (per_segment, 2), dtype=np.uint64)
        headers["payload_bytes"] = 2 << 20
        entries["header"] = headers
        entries["page"] = 1 + 513 * np.arange(per_segment)
        entries["written_s"] = 1
        index.put(entries, number)
    return index


@pytest.mark.slow
def test_a_choice_among_thousands_of_segments_asks_for_a_bounded_few() -> None:
    index = _index_of(4000, 100)
    worth = Appraiser()
    now_s = [1000]
    order = ValueOrder(256 << 20, worth, lambda: now_s[0])
    candidates = list(range(1, 4001))
    slowest_s = 0.0
    for _ in range(20):
        asked, began_s = worth.num_asked, time.perf_counter()
        victim = order.to_evict(index, candidates, ())
        slowest_s = max(slowest_s, time.perf_counter() - began_s)
        assert victim is not None
        assert worth.num_asked - asked <= 16 * 64
        index.drop(index.rows_of(victim))
        candidates.remove(victim)
        now_s[0] += 10
    print(f"slowest choice: {slowest_s * 1e3:.1f} ms")


def test_every_segment_has_its_turn() -> None:
    index = _index_of(64, 10)
    worth = Appraiser()
    now_s = [1000]
    order = ValueOrder(256 << 20, worth, lambda: now_s[0])
    candidates = list(range(1, 65))
    worthless = index.hashes_of(index.rows_of(60))
    worth.worth.update(dict.fromkeys(worthless, 0.01))
    for _turn in range(8):
        victim = order.to_evict(index, candidates, ())
        now_s[0] += 10
        if victim == 60:
            break
    assert victim == 60


def test_a_clock_that_was_set_back_makes_scores_old_not_eternal() -> None:
    index = _index_of(4, 10)
    worth = Appraiser()
    now_s = [10_000]
    order = ValueOrder(256 << 20, worth, lambda: now_s[0])
    assert order.to_evict(index, [1, 2, 3, 4], ()) == 1
    now_s[0] = 5
    worth.worth.update(dict.fromkeys(index.hashes_of(index.rows_of(3)), 0.01))
    assert order.to_evict(index, [1, 2, 3, 4], ()) == 3


def test_dead_and_unknown_segments_go_in_their_turn() -> None:
    index = _index_of(5, 10)
    order = ValueOrder(256 << 20, Appraiser(), lambda: 1000)
    index.drop(index.rows_of(4))
    assert order.to_evict(index, [], ()) is None
    assert order.to_evict(index, [1, 2, 3, 4, 5], ()) == 4, "nothing is lost with it"
    assert order.to_evict(index, [1, 2, 3, 4, 5], (4,)) == 1
    index.drop(index.rows_of(1))
    assert order.to_evict(index, [1, 2, 3, 5], (1,)) == 1, "the oldest, whatever is in it"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_told_each_block_that_goes_is_told_of_and_none_that_stays(
    opened: Opened, seed: int
) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    now_s = [1000]

    def worth(hashes: Sequence[BlockHash]) -> list[float]:
        return [draw.choice([0.0, draw.random() ** 8, math.nan, 1e9]) for _ in hashes]

    tier = opened(worth, now_s=lambda: now_s[0])
    kept: set[BlockHash] = set()
    chains = 0
    while chains < 60:
        chains += 1
        now_s[0] += draw.randrange(8)
        start = 1000 * chains
        chain = make_chain(range(start, start + draw.randrange(1, 40)), BLOCK_BYTES)
        report = tier.write(chain, soon())
        assert set(report.outcomes) == {WriteOutcome.STORED}
        kept |= {block.header.block_hash for block in chain}
        kept -= set(report.evicted)
        assert fetch(tier, *chain) == [None] * len(chain), "those just written stay"
        if draw.random() < 0.3:
            gone = draw.sample(sorted(kept), k=5)
            tier.remove(gone, soon())
            kept -= set(gone)
        assert tier.usage().used_bytes <= CAPACITY_BYTES
    headers = unpack_headers(tier.headers())
    assert {header.block_hash for header in headers} == kept
    assert len(headers) == tier.usage().num_blocks
    moved, offered = written(tier, "moved"), written(tier, "blocks")
    print(f"amplification {(offered + moved) / offered:.2f}")
    assert (offered + moved) / offered <= 1 / (1 - MOVED_SHARE)
