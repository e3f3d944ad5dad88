"""Writes blocks: chooses a segment for each run of them and publishes them.

A run is one write operation (header page, payload, header page, payload, ...) at the tail of a
segment. Its blocks are published in the index after the operation has returned. A header page may
reach the disk before its payload; after a crash, the checksum reveals such a block when it is read.
"""

import contextlib
import errno
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.check import seconds_left
from kvtier.tiers.seal import Seal, Stamp
from kvtier.tiers.ssd.disk import PageWriter, new_staging
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import RecordHead, padded, record_bytes
from kvtier.tiers.ssd.segment import ENTRY_DTYPE, PAYLOAD_BYTES_MAX, Segment, footer_bytes
from kvtier.tiers.ssd.store_limits import NO_SPACE, AgeLimit

__all__ = ["Appender", "StoredRecord", "note_fault", "write_records"]

_RUN_BYTES_MAX = 32 << 20
"""Maximum size of a run; the deadline is checked between runs."""

_SEALED_RUN_BYTES_MAX = 8 << 20
"""Maximum size of a run of encrypted blocks, which is buffered in memory. A larger block is written
alone.
"""

_FAULTS_MAX = 2
"""After this many failed runs in a row a new segment is used, since the next pages of the current
one may be bad.
"""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A block as stored on disk. Moving a record does not change it."""

    header: bytes
    """The packed header."""
    stamp: Stamp
    payload: memoryview
    """The payload as stored: ciphertext if the stamp says so."""


class Appender:
    """Appends blocks to a pool's segments; one call at a time."""

    def __init__(self, pool: SegmentPool, seal: Seal, age: AgeLimit, *, is_synced: bool) -> None:
        self.staging = new_staging()
        self.is_synced = is_synced
        self._pool = pool
        self._seal = seal
        self._age = age
        self._ciphertext = memoryview(bytearray())

    def append(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> tuple[WriteOutcome, ...]:
        """Store the absent blocks. Raises OSError or TierTimeout with the rest unwritten."""
        pool = self._pool
        absent, protected = self._absent(blocks)
        rejected = {name for name, block in absent.items() if _is_too_large(pool, block)}
        waiting = [block for name, block in absent.items() if name not in rejected]
        if waiting and pool.volume.accepts_writes():
            try:
                self._append_all(waiting, protected, deadline_ns)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                pool.volume.set_read_only("the file system became read-only")
        if pool.volume.read_only is not None:
            pool.volume.num_refused += len(waiting)
        rejected.update(block.header.block_hash for block in waiting)
        return tuple(
            WriteOutcome.REJECTED if block.header.block_hash in rejected else WriteOutcome.STORED
            for block in blocks
        )

    def _append_all(self, waiting: list[BlockWrite], protected: set[int], deadline_ns: int) -> None:
        """Write blocks in order and remove them from ``waiting``; stop when there is no room."""
        pool, may_retry = self._pool, True
        while waiting and pool.budget.allows(record_bytes(len(waiting[0].payload))):
            seconds_left(deadline_ns)
            segment = pool.open_segment(len(waiting[0].payload), protected)
            if segment is None:
                return
            run = self._leading_run(segment, waiting)
            try:
                self._write_run(segment, run)
            except OSError as error:
                note_fault(pool, segment, error)
                if error.errno not in NO_SPACE:
                    raise
                if not may_retry:
                    pool.volume.note_failed_reclaim()
                if not may_retry or not pool.reclaim_for_others(protected):
                    pool.volume.set_read_only(
                        f"the volume accepts no more writes: {error.strerror}"
                    )
                    return
                may_retry = False
                continue
            segment.num_faults = 0
            pool.volume.set_writable()
            protected.add(segment.number)
            del waiting[: len(run)]

    def _absent(self, blocks: Sequence[BlockWrite]) -> tuple[dict[bytes, BlockWrite], set[int]]:
        """Return the blocks to write, and the segments that hold the others."""
        oldest_s = self._age.oldest_s()
        with self._pool.lock:
            index = self._pool.index
            rows = index.find([block.header.block_hash for block in blocks])
            is_here = (rows >= 0) & (index.written_s[rows] >= oldest_s)
            protected = set(index.segment[rows[is_here]].tolist())
        absent: dict[bytes, BlockWrite] = {
            block.header.block_hash: block
            for block, here in zip(blocks, is_here.tolist(), strict=True)
            if not here
        }
        return absent, protected

    def _leading_run(self, segment: Segment, waiting: list[BlockWrite]) -> list[BlockWrite]:
        run = waiting[: segment.fitting(len(block.payload) for block in waiting)]
        ends = np.cumsum([record_bytes(len(block.payload)) for block in run])
        limit = _SEALED_RUN_BYTES_MAX if self._seal.needs_buffer else _RUN_BYTES_MAX
        if self._pool.budget.is_limited:
            limit = min(limit, self._pool.budget.available_bytes())
        return run[: max(1, int(np.searchsorted(ends, limit, side="right")))]

    def _write_run(self, segment: Segment, run: list[BlockWrite]) -> None:
        records = self._sealed(run)
        write_records(self._pool, segment, records, self.staging, is_synced=self.is_synced)
        self._pool.disk.written.blocks_bytes += sum(padded(len(each.payload)) for each in records)

    def _sealed(self, run: list[BlockWrite]) -> list[StoredRecord]:
        """Return the records to write. Their ciphertext is valid until the next run."""
        written_s = self._age.stamp_s()
        if self._seal.needs_buffer:
            self._reserve(sum(padded(len(block.payload)) for block in run))
        records, start = [], 0
        for block in run:
            into = self._ciphertext[start:] if self._seal.needs_buffer else None
            records.append(
                StoredRecord(*self._seal.seal(block.header, block.payload, written_s, into))
            )
            start += padded(len(block.payload))
        return records

    def _reserve(self, size_bytes: int) -> None:
        if len(self._ciphertext) < size_bytes:
            size_bytes = max(size_bytes, _SEALED_RUN_BYTES_MAX)
            self._ciphertext = memoryview(mmap.mmap(-1, size_bytes))


def write_records(
    pool: SegmentPool,
    segment: Segment,
    records: Sequence[StoredRecord],
    staging: memoryview,
    *,
    is_synced: bool,
) -> None:
    """Append records that fit to a segment in one operation and publish their blocks.

    Counts header pages as metadata; the caller counts payloads.
    """
    with pool.disk.opened(segment.path, writing=True) as fd:
        writer = PageWriter(pool.disk, fd, segment.tail_bytes, staging)
        for record in records:
            head = RecordHead(record.header, record.stamp, segment.epoch)
            writer.add(memoryview(head.pack(segment.number)))
            writer.add(record.payload)
        writer.flush()
    if is_synced:
        pool.disk.sync(segment.path)
    pool.disk.written.metadata_bytes += PAGE_BYTES * len(records)
    pool.disk.hook("record.publish")
    first = len(segment.entries)
    with pool.lock:
        for record in records:
            segment.note(record.header, len(record.payload), record.stamp.written_s)
        entries = np.frombuffer(bytes(segment.entries[first:]), ENTRY_DTYPE)
        pool.index.put(entries, segment.number)


def note_fault(pool: SegmentPool, segment: Segment, error: OSError) -> None:
    """Invalidate what a failed run has written; after repeated faults, stop using the segment."""
    segment.epoch += 1
    segment.num_faults += 1
    if isinstance(error, FileNotFoundError):
        pool.evict(segment)
    elif segment.num_faults >= _FAULTS_MAX and pool.active is segment:
        with contextlib.suppress(OSError):  # without a footer, recovery walks the records
            pool.seal()


def _is_too_large(pool: SegmentPool, block: BlockWrite) -> bool:
    payload_bytes = len(block.payload)
    room_bytes = pool.segment_bytes - PAGE_BYTES - footer_bytes(1)
    return record_bytes(payload_bytes) > room_bytes or payload_bytes > PAYLOAD_BYTES_MAX
