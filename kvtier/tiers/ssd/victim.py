"""Which segment goes when space is needed, and what of it is moved: by what was read.

Theory
------
The cost-benefit rule of log-structured file systems (Rosenblum and Ousterhout, 1992). With *u* the
share of a segment that is worth keeping, cleaning it reads and writes about ``1 + u`` and frees
``1 - u``; the older it is, the longer what is freed will stay so. The segment with the most
``(1 - u) * age / (1 + u)`` goes. Worth keeping is what has been read since it was written: one-off
blocks, the most of any trace, cost nothing, so that a store that nobody reads is first in, first
out. Age is counted in segments made since, which needs no clock.

Only a share of a segment can be moved. One that has more worth keeping goes after all others: what
is hot would be lost with it. It cools down, since counts of reads are halved with each turnover.

Where a store is told what its blocks are worth, worth.py decides instead.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from kvtier.core.table import Rows
from kvtier.tiers.ssd.index import SegmentIndex
from kvtier.tiers.ssd.segment import Entries

__all__ = ["MOVED_SHARE", "Choice", "ReadOrder", "VictimOrder", "choose_victim", "dead_segment"]

MOVED_SHARE = 0.25
"""Of a segment of 256 MiB a move reads and writes 64 MiB: 0.1 s on a drive that does 1 GB/s."""

Choice = Callable[[SegmentIndex, Sequence[int], Collection[int]], int | None]
"""Of a store's index, the segments that may go, and of these the unknown ones."""


class VictimOrder(Protocol):
    """What is given up first. Asked by the one that changes files, without the pool's lock.

    What it sees of an index may be off by the reads that go on meanwhile.
    """

    def to_evict(
        self, index: SegmentIndex, candidates: Sequence[int], unknown: Collection[int]
    ) -> int | None:
        """Return the segment to go as it is, of ``candidates`` in ascending order; None of none.

        One without a block that counts goes before all others: it costs nothing. Of ``unknown``
        ones nobody can tell, and they go when it is their turn.
        """

    def to_clean(
        self, index: SegmentIndex, candidates: Sequence[int], unknown: Collection[int]
    ) -> int | None:
        """Return the segment to go if what is worth it is moved before."""

    def worth_moving(self, index: SegmentIndex, rows: Rows, entries: Callable[[], Entries]) -> Rows:
        """Return those of a segment's ``rows`` that are worth moving, the best first.

        ``entries`` reads the segment's list of contents; raises OSError.
        """


class ReadOrder:
    """By what has been read since it was written."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes

    def to_evict(
        self, index: SegmentIndex, candidates: Sequence[int], unknown: Collection[int]
    ) -> int | None:
        """Return the segment with the most to gain, by the cost-benefit rule."""
        return choose_victim(index, candidates, self._segment_bytes, unknown)

    to_clean = to_evict

    def worth_moving(self, index: SegmentIndex, rows: Rows, entries: Callable[[], Entries]) -> Rows:
        """Return what was read, most read first."""
        rows = rows[index.reads[rows] > 0]
        ordered: Rows = rows[np.lexsort((index.page[rows], -index.reads[rows].astype(int)))]
        return ordered


def choose_victim(
    index: SegmentIndex,
    candidates: Sequence[int],
    segment_bytes: int,
    unknown: Collection[int] = (),
) -> int | None:
    """Return the segment to reclaim, like ``VictimOrder``, by read counts."""
    if not candidates:
        return None
    numbers = np.array(candidates)
    dead = dead_segment(numbers, index.count_blocks(candidates), unknown)
    if dead is not None:
        return dead
    kept = index.read_bytes(candidates) / segment_bytes
    gain = (1 - kept) * (candidates[-1] + 1 - numbers) / (1 + kept)
    if (kept <= MOVED_SHARE).any():
        gain[kept > MOVED_SHARE] = 0
    return int(numbers[np.argmax(gain)])  # the first, and so the oldest, of equals


def dead_segment(numbers: Rows, num_blocks: Rows, unknown: Collection[int]) -> int | None:
    """Return the first segment that is known to hold nothing."""
    is_dead = (num_blocks == 0) & ~np.isin(numbers, list(unknown))
    return int(numbers[np.argmax(is_dead)]) if is_dead.any() else None
