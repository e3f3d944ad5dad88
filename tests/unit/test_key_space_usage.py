"""The census counts what a count would find, whatever key spaces come and go."""

import random
from collections import Counter

import numpy as np
from rows import packed

from kvtier.core import index as index_module
from kvtier.core.identity import NO_TENANT
from kvtier.core.index import BlockIndex, NewBlocks, Scope
from kvtier.core.key_space_usage import BlockTotals
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.table import as_keys
from kvtier.testing.block import make_chain


def key_space(number: int) -> bytes:
    return number.to_bytes(16, "big")


def rows_of(index: BlockIndex, number: int, count: int, payload_bytes: int = 100):
    headers = [b.header for b in make_chain(range(count), 100, key_space=key_space(number))]
    return index.add(
        NewBlocks(
            keys=as_keys(b"".join(h.block_hash for h in headers)),
            parents=as_keys(b"".join(h.parent_hash for h in headers)),
            first_position=0,
            scope=index.scope_id(Scope(key_space(number), NO_TENANT)),
            payload_bytes=payload_bytes,
        )
    )


def test_blocks_count_from_ready_until_they_leave():
    index = BlockIndex()
    rows = rows_of(index, 1, 5)
    index.move(rows, TierName.CPU, Residency.WRITING)
    assert index.held_in(TierName.CPU) == {}
    assert not index.key_space_usage.has_blocks(key_space(1))
    index.move(rows, TierName.CPU, Residency.READY)
    index.move(rows, TierName.CPU, Residency.READY)
    assert index.held_in(TierName.CPU) == {key_space(1): BlockTotals(5, 500)}
    assert index.key_space_usage.has_blocks(key_space(1))
    assert not index.key_space_usage.has_blocks(key_space(2))
    index.move(int(rows[0]), TierName.CPU, Residency.EVICTING)
    index.move(rows[:0], TierName.CPU, Residency.READY)
    assert index.held_in(TierName.CPU) == {key_space(1): BlockTotals(4, 400)}
    assert index.held_in(TierName.SSD) == {}


def test_what_a_store_held_before_is_counted():
    index = BlockIndex()
    headers = [
        b.header
        for n, size in ((1, 100), (2, 64))
        for b in make_chain([7, 8], size, key_space=key_space(n))
    ]
    index.restore(packed(headers), TierName.SSD)
    assert index.held_in(TierName.SSD) == {
        key_space(1): BlockTotals(2, 200),
        key_space(2): BlockTotals(2, 128),
    }


def test_any_mixture_of_key_spaces_is_counted_right(monkeypatch):
    monkeypatch.setattr(index_module, "SCOPES_WITHOUT_BLOCKS_MAX", 5)
    choose, index = random.Random(6), BlockIndex()
    print("seed 6")
    rows = np.concatenate([rows_of(index, number, 1 + number % 7) for number in range(100)])
    for _ in range(200):
        some = np.array(choose.sample(rows.tolist(), choose.randrange(1, 40)))
        index.move(some, choose.choice(LOWER_TIERS), choose.choice(list(Residency)))
    for tier in LOWER_TIERS:
        found = Counter(
            index.scope_of(row).key_space for row in index.in_state(tier, Residency.READY)
        )
        assert {name: held.num_blocks for name, held in index.held_in(tier).items()} == found


def test_key_spaces_without_blocks_make_room_for_others(monkeypatch):
    monkeypatch.setattr(index_module, "SCOPES_WITHOUT_BLOCKS_MAX", 5)
    index = BlockIndex()
    kept = rows_of(index, 10_000, 3)
    index.move(kept, TierName.SSD, Residency.READY)
    for number in range(500):
        rows = rows_of(index, number, 2, payload_bytes=200)
        index.move(rows, TierName.CPU, Residency.READY)
        assert index.held_in(TierName.CPU) == {key_space(number): BlockTotals(2, 400)}
        index.move(rows, TierName.CPU, Residency.ABSENT)
        index.forget_absent(rows)
    assert index.held_in(TierName.SSD) == {key_space(10_000): BlockTotals(3, 300)}
    assert len(index.key_space_usage) < 20
