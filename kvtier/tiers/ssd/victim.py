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

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import BlockHash
from kvtier.core.limits import PAGE_BYTES
from kvtier.core.table import Rows
from kvtier.tiers.ssd.index import SegmentIndex
from kvtier.tiers.ssd.segment import Entries
from kvtier.tiers.ssd.store_limits import Clock

__all__ = [
    "MOVED_SHARE",
    "Choice",
    "ReadOrder",
    "ReclaimOrder",
    "ValueOrder",
    "ValuePerByte",
    "choose_victim",
    "dead_segment",
]


MOVED_SHARE = 0.25
"""Of a segment of 256 MiB a move reads and writes 64 MiB: 0.1 s on a drive that does 1 GB/s."""

Choice = Callable[[SegmentIndex, Sequence[int], Collection[int]], int | None]
"""Of a store's index, the segments that may go, and of these the unknown ones."""


class ReclaimOrder(Protocol):
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
    """Return the segment to reclaim, like ``ReclaimOrder``, by read counts."""
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


ValuePerByte = Callable[[Sequence[BlockHash]], Sequence[float]]
"""Tells for each block how much a byte of it is worth keeping; from any thread, not exactly."""

_TURN_SEGMENTS = 8
"""Scored at each reclaim because it is their turn: a thousand segments take 125 reclaims, an
eighth of the time in which the store is turned over."""

_DOUBTED_SEGMENTS = 8
"""Scored again, of those that look worst, before one of them goes."""

_SAMPLED_BLOCKS = 64
"""Of a segment; all of 256 MiB where a block is some MiB. Sixteen such samples take some ms."""

_SCORE_AGE_S = 5
"""A score younger than this is not looked at again."""

_STANDS_OUT = 3.0
"""How many times the average worth of a byte what is moved must be worth."""

