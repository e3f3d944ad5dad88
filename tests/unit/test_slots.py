import pytest

from kvtier.core.slots import SlabAllocator, slot_bytes

PAGE = 4096


def test_slots_are_whole_pages():
    assert [slot_bytes(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_nothing_is_handed_out_before_it_is_reserved():
    slots = SlabAllocator(2, 4 * PAGE)
    assert slots.allocate(PAGE, 7) is None
    slots.reserve(1)
    assert [slots.allocate(PAGE, 7) for _ in range(5)] == [0, PAGE, 2 * PAGE, 3 * PAGE, None]
    slots.reserve(2)
    assert slots.allocate(PAGE, 7) == 4 * PAGE


def test_more_slabs_than_there_are_cannot_be_reserved():
    slots = SlabAllocator(2, 4 * PAGE)
    slots.reserve(5)
    slots.reserve(1)
    assert slots.reserved_bytes == slots.capacity_bytes == 8 * PAGE


def test_a_slab_serves_one_size_until_it_is_empty():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    offset = slots.allocate(PAGE, 7)
    assert slots.allocate(2 * PAGE, 7) is None
    slots.free(offset)
    assert slots.allocate(2 * PAGE, 7) == 0
    assert list(slots.sizes()) == [2 * PAGE]
    assert slots.owners_in(0).tolist() == [7]


def test_what_does_not_fill_a_slab_stays_unused():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    assert slots.allocate(3 * PAGE, 7) == 0
    assert slots.allocate(3 * PAGE, 7) is None
    assert slots.used_bytes() == 3 * PAGE
    assert slots.slab_at(PAGE) == 0


def test_a_slot_is_given_back_once():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    first, _ = slots.allocate(PAGE, 7), slots.allocate(PAGE, 7)
    slots.free(first)
    with pytest.raises(AssertionError):
        slots.free(first)


def test_a_slab_that_is_drained_serves_another_size_once_it_is_empty():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    first, second = slots.allocate(PAGE, 1), slots.allocate(PAGE, 2)
    slots.drain(0, 2 * PAGE)
    assert slots.allocate(PAGE, 3) is None
    assert slots.allocate(2 * PAGE, 3) is None
    slots.free(first)
    assert slots.num_draining_for(2 * PAGE) == 1
    slots.free(second)
    assert (slots.sizes(), slots.num_draining_for(2 * PAGE)) == ({2 * PAGE}, 0)
    assert slots.allocate(PAGE, 3) is None  # nobody is quicker than whom it was drained for
    assert slots.allocate(2 * PAGE, 4) == 0


def test_a_slab_nobody_took_a_slot_of_can_be_blank_again():
    slots = SlabAllocator(1, 4 * PAGE)
    slots.reserve(1)
    offset = slots.allocate(PAGE, 1)
    slots.drain(0, 2 * PAGE)
    slots.free(offset)
    slots.clear(0)
    assert slots.allocate(PAGE, 1) == 0


def test_held_slots_are_counted_by_slab():
    slots = SlabAllocator(2, 2 * PAGE)
    slots.reserve(2)
    offsets = [slots.allocate(PAGE, owner) for owner in range(3)]
    slots.hold(offsets[0])
    slots.hold(offsets[2])
    assert slots.held_bytes == 2 * PAGE
    assert slots.slabs_by_held(PAGE) == [(1, 0), (1, 1)]
    slots.release(offsets[0])
    assert slots.slabs_by_held(PAGE) == [(0, 0), (1, 1)]


def test_room_is_what_is_free_and_what_is_blank():
    slots = SlabAllocator(2, 4 * PAGE)
    slots.reserve(2)
    for owner in range(7):
        assert slots.has_room_share(PAGE, 0.125)
        slots.allocate(PAGE, owner)
    assert slots.has_room_share(PAGE, 0.125)
    slots.allocate(PAGE, 7)
    assert not slots.has_room_share(PAGE, 0.125)
