"""SsdTier: blocks kept in segment files of one directory, surviving the process.

What may be lost
----------------
* Killed process (also by SIGKILL or for memory): every block that ``write`` reported stays. Of a
  call that was under way, each block is there and whole, or a miss when it is read.
* Power loss with ``Durability.BATCH``: the same. With ``Durability.SEGMENT``, the default for a
  cache: also blocks since the last full segment or clean stop.
* Removal is durable once ``remove`` or ``purge`` returns: removed blocks do not come back. Blocks
  forgotten because they were damaged may; they are checked and missed again.

A block costs a page more than its payload, and each segment a page and a footer.
"""

import contextlib
import mmap
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from kvtier.core.identity import PACKED_HEADER, BlockHash, BlockHeader, Headers, Selection
from kvtier.core.limits import PAGE_BYTES
from kvtier.core.residency import TierName
from kvtier.errors import StartError, TierError, TierTimeout
from kvtier.lock import let_go
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    Health,
    MissReason,
    Removed,
    Scrubbed,
    TierProperties,
    TierUsage,
    WriteReport,
)
from kvtier.tiers.check import seconds_left
from kvtier.tiers.ssd.append import append_blocks
from kvtier.tiers.ssd.disk import STAGING_BYTES, DirectIO, Disk, StepHook, no_hook
from kvtier.tiers.ssd.fetch import fetch_run, locate, runs_of
from kvtier.tiers.ssd.lock import lock_directory
from kvtier.tiers.ssd.pool import METADATA_BYTES, SegmentPool
from kvtier.tiers.ssd.recovery import recover
from kvtier.tiers.ssd.segment import ENTRY_DTYPE, Segment, mark_removed, read_entries

__all__ = ["Durability", "SsdOptions", "SsdTier"]

_SEGMENTS_MIN = 2
"""One to append to and one to keep: with less, each new segment would empty the tier."""

_SEGMENT_BYTES_MIN = 4 * PAGE_BYTES
"""A header, one record of two pages, a footer."""


class Durability(StrEnum):
    """When written blocks are made to survive a power loss."""

    BATCH = "batch"
    """Before ``write`` returns."""
    SEGMENT = "segment"
    """When a segment is full, and on ``close``."""


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """What has a good default."""

    direct_io: DirectIO = DirectIO.AUTO
    durability: Durability = Durability.SEGMENT
    free_space_floor_bytes: int = 0
    """Space of the volume that is left to others."""
    num_workers: int = 4
    """Calls that may read at once; each has a staging buffer."""
    hook: StepHook = no_hook


