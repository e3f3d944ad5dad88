"""Which part of the arena belongs to which block: a slab allocator, as plain arithmetic.

The arena is cut into slabs of equal size. A slab serves slots of one size, set when its first slot
is taken and given up when its last one comes back, so that engines with blocks of different sizes
share one arena without fragmenting it. A slot is named by its offset in the arena, and has an
owner: a number that its user chose. It may be *held*: its owner cannot leave it now.
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
    """Round a block up to whole pages, as direct I/O and mappings need it."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0
    owners: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """By slot, who has it."""
    free: list[int] = field(default_factory=list)
    """A stack of slots."""
    num_held: int = 0
    next_bytes: int = 0
    """If not 0, nothing more is taken here, and once empty it serves slots of this size."""

    @property
    def num_taken(self) -> int:
        return len(self.owners) - len(self.free)


class SlabAllocator:
    """Hands out slots of the arena ``[0, num_slabs * slab_bytes)``.

    Slabs become usable one after the other with ``reserve``, as their memory is made available.
    """

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        assert num_slabs > 0
        assert slab_bytes % PAGE_BYTES == 0
        self.slab_bytes = slab_bytes
        self.held_bytes = 0
        """Of all slots that are held."""
        self._slabs = [_Slab() for _ in range(num_slabs)]
        self._num_reserved = 0
        self._blank: list[int] = []
        self._partial: dict[int, set[int]] = {}
        """By slot size, the slabs from which a slot can be taken."""
        self._slabs_of: dict[int, set[int]] = {}
        """By slot size, all its slabs; no size without any."""
        self._num_taken: Counter[int] = Counter()
        """By slot size, the slots that are taken."""

    @property
    def capacity_bytes(self) -> int:
        """Return the size of the whole arena."""
        return len(self._slabs) * self.slab_bytes

    @property
    def num_reserved(self) -> int:
        """Return how many slabs have memory behind them."""
        return self._num_reserved

    @property
    def reserved_bytes(self) -> int:
        """Return how much of the arena has memory behind it so far."""
        return self._num_reserved * self.slab_bytes

    def reserve(self, num_slabs: int) -> None:
        """Make the first ``num_slabs`` slabs usable; never takes any back."""
        num_slabs = min(num_slabs, len(self._slabs))
        fresh = range(self._num_reserved, num_slabs)
        # Low offsets first, so that a small cache touches little memory.
        self._blank = [*reversed(fresh), *self._blank]
        self._num_reserved = max(self._num_reserved, num_slabs)

    def take(self, size: int, owner: int) -> int | None:
        """Return the offset of a free slot of ``size`` bytes, or None when there is none."""
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

    def take_some(self, size: int, owners: Rows) -> list[int]:
        """Take and hold a slot for each of the leading owners, as many as are free.

        Returns their offsets, which are those that ``take`` would have given one by one.
        """
        offsets: list[int] = []
        while len(offsets) < len(owners):
            offset = self.take(size, int(owners[len(offsets)]))
            if offset is None:
                break
            number = offset // self.slab_bytes
            slab = self._slabs[number]
            offsets.append(offset)
            # The rest of what this slab has: looking for the slab costs more than a slot of it.
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

    def give(self, offset: int) -> None:
        """Take back a slot that is not held; the last one of a slab makes the slab blank again."""
        number, place = self._place_of(offset)
        slab = self._slabs[number]
        assert slab.owners[place] != _NOBODY, "a slot is given back once"
        slab.owners[place] = _NOBODY
        slab.free.append(place)
        self._num_taken[slab.slot_bytes] -= 1
        if not slab.next_bytes:
            self._partial[slab.slot_bytes].add(number)
        if slab.num_taken == 0:
            self._close(number)

    def hold(self, offset: int) -> None:
        """Note that a slot's owner cannot leave it until the matching ``let_go``."""
        slab = self._slabs[offset // self.slab_bytes]
        slab.num_held += 1
        self.held_bytes += slab.slot_bytes

    def let_go(self, offset: int) -> None:
        """End one ``hold``."""
        slab = self._slabs[offset // self.slab_bytes]
        assert slab.num_held > 0, "every let_go has its hold"
        slab.num_held -= 1
        self.held_bytes -= slab.slot_bytes

    # Sizes and their slabs

    def sizes(self) -> Set[int]:
        """Return the slot sizes that have slabs."""
        return self._slabs_of.keys()

    def num_slabs_of(self, size: int) -> int:
        """Return how many slabs serve slots of a size."""
        return len(self._slabs_of.get(size, ()))

    def has_room_share(self, size: int, share: float) -> bool:
        """Tell whether at least this share of all slots that a size can have is free."""
        num_slabs = self.num_slabs_of(size) + len(self._blank)
        num_slots = num_slabs * (self.slab_bytes // size)
        return num_slots - self._num_taken[size] >= share * num_slots

    def num_free(self, size: int) -> int:
        """Return how many slots of a size can be taken without evicting anything."""
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
        """Return the number of the slab around ``offset``."""
        return offset // self.slab_bytes

    def slabs_by_held(self, size: int) -> list[tuple[int, int]]:
        """Return for each slab of a size that is not being drained how many of its slots are held.

        As pairs of that count and the slab, in ascending order.
        """
        numbers = self._slabs_of.get(size, ())
        slabs = ((self._slabs[number], number) for number in numbers)
        return sorted((slab.num_held, number) for slab, number in slabs if not slab.next_bytes)

    def drain(self, number: int, size: int) -> None:
        """Take nothing more from a slab, and let it serve slots of ``size`` once it is empty."""
        slab = self._slabs[number]
        assert slab.slot_bytes != size
        slab.next_bytes = size
        self._partial[slab.slot_bytes].discard(number)
        if slab.num_taken == 0:
            self._close(number)

    def clear(self, number: int) -> None:
        """Make a slab without any taken slot blank."""
        assert self._slabs[number].num_taken == 0
        self._close(number)

    def num_draining_for(self, size: int) -> int:
        """Return how many slabs are being drained for a size."""
        return sum(slab.next_bytes == size for slab in self._slabs)

    def size_at(self, offset: int) -> int:
        """Return the slot size of the slab at ``offset``."""
        return self._slabs[offset // self.slab_bytes].slot_bytes

    def used_bytes(self) -> int:
        """Return the bytes of the slots that are taken."""
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
        """Make an empty slab blank, or let it serve the size it was drained for."""
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
    """Return the block sizes that are to make room for ``size``, first who should first.

    ``slabs_of`` tells how many of the ``num_slabs`` slabs each size has. Changes nothing.

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
