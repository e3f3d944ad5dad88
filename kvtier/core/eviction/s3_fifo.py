"""S3-FIFO eviction, leaves first: two queues, with promotion from the small to the main one.

Theory
------
Most blocks are never requested again, and a small queue evicts them quickly. Blocks that are used
while in it move to the main queue, where each further use earns another round. A block with a
ghost, seen before it came, starts in the main queue (Yang et al., FIFO queues are all you need for
cache eviction, 2023). The paper's small queue is a tenth; prefixes come back late, and a quarter
does better on conversations.

The queues do not know chains, so a block with a child in the tier is skipped until the child has
gone. The history counts uses, once per request.
"""

from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from kvtier.core.eviction.base import first_victims, remaining_by_age, stamp_chain
from kvtier.core.identity import BlockHash
from kvtier.core.index import BlockIndex
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.table import Rows

__all__ = ["S3Fifo"]

_SMALL_SHARE = 0.25

_ROUNDS_MAX = 3
"""The most rounds in the main queue that a block can earn."""

_Queue = OrderedDict[BlockHash, tuple[int, int]]
"""By hash, (row, times seen when its round began); the oldest first."""


_Place = tuple[_Queue, int, int]
"""The queue of a block, and its entry there."""


@dataclass(slots=True)
class _Pair:
    """The queues of one slot size."""

    small: _Queue = field(default_factory=OrderedDict)
    main: _Queue = field(default_factory=OrderedDict)


class S3Fifo:
    """S3-FIFO that evicts leaves before parents."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._clock = 1
        self._pairs: dict[int, _Pair] = {}

    def touch(self, index: BlockIndex, rows: Rows) -> int:
        """Stamp a chain's leading blocks, to spare them; the history counts the use."""
        mark = self._clock
        self._clock = stamp_chain(index, rows, mark)
        return mark

    def offer(self, index: BlockIndex, row: int) -> None:
        """Add a new block to the queue that its history earned."""
        pair = self._pairs.setdefault(slot_bytes(int(index.payload_bytes[row])), _Pair())
        key = index.hash_of(row)
        known = pair.small.get(key) or pair.main.get(key)
        if known is None or known[0] != row:
            seen = self._history.times_seen(key)
            pair.small.pop(key, None)
            pair.main.pop(key, None)
            (pair.main if seen > 1 else pair.small)[key] = (row, seen)

    def victims(
        self, index: BlockIndex, slots: SlabAllocator, size: int, before: int | None = None
    ) -> Generator[int, None, None]:
        """Yield rows whose round ends unused, then the remaining ones by age."""
        limit = self._clock if before is None else before
        pair = self._pairs.setdefault(size, _Pair())
        skipped: dict[BlockHash, _Place] = {}
        proposed: set[int] = set()
        gone: Counter[BlockHash] = Counter()
        try:
            for key, place, num_children in self._rounds_ending(index, pair):
                skipped[key] = place
                row = place[1]
                if index.stamp[row] >= limit or not index.is_evictable(row):
                    continue
                if num_children > gone[key]:
                    continue
                proposed.add(row)
                yield row
                parent = BlockHash(index.parent[row].tobytes())
                gone[parent] += 1
                if parent in skipped:  # it was skipped, and may be a leaf now
                    _put_first(parent, skipped.pop(parent))
            yield from remaining_by_age(index, slots, size, limit, proposed)
        finally:
            for key, place in reversed(skipped.items()):
                _put_first(key, place)

    def next_victims(self, index: BlockIndex, slots: SlabAllocator, size: int, count: int) -> Rows:
        """Return what ``victims`` would yield next, a bounded number."""
        return first_victims(self.victims(index, slots, size), count)

    def _rounds_ending(
        self, index: BlockIndex, pair: _Pair
    ) -> Iterator[tuple[BlockHash, _Place, int]]:
        """Yield the entries at the front that were not used, with their number of children.

        Used entries start another round. Each block is examined a bounded number of times.
        """
        for _ in range((_ROUNDS_MAX + 2) * (len(pair.small) + len(pair.main))):
            is_small = len(pair.small) > _SMALL_SHARE * (len(pair.small) + len(pair.main))
            queue = pair.small if is_small or not pair.main else pair.main
            if not queue:
                return
            key, (row, seen) = queue.popitem(last=False)
            if not _is_there(index, row, key):
                continue
            seen_now, num_children = self._history.uses_and_children(TierName.CPU, key)
            num_uses = seen_now - seen
            if num_uses <= 0:
                yield key, (queue, row, seen), num_children
            elif queue is pair.small:
                pair.main[key] = (row, seen_now)
            else:
                pair.main[key] = (row, seen + max(1, num_uses - _ROUNDS_MAX + 1))


def _put_first(key: BlockHash, place: _Place) -> None:
    queue, row, seen = place
    queue[key] = (row, seen)
    queue.move_to_end(key, last=False)


def _is_there(index: BlockIndex, row: int, key: BlockHash) -> bool:
    """Return whether a row still holds this block, ready."""
    is_same = index.hash_of(row) == key
    return is_same and index.cell(row, TierName.CPU) == Residency.READY
