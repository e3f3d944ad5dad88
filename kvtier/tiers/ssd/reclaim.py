"""Moves blocks that are worth keeping before their segment is removed.

Theory
------
This is a second chance (FIFO with reinsertion, as in S3-FIFO, SOSP'23): blocks of the victim that
are worth keeping are moved to the active segment; its other blocks are evicted. By the pool's
order, a block is worth keeping if it stands out among the store's blocks, or if it was read since
it was written or last moved. A move halves its read count, so that it stays only while it is being
read.

Moving needs room, and the capacity is a hard limit. So a segment is reclaimed early, once the
active one has no more room than a move may need, and only if there is something to move. Otherwise
the victim is removed when its space is needed.

Rules
-----
* At most ``MOVED_SHARE`` of a segment is moved, the best blocks first. Each victim thus frees three
  quarters of a segment, total writes are at most 4/3 of the blocks offered (plus metadata), and a
  call waits for one such move at most.
* A record is moved as stored, with its seal and write time, and only if it verifies.
* Moved blocks are durable before their old segment is removed. A crash in between leaves both; the
  later of two records counts.
* Moves count against the write budget. Without budget, blocks are evicted instead.
* Reclaiming never fails a write: blocks that cannot be moved are evicted.
"""

import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.identity import BlockHash
from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import TierTimeout
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.seal import Seal
from kvtier.tiers.ssd.append import StoredRecord, note_fault, write_records
from kvtier.tiers.ssd.damage import check_record, read_record
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import padded, record_bytes
from kvtier.tiers.ssd.segment import Segment, entries_of
from kvtier.tiers.ssd.store_limits import AgeLimit
from kvtier.tiers.ssd.victim import MOVED_SHARE

__all__ = ["Reclaimer"]

_MOVE_BYTES = 8 << 20
"""Records read before they are written together; a larger one is moved alone."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record to move."""

    block_hash: BlockHash
    page: int
    payload_bytes: int
    reads: int

    @property
    def size_bytes(self) -> int:
        return record_bytes(self.payload_bytes)


class Reclaimer:
    """Reclaims segments ahead of writes; for the writer only."""

    def __init__(self, pool: SegmentPool, seal: Seal, age: AgeLimit, staging: memoryview) -> None:
        self._pool = pool
        self._seal = seal
        self._age = age
        self._staging = staging
        self._seen_number = 0
        """The active segment for which this was decided; it is decided once per segment."""

    def prepare(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> None:
        """Reclaim a segment with blocks worth keeping while the active one has room for them.

        Segments that hold one of ``blocks`` are left alone.
        """
        pool, active = self._pool, self._pool.active
        is_late = time.monotonic_ns() >= deadline_ns
        if active is None or active.number == self._seen_number or is_late:
            return
        share_bytes = int(MOVED_SHARE * pool.segment_bytes)
        incoming_bytes = sum(record_bytes(len(block.payload)) for block in blocks)
        if active.tail_bytes + incoming_bytes + share_bytes < active.size_bytes:
            return
        if not pool.replaces():
            return
        self._seen_number = active.number
        with pool.lock:
            rows = pool.index.find([block.header.block_hash for block in blocks])
            protected = set(pool.index.segment[rows[rows >= 0]].tolist())
        victim = pool.victim(protected, pool.order.to_clean)
        kept = self._records_to_move(victim, share_bytes, deadline_ns) if victim else []
        if victim and kept:
            # Half of the time is reserved for the write itself.
            self._move(victim, kept, active, (time.monotonic_ns() + deadline_ns) // 2)
            pool.evict(victim)

    def _records_to_move(self, victim: Segment, most_bytes: int, deadline_ns: int) -> list[_Kept]:
        """Return the records to move, the best first, within the limits."""
        pool, index = self._pool, self._pool.index
        if pool.budget.is_limited:
            most_bytes = min(most_bytes, pool.budget.available_bytes())
        with pool.lock:
            rows = index.rows_of(victim.number)
            rows = rows[index.written_s[rows] >= self._age.oldest_s()]
        try:
            rows = pool.order.blocks_to_move(
                index, rows, lambda: entries_of(pool.disk, victim, deadline_ns=deadline_ns)
            )
        except (OSError, TierTimeout):
            return []  # the segment cannot be read in time
        with pool.lock:
            columns = index.page[rows], index.payload_bytes[rows], index.reads[rows]
            hashes = index.hashes_of(rows)
        kept = [
            _Kept(*each)
            for each in zip(hashes, *(column.tolist() for column in columns), strict=True)
        ]
        ends = np.cumsum([each.size_bytes for each in kept])
        return kept[: int(np.searchsorted(ends, most_bytes, side="right"))]

    def _move(self, victim: Segment, kept: list[_Kept], active: Segment, deadline_ns: int) -> None:
        """Move records while time, room and the disk permit; the rest is evicted."""
        disk, moved_before = self._pool.disk, self._pool.disk.written.moved_bytes
        try:
            for batch in _batches(kept):
                if time.monotonic_ns() >= deadline_ns:
                    break
                self._append(self._sound(victim, batch), active)
            if disk.written.moved_bytes > moved_before:
                disk.sync(active.path)
        except OSError as error:
            note_fault(self._pool, active, error)

    def _sound(self, victim: Segment, batch: list[_Kept]) -> list[tuple[_Kept, StoredRecord]]:
        """Read records and return those that verify."""
        memory = memoryview(mmap.mmap(-1, sum(each.size_bytes for each in batch)))
        sound = []
        for each in batch:
            record, memory = memory[: each.size_bytes], memory[each.size_bytes :]
            stored = self._read(victim, each, record)
            if stored is not None:
                sound.append((each, stored))
        return sound

    def _read(self, victim: Segment, kept: _Kept, record: memoryview) -> StoredRecord | None:
        try:
            with self._pool.disk.opened(victim.path) as fd:
                read_record(self._pool.disk, fd, kept.page, record)
        except OSError:
            return None  # a bad sector: the next record may be readable
        found = check_record(record, victim.number, self._seal)
        if found.fault is not None or found.head is None or found.header is None:
            return None
        if found.header.block_hash != kept.block_hash:
            return None
        payload = record[PAGE_BYTES : PAGE_BYTES + found.header.payload_bytes]
        return StoredRecord(found.head.header, found.head.stamp, payload)

    def _append(self, sound: list[tuple[_Kept, StoredRecord]], active: Segment) -> None:
        """Append as many records as fit and point the index at them."""
        pool = self._pool
        sound = sound[: active.fitting(len(record.payload) for _, record in sound)]
        if not sound:
            return
        records = [record for _, record in sound]
        write_records(pool, active, records, self._staging, is_synced=False)
        pool.disk.written.moved_bytes += sum(padded(len(each.payload)) for each in records)
        with pool.lock:
            rows = pool.index.find([kept.block_hash for kept, _ in sound])
            pool.index.reads[rows] = [kept.reads // 2 for kept, _ in sound]


def _batches(kept: list[_Kept]) -> Iterator[list[_Kept]]:
    """Group records that are read and written together, in file order."""
    batch: list[_Kept] = []
    batch_bytes = 0
    for each in sorted(kept, key=lambda each: each.page):
        if batch and batch_bytes + each.size_bytes > _MOVE_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(each)
        batch_bytes += each.size_bytes
    if batch:
        yield batch
