import pytest

from kvtier.core.slots import SlabAllocator, slot_bytes

PAGE = 4096


def test_slots_are_whole_pages():
    assert [slot_bytes(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_nothing_is_handed_out_before_it_is_reserved():
    slots = SlabAllocator(2, 4 * PAGE)
    assert slots.take(PAGE) is None
    slots.reserve(1)
    assert [slots.take(PAGE) for _ in range(5)] == [0, PAGE, 2 * PAGE, 3 * PAGE, None]
    slots.reserve(2)
    assert slots.take(PAGE) == 4 * PAGE


def test_more_slabs_than_there_are_cannot_be_reserved():
    slots = SlabAllocator(2, 4 * PAGE)
    slots.reserve(5)
    slots.reserve(1)
    assert slots.reserved_bytes == slots.capacity_bytes == 8 * PAGE


def test_a_slab_serves_one_size_until_it_is_empty():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    offset = slots.take(PAGE)
    assert slots.take(2 * PAGE) is None
    slots.give(offset)
    assert slots.take(2 * PAGE) == 0
    assert slots.size_at(0) == 2 * PAGE
    assert slots.num_taken_at(0) == 1


def test_what_does_not_fill_a_slab_stays_unused():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    assert slots.take(3 * PAGE) == 0
    assert slots.take(3 * PAGE) is None
    assert slots.used_bytes() == 3 * PAGE
    assert slots.slab_range(PAGE) == (0, 4 * PAGE)


def test_a_slot_is_given_back_once():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    first, _ = slots.take(PAGE), slots.take(PAGE)
    slots.give(first)
    with pytest.raises(AssertionError):
        slots.give(first)
