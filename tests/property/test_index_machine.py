"""Index and LeafLru against a dict and a sorted list."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.core.eviction import leaf_lru
from kvtier.core.identity import NO_TENANT, BlockHash
from kvtier.core.index import BlockIndex, NewBlocks, Scope
from kvtier.core.key_space_usage import BlockTotals
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.slots import SlabAllocator
from kvtier.core.table import as_keys
from kvtier.testing.block import TEST_KEY_SPACE, make_chain

CPU = TierName.CPU
SIZE = 4096
PATHS = st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 2), st.integers(0, 3)).map(
    lambda p: (
        [p[0] * 10 + place for place in range(p[1])]
        + [100 + p[2] * 10 + place for place in range(p[3])]
    )
)
"""Prompts that share beginnings: some of a document, then some of another text."""


def one_slab():
    slots = SlabAllocator(1, 200 * SIZE)
    slots.reserve(1)
    return slots


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index, self.lru, self.slots = BlockIndex(), leaf_lru.LeafLru(), one_slab()
        self.scope = self.index.scope_id(Scope(TEST_KEY_SPACE, NO_TENANT))
        self.state: dict[BlockHash, dict[TierName, Residency]] = {}
        self.parent: dict[BlockHash, BlockHash] = {}
        self.pins: dict[BlockHash, int] = {}
        self.order: list[BlockHash] = []
        """All blocks known, the least recently used first."""

    def row(self, block_hash):
        return int(self.index.find(as_keys(block_hash))[0])

    @rule(path=PATHS)
    def store(self, path):
        headers = [block.header for block in make_chain(path, 100)]
        hashes = [header.block_hash for header in headers]
        rows = self.index.add(
            NewBlocks(
                keys=as_keys(b"".join(hashes)),
                parents=as_keys(b"".join(header.parent_hash for header in headers)),
                first_position=0,
                scope=self.scope,
                payload_bytes=100,
            )
        )
        self.lru.touch(self.index, rows)
        for row in rows[self.index.slot[rows] < 0].tolist():
            self.index.slot[row] = self.slots.allocate(SIZE, row)
        self.index.move(rows, CPU, Residency.READY)
        for row, header in zip(rows.tolist(), headers, strict=True):
            self.lru.offer(self.index, row)
            assert self.index.header_of(row).identity() == header.identity()
            self.parent[header.block_hash] = header.parent_hash
            self.state.setdefault(header.block_hash, dict.fromkeys(LOWER_TIERS, Residency.ABSENT))
            self.state[header.block_hash][CPU] = Residency.READY
            self.pins.setdefault(header.block_hash, 0)
        self.touched(hashes)

    @rule(path=PATHS)
    def use(self, path):
        hashes = [b.header.block_hash for b in make_chain(path, 100)]
        rows = self.index.find(as_keys(b"".join(hashes)))
        assert [row >= 0 for row in rows.tolist()] == [h in self.state for h in hashes]
        known = [h for h in hashes if h in self.state]
        self.lru.touch(self.index, rows[rows >= 0])
        self.touched(known)

    @precondition(lambda self: self.state)
    @rule(place=st.integers(0, 1000))
    def pin(self, place):
        block_hash = sorted(self.state)[place % len(self.state)]
        self.index.pins[self.row(block_hash)] += 1
        self.pins[block_hash] += 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(place=st.integers(0, 1000))
    def unpin(self, place):
        pinned = sorted(block_hash for block_hash, pins in self.pins.items() if pins)
        block_hash = pinned[place % len(pinned)]
        row = self.row(block_hash)
        self.index.pins[row] -= 1
        self.pins[block_hash] -= 1
        if not self.index.pins[row]:
            self.lru.offer(self.index, row)

    @precondition(lambda self: self.state)
    @rule(place=st.integers(0, 1000), tier=st.sampled_from(LOWER_TIERS[1:]))
    def write_below(self, place, tier):
        block_hash = sorted(self.state)[place % len(self.state)]
        self.index.move(self.row(block_hash), tier, Residency.READY)
        self.state[block_hash][tier] = Residency.READY

    @rule(count=st.integers(1, 12), spared=PATHS)
    def evict(self, count, spared):
        """Take the victims proposed, sparing a chain that is being used."""
        hashes = [b.header.block_hash for b in make_chain(spared, 100)]
        known = [h for h in hashes if h in self.state]
        rows = self.index.find(as_keys(b"".join(hashes)))
        mark = self.lru.touch(self.index, rows[rows >= 0])
        self.touched(known)
        expected = [
            block_hash
            for block_hash in self.order
            if self.state[block_hash][CPU] == Residency.READY
            and not self.pins[block_hash]
            and block_hash not in known
        ][:count]
        taken = []
        for row in self.lru.victims(self.index, self.slots, SIZE, mark):
            taken.append(self.index.hash_of(row))
            self.forget(taken[-1], row)
            if len(taken) == count:
                break
        assert taken == expected

    @rule()
    def propose_and_take_none(self):
        mark = self.lru.touch(self.index, np.empty(0, np.int64))
        assert len(list(self.lru.victims(self.index, self.slots, SIZE, mark))) == sum(
            self.state[h][CPU] == Residency.READY and not self.pins[h] for h in self.state
        )

    def forget(self, block_hash, row):
        self.slots.free(int(self.index.slot[row]))
        self.index.slot[row] = -1
        self.index.move(row, CPU, Residency.ABSENT)
        self.index.forget_absent(np.array([row]))
        self.state[block_hash][CPU] = Residency.ABSENT
        if set(self.state[block_hash].values()) == {Residency.ABSENT}:
            for known in (self.state, self.parent, self.pins):
                del known[block_hash]
            self.order.remove(block_hash)

    def touched(self, hashes):
        self.order = [h for h in self.order if h not in hashes] + hashes[::-1]

    @invariant()
    def agrees_with_the_model(self):
        assert len(self.index) == len(self.state)
        for tier in LOWER_TIERS:
            rows = self.index.in_state(tier, Residency.READY).tolist()
            expected = {h for h, s in self.state.items() if s[tier] == Residency.READY}
            assert {self.index.hash_of(row) for row in rows} == expected
            held = (
                {TEST_KEY_SPACE: BlockTotals(len(expected), 100 * len(expected))}
                if expected
                else {}
            )
            assert self.index.held_in(tier) == held

    @invariant()
    def no_parent_is_older_than_its_child(self):
        place = {block_hash: at for at, block_hash in enumerate(self.order)}
        for child, parent in self.parent.items():
            assert parent not in place or place[parent] > place[child]


TestIndex = pytest.mark.slow(IndexMachine.TestCase)
TestIndex.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_the_order_is_exact_whatever_is_scanned_at_once(monkeypatch):
    monkeypatch.setattr(leaf_lru, "VICTIMS_SCANNED_AT_ONCE", 3)
    index, lru, slots = BlockIndex(), leaf_lru.LeafLru(), one_slab()
    scope = index.scope_id(Scope(TEST_KEY_SPACE, NO_TENANT))
    headers = [block.header for block in make_chain(range(20), 100)]
    rows = index.add(
        NewBlocks(
            keys=as_keys(b"".join(h.block_hash for h in headers)),
            parents=as_keys(b"".join(h.parent_hash for h in headers)),
            first_position=0,
            scope=scope,
            payload_bytes=100,
        )
    )
    lru.touch(index, rows)
    index.slot[rows] = [slots.allocate(SIZE, row) for row in rows.tolist()]
    index.move(rows, CPU, Residency.READY)
    index.pins[rows[10:]] = 1  # the tail is pinned when the scan comes
    mark = lru.touch(index, np.empty(0, np.int64))
    victims = lru.victims(index, slots, SIZE, mark)
    first = next(victims)
    assert first == rows[9]
    victims.close()
    index.pins[rows[10:]] = 0
    for row in rows[10:].tolist():
        lru.offer(index, row)
    order = [rows.tolist().index(row) for row in lru.victims(index, slots, SIZE, mark)]
    assert all(child > parent for child, parent in pairwise(order)), "leaves before parents"
    assert len(order) == 20
