"""Chooses the segment to reclaim, and which of its blocks to move first.

Theory: by reads
----------------
``ReadOrder`` is the cost-benefit rule of log-structured file systems (Rosenblum and Ousterhout,
1992). With *u* the share of a segment that is worth keeping, cleaning it reads and writes about ``1
+ u`` and frees ``1 - u``; the older it is, the longer the freed space stays free. The segment with
the largest ``(1 - u) * age / (1 + u)`` is reclaimed. Blocks read since they were written are worth
keeping. One-off blocks, the majority in any trace, cost nothing, so a store without reads is first
in, first out. Age is counted in segments created since, which needs no clock.

Only a share of a segment can be moved. A segment with more to keep is reclaimed after all others,
since its hot blocks would be lost with it. It cools down, since read counts are halved with each
turnover of the store.

Theory: by value
----------------
``ValueOrder`` is used if the store is told the value of its blocks. Removing a segment loses the
value of its blocks and frees its bytes; blocks that are moved first are neither lost nor freed. The
segment that loses the least per freed byte is reclaimed. Moving costs writes and space, so only
blocks worth several times the store's average byte are moved: if no block stands out, nothing is
moved, and a scan costs no writes.

Values fall every second, and there may be thousands of segments. So each reclaim scores a few
segments in turn, and once more the few that look worst; others count with their last score. A
segment is scored by a sample of its blocks.

A block is never found without its parent, so a parent is worth at least as much as its children in
the same segment, and is moved before them. Children in other segments are not considered.
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
"""Share of a segment that may be moved: of 256 MiB, a move reads and writes 64 MiB, 0.1 s at 1
GB/s.
"""

Choice = Callable[[SegmentIndex, Sequence[int], Collection[int]], int | None]
"""Selects a segment, given the index, the segments that may go, and the unreadable ones of them."""


class ReclaimOrder(Protocol):
    """Chooses what to reclaim first. Called by the writer, without the pool's lock.

    Its view of the index may miss concurrent reads.
    """

    def to_evict(
        self, index: SegmentIndex, candidates: Sequence[int], unreadable: Collection[int]
    ) -> int | None:
        """Return the segment to remove as it is; None without ``candidates``.

        Candidates are in ascending order. A segment without live blocks goes first, since it costs
        nothing. The contents of ``unreadable`` segments are unknown; they go in turn.
        """

    def to_clean(
        self, index: SegmentIndex, candidates: Sequence[int], unreadable: Collection[int]
    ) -> int | None:
        """Return the segment to remove if its valuable blocks are moved first."""

    def blocks_to_move(
        self, index: SegmentIndex, rows: Rows, entries: Callable[[], Entries]
    ) -> Rows:
        """Return those of a segment's ``rows`` that are worth moving, the best first.

        ``entries`` reads the entries of the segment. Raises OSError.
        """


class ReadOrder:
    """Orders segments by the reads of their blocks."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes

    def to_evict(
        self, index: SegmentIndex, candidates: Sequence[int], unreadable: Collection[int]
    ) -> int | None:
        """Return the segment with the most to gain by the cost-benefit rule."""
        return choose_victim(index, candidates, self._segment_bytes, unreadable)

    to_clean = to_evict

    def blocks_to_move(
        self, index: SegmentIndex, rows: Rows, entries: Callable[[], Entries]
    ) -> Rows:
        """Return the blocks that were read, most read first."""
        rows = rows[index.reads[rows] > 0]
        ordered: Rows = rows[np.lexsort((index.page[rows], -index.reads[rows].astype(int)))]
        return ordered


def choose_victim(
    index: SegmentIndex,
    candidates: Sequence[int],
    segment_bytes: int,
    unreadable: Collection[int] = (),
) -> int | None:
    """Return the segment to reclaim by read counts; see ``ReclaimOrder``."""
    if not candidates:
        return None
    numbers = np.array(candidates)
    dead = dead_segment(numbers, index.count_blocks(candidates), unreadable)
    if dead is not None:
        return dead
    kept = index.read_bytes(candidates) / segment_bytes
    gain = (1 - kept) * (candidates[-1] + 1 - numbers) / (1 + kept)
    if (kept <= MOVED_SHARE).any():
        gain[kept > MOVED_SHARE] = 0
    return int(numbers[np.argmax(gain)])  # the first of equals is the oldest


def dead_segment(numbers: Rows, num_blocks: Rows, unreadable: Collection[int]) -> int | None:
    """Return the first segment that is known to have no live blocks."""
    is_dead = (num_blocks == 0) & ~np.isin(numbers, list(unreadable))
    return int(numbers[np.argmax(is_dead)]) if is_dead.any() else None


ValuePerByte = Callable[[Sequence[BlockHash]], Sequence[float]]
"""Returns the value of keeping a byte of each block, approximately. Thread-safe."""

_TURN_SEGMENTS = 8
"""Segments scored in turn at each reclaim: a thousand segments take 125 reclaims, an eighth of the
store's turnover.
"""

_RESCORED_SEGMENTS = 8
"""Segments with the worst scores that are scored again before one of them goes."""

_SAMPLED_BLOCKS = 64
"""Sampled blocks of a segment; all blocks of 256 MiB if each has some MiB. Sixteen such samples
take a few ms.
"""

_SCORE_AGE_S = 5
"""A younger score is not renewed."""

_STANDS_OUT = 3.0
"""A block is moved if a byte of it is worth this many times the average."""

