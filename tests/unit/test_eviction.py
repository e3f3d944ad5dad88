import numpy as np
from rows import add, chain

from kvtier.core.eviction import LeafLru
from kvtier.core.index import Index
from kvtier.core.residency import Residency, TierName

CPU = TierName.CPU


def ready(index, lru, *numbers):
    rows = add(index, chain(*numbers))
    lru.touch(index, rows)
    index.slot[rows] = rows
    index.move(rows, CPU, Residency.READY)
    for row in rows.tolist():
        lru.offer(index, row)
    return rows.tolist()


def all_victims(index, lru):
    mark = lru.touch(index, np.empty(0, np.int64))
    return list(lru.victims(index, mark))


def test_the_oldest_goes_first_and_leaves_before_parents():
    index, lru = Index(), LeafLru()
    old, new = ready(index, lru, 1, 2, 3), ready(index, lru, 7, 8)
    assert all_victims(index, lru) == [*reversed(old), *reversed(new)]


def test_a_use_of_a_child_is_a_use_of_its_parents():
    index, lru = Index(), LeafLru()
    one, two = ready(index, lru, 1, 2, 3), ready(index, lru, 7, 8)
    lru.touch(index, np.array(one[:2]))
    assert all_victims(index, lru) == [one[2], *reversed(two), one[1], one[0]]


def test_the_chain_in_use_is_spared():
    index, lru = Index(), LeafLru()
    one, two = ready(index, lru, 1, 2), ready(index, lru, 7, 8)
    mark = lru.touch(index, np.array(one))
    assert list(lru.victims(index, mark)) == two[::-1]


def test_a_pinned_block_is_not_proposed_until_it_is_offered_again():
    index, lru = Index(), LeafLru()
    one, two = ready(index, lru, 1, 2), ready(index, lru, 7, 8)
    index.pins[one[1]] = 1
    assert all_victims(index, lru) == [one[0], *reversed(two)]
    index.pins[one[1]] = 0
    lru.offer(index, one[1])
    assert all_victims(index, lru) == [*reversed(one), *reversed(two)]


def test_what_was_not_taken_is_proposed_again():
    index, lru = Index(), LeafLru()
    rows = ready(index, lru, 1, 2, 3)
    mark = lru.touch(index, np.empty(0, np.int64))
    assert next(lru.victims(index, mark)) == rows[2]
    assert all_victims(index, lru) == rows[::-1]
