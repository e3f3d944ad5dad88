"""A slab allocator for the arena, and the rule for sharing slabs between block sizes.

Theory
------
The arena is divided into slabs of equal size. A slab serves slots of one size, which is set when
its first slot is taken and cleared when its last one is given back, so engines with different block
sizes share an arena without fragmenting it. A slot is identified by its offset in the arena and has
an owner, a number that the caller chooses. A *held* slot cannot be given back.

A block can only replace another one of the same size; otherwise a whole slab has to change hands.
If age alone decided that, the engine that stores most would end up with all slabs. So each size in
use has a *fair share*: the number of slabs divided by the number of sizes. A size below its share
takes slabs from sizes above theirs; a size that has its share evicts its own blocks. Any size
may take unused slabs, and a size that is no longer used has no share.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np

from kvtier.core.limits import PAGE_BYTES
from kvtier.core.table import Rows

__all__ = ["SlabAllocator", "donors", "slot_bytes"]

_NOBODY = -1


def slot_bytes(block_bytes: int) -> int:
    """Round a block's size up to whole pages, as direct I/O and memory mappings need it."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0
    owners: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """Owner of each slot, ``_NOBODY`` if it is free."""
    free: list[int] = field(default_factory=list)
    """Stack of free slots."""
    num_held: int = 0
    next_bytes: int = 0
    """If not 0, the slab is being drained and will then serve slots of this size."""

    @property
    def num_taken(self) -> int:
        return len(self.owners) - len(self.free)