_VALUE_MAX = 1e12
"""Sums of this over all blocks of a store are still exact enough to compare."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Score:
    """Value of a segment when it was scored."""

    value: float
    live_bytes: float
    loss: float
    """Value lost per byte that removing the segment frees."""
    loss_moving: float
    """The same after the most valuable blocks have been moved."""
    scored_s: int


class ValueOrder:
    """Orders segments by the value of their blocks; ``now_s`` is the time of day."""

    def __init__(self, segment_bytes: int, value: ValuePerByte, now_s: Clock) -> None:
        self._segment_bytes = segment_bytes
        self._value = value
        self._now_s = now_s
        self._scores: dict[int, _Score] = {}
        self._least_moved = math.inf
        """Least value of a byte that is moved."""

    def to_evict(
        self, index: SegmentIndex, candidates: Sequence[int], unreadable: Collection[int]
    ) -> int | None:
        """Return the segment that loses the least per freed byte; the oldest of equals."""
        return self._choose(index, candidates, unreadable, lambda each: each.loss)

    def to_clean(
        self, index: SegmentIndex, candidates: Sequence[int], unreadable: Collection[int]
    ) -> int | None:
        """Return the segment that loses the least after its best blocks have been moved."""
        return self._choose(index, candidates, unreadable, lambda each: each.loss_moving)

    def blocks_to_move(
        self, index: SegmentIndex, rows: Rows, entries: Callable[[], Entries]
    ) -> Rows:
        """Return blocks that stand out, most valuable first, then from the front of a chain."""
        per_byte = self._per_byte(index, rows)
        if not (per_byte > self._least_moved).any():
            return rows[:0]
        position = _lift_parents(index, rows, per_byte, entries())
        order = np.lexsort((position, -per_byte))
        ordered: Rows = rows[order[per_byte[order] > self._least_moved]]
        return ordered

    def _choose(
        self,
        index: SegmentIndex,
        candidates: Sequence[int],
        unreadable: Collection[int],
        loss_of: Callable[[_Score], float],
    ) -> int | None:
        """Score some segments and return the one with the least loss."""
        if not candidates:
            return None
        dead = dead_segment(np.array(candidates), index.count_blocks(candidates), unreadable)
        if dead is not None:
            return dead
        if candidates[0] in unreadable:
            return candidates[0]
        known = [number for number in candidates if number not in unreadable]
        self._scores = {each: self._scores[each] for each in known if each in self._scores}
        now_s = self._now_s()

        def loss(number: int) -> tuple[float, int]:
            return (loss_of(self._scores[number]), number)

        self._score(index, heapq.nsmallest(_TURN_SEGMENTS, known, key=self._scored_at), now_s)
        worst = heapq.nsmallest(_RESCORED_SEGMENTS, self._scores, key=loss)
        self._score(index, [each for each in worst if not self._is_fresh(each, now_s)], now_s)
        value = sum(score.value for score in self._scores.values())
        live_bytes = sum(score.live_bytes for score in self._scores.values())
        self._least_moved = _STANDS_OUT * value / live_bytes if live_bytes else math.inf
        return min(self._scores, key=loss)

    def _scored_at(self, number: int) -> tuple[int, int]:
        score = self._scores.get(number)
        return (score.scored_s if score else -1, number)

    def _is_fresh(self, number: int, now_s: int) -> bool:
        return 0 <= now_s - self._scores[number].scored_s < _SCORE_AGE_S

    def _score(self, index: SegmentIndex, numbers: Sequence[int], now_s: int) -> None:
        """Score segments anew."""
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
        is_moved &= per_byte > self._least_moved
        value, live_bytes = float(per_byte @ sizes), float(sizes.sum())
        left = float(per_byte[~is_moved] @ sizes[~is_moved])
        loss_moving = left / (self._segment_bytes - float(sizes[is_moved].sum()))
        return _Score(value, live_bytes, value / self._segment_bytes, loss_moving, now_s)

    def _per_byte(self, index: SegmentIndex, rows: Rows) -> _Floats:
        """Return the value of a byte of each block, at least 0 and bounded."""
        value = np.array(self._value(index.hashes_of(rows)), np.float64)
        return np.nan_to_num(value, nan=0.0, posinf=_VALUE_MAX, neginf=0.0).clip(0.0, _VALUE_MAX)


def _lift_parents(index: SegmentIndex, rows: Rows, value: _Floats, listed: Entries) -> Rows:
    """Raise the value of each of ``rows`` to that of its best child among them.

    ``listed`` are the entries of their segment. Returns the position of each block in its chain.
    """
    place = np.full(len(index.segment), -1, np.int64)  # index into ``rows`` by row
    place[rows] = np.arange(len(rows))
    at = index.find_entries(listed)
    is_meant = (at >= 0) & (place[at] >= 0) & (index.page[at] == listed["page"])
    headers, children = listed["header"][is_meant], place[at[is_meant]]
    position = np.zeros(len(rows), np.int64)
    position[children] = headers["position"]
    parent_rows = index.find_keys(headers["parent_hash"])
    parents = np.where(parent_rows >= 0, place[parent_rows], -1)
    for step in np.argsort(
        -position[children], kind="stable"
    ).tolist():  # from the end of the chain
        child, parent = children[step], parents[step]
        if parent >= 0:
            value[parent] = max(value[parent], value[child])
    return position


def _sizes_of(index: SegmentIndex, rows: Rows) -> _Floats:
    return index.payload_bytes[rows] + np.float64(PAGE_BYTES)
