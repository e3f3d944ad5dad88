import numpy as np
import pytest
from rows import add, chain

from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.index import BlockIndex
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import SlabAllocator, slot_bytes

CPU = TierName.CPU
SIZE = slot_bytes(5000)


@pytest.fixture
def slots():
    slots = SlabAllocator(1, 64 * SIZE)
    slots.reserve(1)
    return slots


def ready(index, slots, lru, *numbers):
    rows = add(index, chain(*numbers))
    lru.touch(index, rows)
    for row in rows.tolist():
        index.slot[row] = slots.allocate(SIZE, row)
    index.move(rows, CPU, Residency.READY)
    for row in rows.tolist():
        lru.offer(index, row)
    return rows.tolist()


def all_victims(index, slots, lru):
    return list(lru.victims(index, slots, SIZE))


def test_the_oldest_goes_first_and_leaves_before_parents(slots):
    index, lru = BlockIndex(), LeafLru()
    old, new = ready(index, slots, lru, 1, 2, 3), ready(index, slots, lru, 7, 8)
    assert all_victims(index, slots, lru) == [*reversed(old), *reversed(new)]


def test_a_use_of_a_child_is_a_use_of_its_parents(slots):
    index, lru = BlockIndex(), LeafLru()
    one, two = ready(index, slots, lru, 1, 2, 3), ready(index, slots, lru, 7, 8)
    lru.touch(index, np.array(one[:2]))
    assert all_victims(index, slots, lru) == [one[2], *reversed(two), one[1], one[0]]


def test_the_chain_in_use_is_spared(slots):
    index, lru = BlockIndex(), LeafLru()
    one, two = ready(index, slots, lru, 1, 2), ready(index, slots, lru, 7, 8)
    mark = lru.touch(index, np.array(one))
    assert list(lru.victims(index, slots, SIZE, mark)) == two[::-1]


def test_a_pinned_block_is_not_proposed_until_it_is_offered_again(slots):
    index, lru = BlockIndex(), LeafLru()
    one, two = ready(index, slots, lru, 1, 2), ready(index, slots, lru, 7, 8)
    index.pins[one[1]] = 1
    assert all_victims(index, slots, lru) == [one[0], *reversed(two)]
    index.pins[one[1]] = 0
    lru.offer(index, one[1])
    assert all_victims(index, slots, lru) == [*reversed(one), *reversed(two)]


def test_what_was_not_taken_is_proposed_again(slots):
    index, lru = BlockIndex(), LeafLru()
    rows = ready(index, slots, lru, 1, 2, 3)
    mark = lru.touch(index, np.empty(0, np.int64))
    assert next(lru.victims(index, slots, SIZE, mark)) == rows[2]
    assert all_victims(index, slots, lru) == rows[::-1]


def test_sizes_have_orders_of_their_own(slots):
    index, lru = BlockIndex(), LeafLru()
    ready(index, slots, lru, 1, 2)
    assert list(lru.victims(index, slots, SIZE + 4096)) == []
    assert list(lru.next_victims(index, slots, SIZE + 4096, 8)) == []


def test_what_comes_next_is_known_beforehand(slots):
    index, lru = BlockIndex(), LeafLru()
    old, new = ready(index, slots, lru, 1, 2, 3), ready(index, slots, lru, 7, 8)
    index.pins[new[1]] = 1
    assert lru.next_victims(index, slots, SIZE, 9).tolist() == [*reversed(old), new[0]]
    lru.touch(index, np.array(old))
    assert lru.next_victims(index, slots, SIZE, 9).tolist() == [new[0], *reversed(old)]
    assert all_victims(index, slots, lru) == [new[0], *reversed(old)]
