"""Writing blocks: which segment each run of them goes to, and when they count as stored.

A run is one operation: header page, payload, header page, payload… from the tail of a segment. The
blocks are published in the index once it has returned. A header page may reach the disk before
its payload; after a crash such a block is found by its checksum when it is read.
"""

import contextlib
from collections.abc import Sequence

import numpy as np

from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.check import seconds_left
from kvtier.tiers.ssd.disk import PageWriter
from kvtier.tiers.ssd.pool import NO_SPACE, SegmentPool
from kvtier.tiers.ssd.record import RecordHead, record_bytes
from kvtier.tiers.ssd.segment import ENTRY_DTYPE, Segment, footer_bytes

__all__ = ["append_blocks"]

_RUN_BYTES_MAX = 32 << 20
"""Bytes of one run: the deadline is looked at between runs."""

_PAYLOAD_BYTES_MAX = (1 << 32) - 1
"""What a row of the index can say."""


_FAULTS_MAX = 2
"""Failed runs in a row after which a segment is left: its next pages may be bad, not the disk."""


def append_blocks(
    pool: SegmentPool,
    blocks: Sequence[BlockWrite],
    staging: memoryview,
    *,
    is_synced: bool,
    deadline_ns: int,
) -> tuple[WriteOutcome, ...]:
    """Store what is not there yet; raises OSError or TierTimeout with the rest unwritten."""
    hashes = [block.header.block_hash for block in blocks]
    with pool.lock:
        rows = pool.index.find(hashes)
        protected = set(pool.index.segment[rows[rows >= 0]].tolist())
    absent = {
        block.header.block_hash: block
        for block, row in zip(blocks, rows.tolist(), strict=True)
        if row < 0
    }
    rejected = {block_hash for block_hash, block in absent.items() if _is_too_large(pool, block)}
    waiting = [block for block_hash, block in absent.items() if block_hash not in rejected]
    may_retry = True
    while waiting:
        seconds_left(deadline_ns)
        segment = pool.open_segment(len(waiting[0].payload), protected)
        if segment is None:
            break
        run = _leading_run(segment, waiting)
        try:
            _write_run(pool, segment, run, staging, is_synced=is_synced)
        except OSError as error:
            _note_fault(pool, segment, error)
            if error.errno not in NO_SPACE:
                raise
            if not may_retry or not pool.reclaim(protected):
                break
            may_retry = False
            continue
        segment.num_faults = 0
        protected.add(segment.number)
        waiting = waiting[len(run) :]
    rejected.update(block.header.block_hash for block in waiting)
    return tuple(
        WriteOutcome.REJECTED if block_hash in rejected else WriteOutcome.STORED
        for block_hash in hashes
    )


def _note_fault(pool: SegmentPool, segment: Segment, error: OSError) -> None:
    """Make what was written of a run void, and leave a segment that cannot be written to."""
    segment.opening += 1
    segment.num_faults += 1
    if isinstance(error, FileNotFoundError):
        pool.give_up(segment)
    elif segment.num_faults >= _FAULTS_MAX and pool.active is segment:
        with contextlib.suppress(OSError):  # without a footer, recovery walks the records
            pool.seal()


def _is_too_large(pool: SegmentPool, block: BlockWrite) -> bool:
    payload_bytes = len(block.payload)
    room_bytes = pool.segment_bytes - PAGE_BYTES - footer_bytes(1)
    return record_bytes(payload_bytes) > room_bytes or payload_bytes > _PAYLOAD_BYTES_MAX


def _leading_run(segment: Segment, waiting: list[BlockWrite]) -> list[BlockWrite]:
    run = waiting[: segment.fitting(len(block.payload) for block in waiting)]
    ends = np.cumsum([record_bytes(len(block.payload)) for block in run])
    return run[: max(1, int(np.searchsorted(ends, _RUN_BYTES_MAX, side="right")))]


def _write_run(
    pool: SegmentPool,
    segment: Segment,
    run: list[BlockWrite],
    staging: memoryview,
    *,
    is_synced: bool,
) -> None:
    headers = [block.header.pack() for block in run]
    with pool.disk.opened(segment.path, writing=True) as fd:
        writer = PageWriter(pool.disk, fd, segment.tail_bytes, staging)
        for header, block in zip(headers, run, strict=True):
            head = RecordHead(header, segment.opening).pack(segment.number)
            writer.add(memoryview(head))
            writer.add(block.payload)
        writer.flush()
    if is_synced:
        pool.disk.sync(segment.path)
    pool.disk.hook("record.publish")
    first = len(segment.entries)
    with pool.lock:
        for header, block in zip(headers, run, strict=True):
            segment.note(header, len(block.payload))
        entries = np.frombuffer(bytes(segment.entries[first:]), ENTRY_DTYPE)
        pool.index.put(entries, segment.number)