class SsdTier:
    """Blocks in ``directory``, in files of ``segment_bytes``, never more than ``capacity_bytes``.

    Recovers what is there before it returns. Raises StartError where the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        segment_bytes: int = 256 << 20,
        options: SsdOptions | None = None,
    ) -> None:
        options = options or SsdOptions()
        _check_sizes(capacity_bytes, segment_bytes)
        self.properties = TierProperties(
            TierName.SSD, is_persistent=True, is_shared=False, num_workers=options.num_workers
        )
        self._directory_lock = lock_directory(directory)
        try:
            self._disk = Disk(directory, options.direct_io, options.hook)
            self._pool = SegmentPool(
                self._disk, capacity_bytes, segment_bytes, options.free_space_floor_bytes
            )
            self._recovered = recover(self._pool)
        except OSError as error:
            let_go(self._directory_lock)
            raise StartError(
                "ssd.directory", f"{directory}: {error.strerror}", "repair or name another one"
            ) from error
        except StartError:
            let_go(self._directory_lock)
            raise
        self._is_synced = options.durability is Durability.BATCH or not self._disk.is_direct
        self._writer_lock = threading.Lock()
        self._writer_staging = _staging()
        self._stagings: queue.Queue[memoryview] = queue.Queue(maxsize=options.num_workers)
        for _ in range(options.num_workers):
            self._stagings.put_nowait(_staging())
        self._is_closed = False

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Append blocks, giving up the oldest segments for them where the tier is full.

        Segments of blocks named in this call are kept. Blocks evicted by a call that raised are
        reported by the next one that does not.
        """
        with self._writing(deadline_ns):
            outcomes = append_blocks(
                self._pool,
                blocks,
                self._writer_staging,
                is_synced=self._is_synced,
                deadline_ns=deadline_ns,
            )
            return WriteReport(outcomes, self._pool.take_evicted())

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Fetch blocks, neighbours in one operation; damaged ones are forgotten."""
        with self._faults(), contextlib.ExitStack() as pins:
            seconds_left(deadline_ns)
            results, located = locate(self._pool, blocks)
            for each in located:
                pins.callback(self._pool.unpin, each.segment)
            for run in runs_of(located):
                with self._staging(deadline_ns) as staging:
                    fetch_run(self._pool, run, staging, results)
        return results

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> list[bool]:
        """Tell for each hash whether it is in the index."""
        with self._faults():
            seconds_left(deadline_ns)
            with self._pool.lock:
                present: list[bool] = (self._pool.index.find(hashes) >= 0).tolist()
        return present

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Forget blocks, also for the time after a restart."""
        pool = self._pool
        with self._writing(deadline_ns):
            with pool.lock:
                rows = np.unique(pool.index.find(hashes))
                rows = rows[rows >= 0]
                numbers, pages = pool.index.segment[rows], pool.index.page[rows]
                removed = pool.index.sizes_of(rows)
                pool.index.drop(rows)
                segments = [pool.segments[number] for number in np.unique(numbers).tolist()]
                empty = set(np.unique(numbers).tolist()) - pool.index.live_segments()
            for segment in segments:
                if segment.number in empty:
                    pool.retire(segment)
                else:
                    mark_removed(self._disk, segment, pages[numbers == segment.number].tolist())
        return removed

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Forget the blocks of a selection; where that is all, remove every file."""
        if not selection.is_all:
            hashes = [
                BlockHash(each.tobytes())
                for headers in self.headers()
                for each in headers["block_hash"][selection.mask(headers["space"])]
            ]
            return self.remove(hashes, deadline_ns)
        with self._writing(deadline_ns):
            removed = [self._pool.retire(each) for each in list(self._pool.segments.values())]
            self._disk.sync_directory()
        return Removed(
            sum(each.num_blocks for each in removed), sum(each.num_bytes for each in removed)
        )

    def probe(self, deadline_ns: int) -> None:
        """Write and read a page of the directory."""
        with self._writing(deadline_ns):
            self._disk.probe()

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify nothing yet."""
        return Scrubbed()

    def health(self) -> Health:
        """Return that the directory is there."""
        return Health()

    def headers(self) -> Iterator[Headers]:
        """Yield what is kept, a batch a segment, in the order of writing; read from the disk."""
        with self._pool.lock:
            segments = sorted(self._pool.segments.values(), key=lambda segment: segment.number)
        for segment in segments:
            yield self._headers_of(segment)

    def usage(self) -> TierUsage:
        """Return occupancy: the files' full sizes, whether filled yet or not."""
        pool = self._pool
        return TierUsage(
            len(pool.index),
            pool.allocated_bytes,
            pool.capacity_bytes,
            {
                "direct_io": self._disk.is_direct,
                "segments": len(pool.segments),
                "segment_bytes": pool.segment_bytes,
                "files_dropped_at_start": self._recovered.num_dropped,
                "files_unreadable_at_start": self._recovered.num_unreadable,
            },
        )

    def close(self) -> None:
        """Make everything durable and let another process have the directory."""
        with self._writer_lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._pool.active is not None:
                    with contextlib.suppress(FileNotFoundError):  # removed by someone: a miss
                        self._disk.sync(self._pool.active.path)
            except OSError as error:
                raise TierError(f"ssd: the last blocks may be lost: {error.strerror}") from error
            finally:
                let_go(self._directory_lock)

    def _headers_of(self, segment: Segment) -> Headers:
        """Read the headers of a segment's blocks; empty once the segment has been given up."""
        pool = self._pool
        with pool.lock:
            if segment.is_retired:
                return np.empty(0, PACKED_HEADER)
            segment.num_pins += 1
            packed = bytes(segment.entries)
        try:
            with self._faults():
                entries = np.frombuffer(packed, ENTRY_DTYPE)
                if not packed:
                    entries = read_entries(self._disk, segment)
            with pool.lock:
                rows = pool.index.find_entries(entries)
                is_here = pool.index.segment[rows] == segment.number
                is_live = (rows >= 0) & is_here & (pool.index.page[rows] == entries["page"])
            live: Headers = entries["header"][is_live]
            return live
        finally:
            pool.unpin(segment)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn faults of the medium into TierError."""
        if self._is_closed:
            raise TierError("the ssd tier is closed")
        try:
            yield
        except OSError as error:
            raise TierError(f"ssd: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _writing(self, deadline_ns: int) -> Iterator[None]:
        """Be the one that changes files."""
        if not self._writer_lock.acquire(timeout=seconds_left(deadline_ns)):
            raise TierTimeout("ssd: another write did not end in time")
        try:
            with self._faults():
                yield
        finally:
            self._writer_lock.release()

    @contextlib.contextmanager
    def _staging(self, deadline_ns: int) -> Iterator[memoryview]:
        """Borrow a staging buffer; there are as many as ``num_workers``."""
        try:
            staging = self._stagings.get(timeout=seconds_left(deadline_ns))
        except queue.Empty:
            raise TierTimeout("ssd: other reads did not end in time") from None
        try:
            yield staging
        finally:
            self._stagings.put_nowait(staging)


def _staging() -> memoryview:
    return memoryview(mmap.mmap(-1, STAGING_BYTES))


def _check_sizes(capacity_bytes: int, segment_bytes: int) -> None:
    if segment_bytes % PAGE_BYTES or segment_bytes < _SEGMENT_BYTES_MIN:
        raise StartError(
            "ssd.segment",
            f"{segment_bytes} bytes are no multiple of {PAGE_BYTES} from {_SEGMENT_BYTES_MIN} up",
            "set a size such as 256MiB",
        )
    if capacity_bytes < _SEGMENTS_MIN * segment_bytes + METADATA_BYTES:
        raise StartError(
            "ssd.capacity",
            f"{capacity_bytes} bytes have no room for {_SEGMENTS_MIN} segments of {segment_bytes}",
            "raise ssd.capacity or lower ssd.segment",
        )