class SlabAllocator:
    """Allocates slots of the arena ``[0, num_slabs * slab_bytes)``.

    ``reserve`` makes slabs usable one after another, as their memory becomes available.
    """

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        assert num_slabs > 0
        assert slab_bytes % PAGE_BYTES == 0
        self.slab_bytes = slab_bytes
        self.held_bytes = 0
        """Total size of the held slots."""
        self._slabs = [_Slab() for _ in range(num_slabs)]
        self._num_reserved = 0
        self._blank: list[int] = []
        self._partial: dict[int, set[int]] = {}
        """By slot size, the slabs that have a free slot."""
        self._slabs_of: dict[int, set[int]] = {}
        """By slot size, all its slabs; sizes without slabs are absent."""
        self._num_taken: Counter[int] = Counter()
        """By slot size, the number of taken slots."""

    @property
    def capacity_bytes(self) -> int:
        """Return the size of the whole arena."""
        return len(self._slabs) * self.slab_bytes

    @property
    def num_reserved(self) -> int:
        """Return the number of slabs that are backed by memory."""
        return self._num_reserved

    @property
    def reserved_bytes(self) -> int:
        """Return how much of the arena is backed by memory."""
        return self._num_reserved * self.slab_bytes

    def reserve(self, num_slabs: int) -> None:
        """Make the first ``num_slabs`` slabs usable. Never shrinks."""
        num_slabs = min(num_slabs, len(self._slabs))
        fresh = range(self._num_reserved, num_slabs)
        # Low offsets come first, so that a small cache touches little memory.
        self._blank = [*reversed(fresh), *self._blank]
        self._num_reserved = max(self._num_reserved, num_slabs)

    def allocate(self, size: int, owner: int) -> int | None:
        """Return the offset of a free slot of ``size`` bytes, or None if there is none."""
        assert 0 < size <= self.slab_bytes
        if not self._partial.get(size):
            if not self._blank:
                return None
            self._open(self._blank.pop(), size)
        number = min(self._partial[size])
        slab = self._slabs[number]
        place = slab.free.pop()
        slab.owners[place] = owner
        self._num_taken[size] += 1
        if not slab.free:
            self._partial[size].remove(number)
        return number * self.slab_bytes + place * size

    def allocate_some(self, size: int, owners: Rows) -> list[int]:
        """Take and hold a slot for as many of the leading owners as there are free slots.

        Returns the same offsets as one ``allocate`` per owner would.
        """
        offsets: list[int] = []
        while len(offsets) < len(owners):
            offset = self.allocate(size, int(owners[len(offsets)]))
            if offset is None:
                break
            number = offset // self.slab_bytes
            slab = self._slabs[number]
            offsets.append(offset)
            # Take the rest from the same slab: finding a slab costs more than taking a slot.
            more = owners[len(offsets) : len(offsets) + len(slab.free)]
            if len(more):
                places = slab.free[-len(more) :][::-1]
                del slab.free[-len(more) :]
                slab.owners[places] = more
                self._num_taken[size] += len(more)
                if not slab.free:
                    self._partial[size].remove(number)
                offsets += [number * self.slab_bytes + place * size for place in places]
            slab.num_held += 1 + len(more)
            self.held_bytes += (1 + len(more)) * size
        return offsets

    def free(self, offset: int) -> None:
        """Free a slot that is not held; a slab whose last slot is freed becomes blank."""
        number, place = self._place_of(offset)
        slab = self._slabs[number]
        assert slab.owners[place] != _NOBODY, "the slot is already free"
        slab.owners[place] = _NOBODY
        slab.free.append(place)
        self._num_taken[slab.slot_bytes] -= 1
        if not slab.next_bytes:
            self._partial[slab.slot_bytes].add(number)
        if slab.num_taken == 0:
            self._close(number)

    def hold(self, offset: int) -> None:
        """Hold a slot until the matching ``release``."""
        slab = self._slabs[offset // self.slab_bytes]
        slab.num_held += 1
        self.held_bytes += slab.slot_bytes

    def release(self, offset: int) -> None:
        """End one ``hold``."""
        slab = self._slabs[offset // self.slab_bytes]
        assert slab.num_held > 0, "release without hold"
        slab.num_held -= 1
        self.held_bytes -= slab.slot_bytes

    # Sizes and their slabs

    def sizes(self) -> Set[int]:
        """Return the slot sizes that have slabs."""
        return self._slabs_of.keys()

    def num_slabs_of(self, size: int) -> int:
        """Return the number of slabs of a slot size."""
        return len(self._slabs_of.get(size, ()))

    def has_room_share(self, size: int, share: float) -> bool:
        """Return whether at least this share of the slots that a size could have is free."""
        num_slabs = self.num_slabs_of(size) + len(self._blank)
        num_slots = num_slabs * (self.slab_bytes // size)
        return num_slots - self._num_taken[size] >= share * num_slots

    def num_free(self, size: int) -> int:
        """Return how many slots of a size can be taken without evicting a block."""
        num_slabs = self.num_slabs_of(size) + len(self._blank)
        return num_slabs * (self.slab_bytes // size) - self._num_taken[size]

    def owners_of(self, size: int) -> Rows:
        """Return the owners of all slots of a size."""
        slabs = [self._slabs[number].owners for number in self._slabs_of.get(size, ())]
        owners: Rows = np.concatenate(slabs) if slabs else np.empty(0, np.int64)
        taken: Rows = owners[owners != _NOBODY]
        return taken

    def owners_in(self, number: int) -> Rows:
        """Return the owners of the slots of one slab."""
        owners = self._slabs[number].owners
        taken: Rows = owners[owners != _NOBODY]
        return taken

    def slab_at(self, offset: int) -> int:
        """Return the number of the slab at ``offset``."""
        return offset // self.slab_bytes

    def slabs_by_held(self, size: int) -> list[tuple[int, int]]:
        """Return (number of held slots, slab) for the slabs of a size, ascending.

        Draining slabs are left out.
        """
        numbers = self._slabs_of.get(size, ())
        slabs = ((self._slabs[number], number) for number in numbers)
        return sorted((slab.num_held, number) for slab, number in slabs if not slab.next_bytes)

    def drain(self, number: int, size: int) -> None:
        """Stop allocating from a slab, and give it to ``size`` once it is empty."""
        slab = self._slabs[number]
        assert slab.slot_bytes != size
        slab.next_bytes = size
        self._partial[slab.slot_bytes].discard(number)
        if slab.num_taken == 0:
            self._close(number)

    def clear(self, number: int) -> None:
        """Make a slab without taken slots blank."""
        assert self._slabs[number].num_taken == 0
        self._close(number)

    def num_draining_for(self, size: int) -> int:
        """Return how many slabs are draining for a size."""
        return sum(slab.next_bytes == size for slab in self._slabs)

    def used_bytes(self) -> int:
        """Return the total size of the taken slots."""
        return sum(size * count for size, count in self._num_taken.items())

    def _place_of(self, offset: int) -> tuple[int, int]:
        number, inside = divmod(offset, self.slab_bytes)
        return number, inside // self._slabs[number].slot_bytes

    def _open(self, number: int, size: int) -> None:
        num_slots = self.slab_bytes // size
        owners = np.full(num_slots, _NOBODY, np.int64)
        self._slabs[number] = _Slab(size, owners, list(reversed(range(num_slots))))
        self._partial.setdefault(size, set()).add(number)
        self._slabs_of.setdefault(size, set()).add(number)

    def _close(self, number: int) -> None:
        """Make an empty slab blank, or give it to the size it was drained for."""
        slab = self._slabs[number]
        assert slab.num_held == 0, "an empty slab with held slots"
        self._partial[slab.slot_bytes].discard(number)
        self._slabs_of[slab.slot_bytes].remove(number)
        if not self._slabs_of[slab.slot_bytes]:
            del self._slabs_of[slab.slot_bytes], self._partial[slab.slot_bytes]
            del self._num_taken[slab.slot_bytes]
        self._slabs[number] = _Slab()
        if slab.next_bytes:
            self._open(number, slab.next_bytes)
        else:
            self._blank.append(number)


def donors(size: int, slabs_of: Mapping[int, int], in_use: Set[int], num_slabs: int) -> list[int]:
    """Return the block sizes that have to make room for ``size``, in the order to try them.

    ``slabs_of`` is the number of slabs of each size, out of ``num_slabs``. Changes nothing.

    >>> donors(1, {1: 3, 37: 5}, {1, 37}, 8)
    [37, 1]
    >>> donors(1, {1: 5, 37: 3}, {1, 37}, 8)
    [1, 37]
    >>> donors(1, {1: 5, 37: 3}, {1}, 8)
    [37, 1]
    """
    fair = num_slabs // len(in_use | {size})
    others = sorted(slabs_of.keys() - {size}, key=lambda other: (-slabs_of[other], other))
    idle = [other for other in others if other not in in_use]
    rich = [other for other in others if other in in_use and slabs_of[other] > fair]
    poor = [other for other in others if other in in_use and slabs_of[other] <= fair]
    own = [size] if size in slabs_of else []
    if slabs_of.get(size, 0) < fair:
        return [*idle, *rich, *own, *poor]
    return [*idle, *own, *rich, *poor]