_WORTH_MAX = 1e12
"""Sums of it, over all blocks of a store, are still exact enough to compare."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Score:
    """What a segment was worth when it was looked at."""

    worth: float
    live_bytes: float
    loss: float
    """For each byte that giving it up frees."""
    loss_moving: float
    """The same, once what stands out has been moved."""
    scored_s: int


class ValueOrder:
    """By what ``worth`` tells; ``now_s`` is the time of day."""

    def __init__(self, segment_bytes: int, worth: ValuePerByte, now_s: Clock) -> None:
        self._segment_bytes = segment_bytes
        self._worth = worth
        self._now_s = now_s
        self._scores: dict[int, _Score] = {}
        self._bar = math.inf
        """What a byte must be worth to be moved."""

    def to_evict(
        self, index: SegmentIndex, candidates: Sequence[int], unknown: Collection[int]
    ) -> int | None:
        """Return the segment that loses least for what it frees; the oldest of equals."""
        return self._choose(index, candidates, unknown, lambda each: each.loss)

    def to_clean(
        self, index: SegmentIndex, candidates: Sequence[int], unknown: Collection[int]
    ) -> int | None:
        """Return the one that does so once what stands out has been moved."""
        return self._choose(index, candidates, unknown, lambda each: each.loss_moving)

    def worth_moving(self, index: SegmentIndex, rows: Rows, entries: Callable[[], Entries]) -> Rows:
        """Return what stands out, most worth first, and of equals the front of a chain first."""
        per_byte = self._per_byte(index, rows)
        if not (per_byte > self._bar).any():
            return rows[:0]
        position = _lift_parents(index, rows, per_byte, entries())
        order = np.lexsort((position, -per_byte))
        ordered: Rows = rows[order[per_byte[order] > self._bar]]
        return ordered

    def _choose(
        self,
        index: SegmentIndex,
        candidates: Sequence[int],
        unknown: Collection[int],
        loss_of: Callable[[_Score], float],
    ) -> int | None:
        """Score some segments, and return the one with the least loss."""
        if not candidates:
            return None
        dead = dead_segment(np.array(candidates), index.count_blocks(candidates), unknown)
        if dead is not None:
            return dead
        if candidates[0] in unknown:
            return candidates[0]
        known = [number for number in candidates if number not in unknown]
        self._scores = {each: self._scores[each] for each in known if each in self._scores}
        now_s = self._now_s()

        def loss(number: int) -> tuple[float, int]:
            return (loss_of(self._scores[number]), number)

        self._score(index, heapq.nsmallest(_TURN_SEGMENTS, known, key=self._looked_at), now_s)
        doubted = heapq.nsmallest(_DOUBTED_SEGMENTS, self._scores, key=loss)
        self._score(index, [each for each in doubted if not self._is_fresh(each, now_s)], now_s)
        worth = sum(score.worth for score in self._scores.values())
        live_bytes = sum(score.live_bytes for score in self._scores.values())
        self._bar = _STANDS_OUT * worth / live_bytes if live_bytes else math.inf
        return min(self._scores, key=loss)

    def _looked_at(self, number: int) -> tuple[int, int]:
        score = self._scores.get(number)
        return (score.scored_s if score else -1, number)

    def _is_fresh(self, number: int, now_s: int) -> bool:
        return 0 <= now_s - self._scores[number].scored_s < _SCORE_AGE_S

    def _score(self, index: SegmentIndex, numbers: Sequence[int], now_s: int) -> None:
        """Look at a few segments anew."""
        if not numbers:
            return
        samples, num_live = [], []
        rows = index.rows_among(numbers)
        segments = index.segment[rows]
        for number in numbers:
            own = rows[segments == number]
            num_live.append(len(own))
            samples.append(own[:: -(-len(own) // _SAMPLED_BLOCKS) or 1])
        sampled = np.concatenate(samples)
        per_byte, sizes = self._per_byte(index, sampled), _sizes_of(index, sampled)
        ends = np.cumsum([len(sample) for sample in samples])[:-1]
        parts = zip(numbers, num_live, np.split(per_byte, ends), np.split(sizes, ends), strict=True)
        for number, live, worths, size in parts:
            scale = live / len(size) if len(size) else 0.0
            self._scores[number] = self._judged(worths, scale * size, now_s)

    def _judged(self, per_byte: _Floats, sizes: _Floats, now_s: int) -> _Score:
        best = np.argsort(-per_byte)
        per_byte, sizes = per_byte[best], sizes[best]
        is_moved = np.cumsum(sizes) <= MOVED_SHARE * self._segment_bytes
        is_moved &= per_byte > self._bar
        worth, live_bytes = float(per_byte @ sizes), float(sizes.sum())
        left = float(per_byte[~is_moved] @ sizes[~is_moved])
        loss_moving = left / (self._segment_bytes - float(sizes[is_moved].sum()))
        return _Score(worth, live_bytes, worth / self._segment_bytes, loss_moving, now_s)

    def _per_byte(self, index: SegmentIndex, rows: Rows) -> _Floats:
        """Return what a byte of each block is worth; never less than nothing, nor endlessly."""
        worth = np.array(self._worth(index.hashes_of(rows)), np.float64)
        return np.nan_to_num(worth, nan=0.0, posinf=_WORTH_MAX, neginf=0.0).clip(0.0, _WORTH_MAX)


def _lift_parents(index: SegmentIndex, rows: Rows, worth: _Floats, listed: Entries) -> Rows:
    """Make each of ``rows`` worth what the best of its children among them is.

    ``listed`` are the entries of their segment. Returns the position of each in its chain.
    """
    place = np.full(len(index.segment), -1, np.int64)  # by row, which of ``rows`` it is
    place[rows] = np.arange(len(rows))
    at = index.find_entries(listed)
    is_meant = (at >= 0) & (place[at] >= 0) & (index.page[at] == listed["page"])
    headers, children = listed["header"][is_meant], place[at[is_meant]]
    position = np.zeros(len(rows), np.int64)
    position[children] = headers["position"]
    parent_rows = index.find_keys(headers["parent_hash"])
    parents = np.where(parent_rows >= 0, place[parent_rows], -1)
    for step in np.argsort(-position[children], kind="stable").tolist():  # the last ones first
        child, parent = children[step], parents[step]
        if parent >= 0:
            worth[parent] = max(worth[parent], worth[child])
    return position


def _sizes_of(index: SegmentIndex, rows: Rows) -> _Floats:
    return index.payload_bytes[rows] + np.float64(PAGE_BYTES)
