"""Finds damaged blocks before they are requested, a few at a time.

A pass visits the segments in order of creation and their records in order of writing; records
appended meanwhile are left to the next pass. The first pass of a process starts at a random
segment, so that frequent restarts do not verify the same blocks again and again. Records are read
one at a time, like reads, so that no read waits for more than one of them.

Rules
-----
* A record that fails is read once more, as in a read. Then it is forgotten and quarantined.
* If the device fails, the record is skipped: it may be readable later, and a read will find out.
* Blocks that are too old are forgotten. A segment without live blocks is removed; only then do
  their bytes leave the disk.
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
"""Blocks expired in one step, while all other calls wait: about 5 ms."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A live record, as the index knows it."""

    block_hash: BlockHash
    page: int
    payload_bytes: int


class SegmentScrubber:
    """Verifies a pool's records step by step; one call at a time."""

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
        """Decides where the first pass begins; any number."""
        self._segments: deque[int] = deque()
        """Segments left in this pass; the first one from ``_page`` on."""
        self._page = 0
        self._turn = threading.Lock()
        self._damaged: list[BlockHash] = []
        self._expired: list[BlockHash] = []
        """Not reported yet, including the findings of a failed step."""

    def expire(self) -> None:
        """Forget a bounded number of blocks that are too old; the next step reports them."""
        oldest_s = self._age.oldest_s()
        with self._pool.lock:
            index = self._pool.index
            rows = index.expired_rows(oldest_s)[:_EXPIRED_MAX]
            self._expired += index.hashes_of(rows)
            index.drop(rows)

    def remove_dead_segments(self) -> None:
        """Remove the segments without live blocks. For the writer only."""
        pool = self._pool
        with pool.lock:
            dead = pool.segments.keys() - pool.index.live_segments()
            segments = [pool.segments[number] for number in dead]
        with contextlib.suppress(OSError):  # still counted; tried again next time
            pool.remove_retired_files()
        for segment in segments:
            is_begun = segment is not pool.active or segment.tail_bytes > PAGE_BYTES
            is_kept = segment.is_unreadable or (segment.is_set_aside and not self._age.oldest_s())
            if is_begun and not is_kept:
                pool.retire(segment)

    def step(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify the next records: one, and others started within ``max_bytes`` and the deadline.

        Raises OSError if the device fails; the next step continues behind that record. Raises
        TierTimeout if another step runs all the time.
        """
        if not self._turn.acquire(timeout=seconds_left(deadline_ns)):
            raise TierTimeout("ssd: another scrub did not finish in time")
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
        """Continue the pass; return how many blocks and bytes were read."""
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
                if self._quarantine_if_damaged(number, place):
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
        """Return the live records of a segment, from where the last step ended."""
        with self._pool.lock:
            index = self._pool.index
            rows = index.rows_of(number)
            rows = rows[index.page[rows] >= self._page]
            rows = rows[np.argsort(index.page[rows])]
            columns = index.page[rows].tolist(), index.payload_bytes[rows].tolist()
            return [_Place(*each) for each in zip(index.hashes_of(rows), *columns, strict=True)]

    def _quarantine_if_damaged(self, number: int, place: _Place) -> bool:
        """Verify a record; if it is damaged, forget and quarantine it and return True."""
        pool = self._pool
        with pool.lock:
            if not self._is_there(number, place):
                return False  # evicted, removed or moved since
            segment = pool.segments[number]
            segment.num_pins += 1
        try:
            # Twice: the fault may be in the transfer.
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
