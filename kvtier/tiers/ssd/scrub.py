"""Finding damaged blocks before they are asked for, a few at a time.

A pass takes the segments in the order they were made, and the records of each in the order they
were appended; what is appended meanwhile is for the next pass. The first pass of a process begins
anywhere, so that one that is restarted often does not always verify the same blocks. Records are
read as reads do it, one at a time, so that nobody waits for more than one of them.

Rules
-----
* A record that fails is read once more, as for a read. Then it is forgotten and quarantined.
* Where the medium fails the record is left alone and stepped over: it may be readable later, and
  whoever asks for it will see.
* Blocks that are too old are forgotten. A segment of which nothing counts any more is given up,
  and only then do their bytes leave the disk.
"""

import contextlib
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvtier.core.identity import BlockHash
from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import TierTimeout
from kvtier.tiers.base import Scrubbed
from kvtier.tiers.check import seconds_left
from kvtier.tiers.seal import Seal
from kvtier.tiers.ssd.damage import Quarantine, check_record, read_record
from kvtier.tiers.ssd.disk import ShortRead
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import record_bytes
from kvtier.tiers.ssd.segment import Segment
from kvtier.tiers.ssd.store_limits import AgeLimit

__all__ = ["SegmentScrubber"]

_EXPIRED_MAX = 16_384
"""Blocks forgotten for their age in one step, while everybody else waits: about 5 ms."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A record that counts, as the index knows it."""

    block_hash: BlockHash
    page: int
    payload_bytes: int


class SegmentScrubber:
    """Verifies a pool's records step by step; calls take turns."""

    def __init__(
        self,
        pool: SegmentPool,
        seal: Seal,
        age: AgeLimit,
        quarantine: Quarantine,
        *,
        start: int,
    ) -> None:
        self._pool = pool
        self._seal = seal
        self._age = age
        self._quarantine = quarantine
        self._start = start
        """Any number: decides where the first pass begins."""
        self._segments: deque[int] = deque()
        """Left in this pass; of the first of them, from ``_page`` on."""
        self._page = 0
        self._turn = threading.Lock()
        self._damaged: list[BlockHash] = []
        self._expired: list[BlockHash] = []
        """Not reported yet; also what was found by a step that failed."""

    def expire(self) -> None:
        """Forget blocks that are too old, a bounded number of them; the next step reports them."""
        oldest_s = self._age.oldest_s()
        with self._pool.lock:
            index = self._pool.index
            rows = index.expired_rows(oldest_s)[:_EXPIRED_MAX]
            self._expired += index.hashes_of(rows)
            index.drop(rows)

    def drop_dead(self) -> None:
        """Give up the segments of which nothing counts any more. For the one that changes files."""
        pool = self._pool
        with pool.lock:
            dead = pool.segments.keys() - pool.index.live_segments()
            segments = [pool.segments[number] for number in dead]
        with contextlib.suppress(OSError):  # counted all the while, and tried again next time
            pool.sweep()
        for segment in segments:
            is_begun = segment is not pool.active or segment.tail_bytes > PAGE_BYTES
            is_kept = segment.is_unknown or (segment.is_set_aside and not self._age.oldest_s())
            if is_begun and not is_kept:
                pool.retire(segment)

    def step(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify the next records: one, and those begun within ``max_bytes`` and the deadline.

        Raises OSError where the medium fails; the next step goes on behind that record. Raises
        TierTimeout where another step is under way all the time.
        """
        if not self._turn.acquire(timeout=seconds_left(deadline_ns)):
            raise TierTimeout("ssd: another scrub did not end in time")
        try:
            num_blocks, num_bytes = self._verify(max_bytes, deadline_ns) if max_bytes else (0, 0)
            damaged, self._damaged = tuple(self._damaged), []
            with self._pool.lock:
                expired, self._expired = tuple(self._expired), []
            is_over = not self._segments
            return Scrubbed(num_blocks, num_bytes, damaged, expired, is_pass_over=is_over)
        finally:
            self._turn.release()

    def _verify(self, max_bytes: int, deadline_ns: int) -> tuple[int, int]:
        """Go on with the pass; returns how many blocks, and how many bytes, were read."""
        num_blocks = num_bytes = 0
        if not self._segments:
            self._begin_pass()
        while self._segments:
            number = self._segments[0]
            for place in self._places(number):
                if num_blocks and (num_bytes >= max_bytes or time.monotonic_ns() >= deadline_ns):
                    return num_blocks, num_bytes
                self._page = place.page + 1
                num_blocks += 1
                num_bytes += record_bytes(place.payload_bytes)
                if self._take_out_if_damaged(number, place):
                    self._damaged.append(place.block_hash)
            self._segments.popleft()
            self._page = 0
        return num_blocks, num_bytes

    def _begin_pass(self) -> None:
        with self._pool.lock:
            self._segments.extend(sorted(self._pool.segments))
        if self._segments:
            self._segments.rotate(self._start % len(self._segments))
        self._start = 0

    def _places(self, number: int) -> list[_Place]:
        """Return the records of a segment that count, from where the last step ended."""
        with self._pool.lock:
            index = self._pool.index
            rows = index.rows_of(number)
            rows = rows[index.page[rows] >= self._page]
            rows = rows[np.argsort(index.page[rows])]
            columns = index.page[rows].tolist(), index.payload_bytes[rows].tolist()
            return [_Place(*each) for each in zip(index.hashes_of(rows), *columns, strict=True)]

    def _take_out_if_damaged(self, number: int, place: _Place) -> bool:
        """Verify a record; where it is damaged, forget and quarantine it, and return True."""
        pool = self._pool
        with pool.lock:
            if not self._is_there(number, place):
                return False  # given up, removed or moved since
            segment = pool.segments[number]
            segment.num_pins += 1
        try:
            # Twice: a fault on the way is not one of the record.
            if not (self._is_damaged(segment, place) and self._is_damaged(segment, place)):
                return False
            with pool.lock:
                is_there = self._is_there(number, place)
                if is_there:
                    pool.index.drop(pool.index.find([place.block_hash]))
            if is_there:
                self._quarantine.add(segment, [place.page])
            return is_there
        finally:
            pool.unpin(segment)

    def _is_damaged(self, segment: Segment, place: _Place) -> bool:
        memory = memoryview(mmap.mmap(-1, record_bytes(place.payload_bytes)))
        try:
            with self._pool.disk.opened(segment.path) as fd:
                read_record(self._pool.disk, fd, place.page, memory)
        except (ShortRead, FileNotFoundError):
            return True
        found = check_record(memory, segment.number, self._seal)
        is_another = found.header is not None and found.header.block_hash != place.block_hash
        return is_another or found.is_damage

    def _is_there(self, number: int, place: _Place) -> bool:
        index = self._pool.index
        (row,) = index.find([place.block_hash]).tolist()
        return row >= 0 and (index.segment[row], index.page[row]) == (number, place.page)
