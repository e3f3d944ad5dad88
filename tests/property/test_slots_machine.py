"""SlabAllocator against the plain idea of it: slots that do not overlap, and are all counted."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.core.slots import SlabAllocator

SLAB = 8 * 4096
SIZES = st.sampled_from([4096, 3 * 4096, 8 * 4096])


class SlotMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slots = SlabAllocator(6, SLAB)
        self.taken: dict[int, int] = {}
        self.num_reserved = 0

    @rule(num_slabs=st.integers(0, 8))
    def reserve(self, num_slabs):
        self.slots.reserve(num_slabs)
        self.num_reserved = max(self.num_reserved, min(num_slabs, 6))

    @rule(size=SIZES)
    def take(self, size):
        offset = self.slots.allocate(size, len(self.taken))
        if offset is None:
            assert not self.has_room(size), "there was room"
            return
        assert offset not in self.taken
        self.taken[offset] = size

    @rule(size=SIZES, count=st.integers(0, 30))
    def take_some(self, size, count):
        """As many one by one would be the very same, of the same owners."""
        owners = np.arange(1000, 1000 + count)
        other, expected = deepcopy(self.slots), []
        for owner in owners.tolist():
            if (offset := other.allocate(size, owner)) is None:
                break
            other.hold(offset)
            expected.append(offset)
        offsets = self.slots.allocate_some(size, owners)
        assert offsets == expected
        assert self.slots.held_bytes == other.held_bytes == len(offsets) * size
        assert sorted(self.slots.owners_of(size)) == sorted(other.owners_of(size))
        assert self.slots.slabs_by_held(size) == other.slabs_by_held(size)
        for offset in offsets:
            self.slots.release(offset)
            self.taken[offset] = size
        assert len(offsets) == count or not self.has_room(size), "there was room"

    @precondition(lambda self: self.taken)
    @rule(place=st.integers(0, 100))
    def give(self, place):
        offset = sorted(self.taken)[place % len(self.taken)]
        self.slots.free(offset)
        del self.taken[offset]

    def has_room(self, size):
        """A slab is free, or serves this size and is not full."""
        by_slab: dict[int, list[int]] = {number: [] for number in range(self.num_reserved)}
        for offset, taken in self.taken.items():
            by_slab[offset // SLAB].append(taken)
        return any(
            not sizes or (sizes[0] == size and len(sizes) < SLAB // size)
            for sizes in by_slab.values()
        )

    @invariant()
    def keeps_slots_apart_and_counts_them(self):
        end = 0
        for offset, size in sorted(self.taken.items()):
            assert offset >= end, "two slots overlap"
            assert offset % 4096 == 0
            end = offset + size
        assert end <= self.slots.reserved_bytes == self.num_reserved * SLAB
        assert self.slots.used_bytes() == sum(self.taken.values())


TestSlots = pytest.mark.slow(SlotMachine.TestCase)
TestSlots.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
