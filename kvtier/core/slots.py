"""Which part of the arena belongs to which block: a slab allocator, as plain arithmetic.

The arena is cut into slabs of equal size. A slab serves slots of one size, set when its first slot
is taken and given up when its last one comes back, so that engines with blocks of different sizes
share one arena without fragmenting it. A slot is named by its offset in the arena.
"""

from dataclasses import dataclass, field

from kvtier.core.limits import PAGE_BYTES

__all__ = ["SlabAllocator", "slot_bytes"]


def slot_bytes(block_bytes: int) -> int:
    """Round a block up to whole pages, as direct I/O and mappings need it."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0
    free: dict[int, None] = field(default_factory=dict)
    """Offsets, as an ordered set."""
    num_taken: int = 0


class SlabAllocator:
    """Hands out slots of the arena ``[0, num_slabs * slab_bytes)``.

    Slabs become usable one after the other with ``reserve``, as their memory is made available.
    """

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        assert num_slabs > 0
        assert slab_bytes % PAGE_BYTES == 0
        self.slab_bytes = slab_bytes
        self._slabs = [_Slab() for _ in range(num_slabs)]
        self._num_reserved = 0
        self._blank: list[int] = []
        self._partial: dict[int, set[int]] = {}

    @property
    def capacity_bytes(self) -> int:
        """Return the size of the whole arena."""
        return len(self._slabs) * self.slab_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return how much of the arena has memory behind it so far."""
        return self._num_reserved * self.slab_bytes

    def reserve(self, num_slabs: int) -> None:
        """Make the first ``num_slabs`` slabs usable; never takes any back."""
        num_slabs = min(num_slabs, len(self._slabs))
        fresh = range(self._num_reserved, num_slabs)
        self._blank.extend(reversed(fresh))
        self._num_reserved = max(self._num_reserved, num_slabs)

    def take(self, size: int) -> int | None:
        """Return the offset of a free slot of ``size`` bytes, or None when there is none."""
        assert 0 < size <= self.slab_bytes
        partial = self._partial.setdefault(size, set())
        if not partial:
            if not self._blank:
                return None
            self._open(self._blank.pop(), size)
        number = min(partial)
        slab = self._slabs[number]
        slab.num_taken += 1
        offset, _ = slab.free.popitem()
        if not slab.free:
            partial.remove(number)
        return offset

    def give(self, offset: int) -> None:
        """Take back a slot; the last one of a slab makes the slab blank again."""
        number = offset // self.slab_bytes
        slab = self._slabs[number]
        assert slab.num_taken > 0, "a slot is given back once"
        assert offset not in slab.free, "a slot is given back once"
        slab.num_taken -= 1
        slab.free[offset] = None
        self._partial[slab.slot_bytes].add(number)
        if slab.num_taken == 0:
            self._partial[slab.slot_bytes].remove(number)
            self._slabs[number] = _Slab()
            self._blank.append(number)

    def size_at(self, offset: int) -> int:
        """Return the slot size of the slab at ``offset``."""
        return self._slabs[offset // self.slab_bytes].slot_bytes

    def num_taken_at(self, offset: int) -> int:
        """Return how many slots of the slab at ``offset`` are taken."""
        return self._slabs[offset // self.slab_bytes].num_taken

    def slab_range(self, offset: int) -> tuple[int, int]:
        """Return the half-open range of offsets of the slab around ``offset``."""
        start = offset // self.slab_bytes * self.slab_bytes
        return start, start + self.slab_bytes

    def used_bytes(self) -> int:
        """Return the bytes of the slots that are taken."""
        return sum(slab.num_taken * slab.slot_bytes for slab in self._slabs)

    def _open(self, number: int, size: int) -> None:
        start = number * self.slab_bytes
        offsets = range(start, start + self.slab_bytes - size + 1, size)
        self._slabs[number] = _Slab(size, dict.fromkeys(reversed(offsets)))
        self._partial[size].add(number)
