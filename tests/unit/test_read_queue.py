"""Reads that wait: each row once, loads by turns, and the background last."""

import pytest

from kvtier.node.state.read_queue import BACKGROUND, ReadQueue

LONG, SHORT, OTHER = 1, 2, 3


def queue_of(*wanted):
    queue = ReadQueue()
    for now_ns, (row, load) in enumerate(wanted):
        queue.add(row, load, 4096, now_ns)
    queue.check()
    return queue


def rows(taken):
    return [row for row, _ in taken]


def drain(queue, count):
    turns = []
    while taken := queue.take(count):
        queue.check()
        turns.append(rows(taken))
    return turns


def test_one_load_is_served_in_its_order():
    queue = queue_of((5, LONG), (3, LONG), (9, LONG))
    assert queue.take(2) == [(5, 0), (3, 1)]
    assert queue.num_bytes == 4096
    assert queue.take(2) == [(9, 2)]
    assert queue.take(2) == []
    assert queue.num_bytes == 0


def test_loads_take_turns():
    queue = queue_of(*((row, LONG) for row in range(6)), (10, SHORT), (11, OTHER))
    assert drain(queue, 2) == [[0, 1], [10], [11], [2, 3], [4, 5]]


def test_a_load_that_wants_small_transfers_has_as_many_rows_in_its_turn():
    queue = queue_of(*((row, LONG) for row in range(6)), *((row, SHORT) for row in range(10, 16)))
    queue.limit(LONG, 1)
    assert drain(queue, 3) == [[0], [1], [2], [10, 11, 12], [3], [4], [5], [13, 14, 15]]


def test_a_cut_is_for_one_load_and_never_makes_transfers_larger():
    queue = queue_of(*((row, LONG) for row in range(4)))
    queue.limit(LONG, 100)
    assert drain(queue, 2) == [[0, 1], [2, 3]]
    queue.limit(LONG, 1)
    queue.forget(LONG)
    for row in range(4):
        queue.add(row, LONG, 4096, 0)
    assert drain(queue, 2) == [[0, 1], [2, 3]]


def test_a_row_that_two_want_is_read_once_as_soon_as_the_first_gets_to_it():
    queue = queue_of(*((row, LONG) for row in range(6)), (5, SHORT), (4, SHORT))
    assert len(queue) == 6
    assert drain(queue, 2) == [[0, 1], [5, 4], [2, 3]]


def test_the_background_comes_after_everybody():
    queue = queue_of((1, BACKGROUND), (2, BACKGROUND), (3, BACKGROUND), (10, LONG), (11, LONG))
    assert drain(queue, 1) == [[10], [11], [1], [2], [3]]


def test_what_is_awaited_leaves_the_background():
    queue = queue_of((1, BACKGROUND), (2, BACKGROUND), (2, LONG))
    assert drain(queue, 8) == [[2], [1]]


def test_what_was_given_up_is_not_read():
    queue = queue_of((1, LONG), (2, LONG), (2, SHORT), (3, LONG))
    assert queue.discard(1)
    assert queue.discard(3)
    assert not queue.discard(3)
    queue.forget(LONG)
    queue.check()
    assert drain(queue, 8) == [[2]]


def test_nothing_is_left_after_clearing():
    queue = queue_of((1, LONG), (2, SHORT))
    queue.clear()
    assert (len(queue), list(queue), queue.num_bytes, queue.take(8)) == (0, [], 0, [])


def test_a_row_in_no_line_is_noticed():
    queue = queue_of((1, LONG))
    queue.forget(LONG)
    with pytest.raises(AssertionError, match="in no line"):
        queue.check()
