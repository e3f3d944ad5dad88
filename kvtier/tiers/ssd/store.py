"""SsdTier: blocks in segment files of one directory, which survive the process.

Durability
----------
* Process killed (also by SIGKILL or out of memory): no block is lost that ``write`` reported as
  stored. A block of an unfinished call is either complete or a miss when read.
* Power loss with ``Durability.BATCH``: the same. With ``Durability.SEGMENT``, the default for a
  cache, blocks written since the last full segment or clean stop may also be lost, in any order.
  With buffered I/O each ``write`` is synced, so ``SEGMENT`` loses no more than ``BATCH``.
* A wrong block is never served: a block that reached the disk in part is a miss.
* Removal is durable once ``remove`` or ``purge`` returns, also against power loss: removed blocks
  do not return, and after a purge nor do their bytes. Evicted blocks may return after a power loss,
  within the capacity; damaged ones that are not marked yet may return as misses.

A block takes one page more than its payload, and each segment a page and a footer.
"""

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtier.core.identity import PACKED_HEADER, BlockHash, BlockHeader, Headers, Selection
from kvtier.core.limits import PAGE_BYTES
from kvtier.core.residency import TierName
from kvtier.errors import StartError, TierError, TierFull, TierTimeout
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    Health,
    HealthState,
    MissReason,
    Removed,
    Scrubbed,
    TierProperties,
    TierUsage,
    WriteReport,
)
from kvtier.tiers.check import seconds_left
from kvtier.tiers.ssd.append import Appender
from kvtier.tiers.ssd.damage import Quarantine
from kvtier.tiers.ssd.directory import DirectoryLock, check_directory, check_private, unusable
from kvtier.tiers.ssd.disk import DirectIO, Disk, new_staging
from kvtier.tiers.ssd.fetch import Fetcher, locate, runs_of
from kvtier.tiers.ssd.options import Durability, SsdOptions, check_sizes
from kvtier.tiers.ssd.pool import METADATA_BYTES, SegmentPool
from kvtier.tiers.ssd.purge import purge_all, purge_selected, remove_blocks
from kvtier.tiers.ssd.reclaim import Reclaimer
from kvtier.tiers.ssd.record import record_bytes
from kvtier.tiers.ssd.recovery import recover
from kvtier.tiers.ssd.scrub import SegmentScrubber
from kvtier.tiers.ssd.segment import (
    ENTRY_DTYPE,
    Segment,
    entries_of,
    footer_bytes,
    written_since,
)
from kvtier.tiers.ssd.store_limits import AgeLimit, Volume, WriteBudget
from kvtier.tiers.ssd.victim import ReadOrder, ValueOrder

__all__ = ["SCRATCH_NAME", "SsdTier"]

SCRATCH_NAME = "scratch"
"""Directory of a scratch tier, beside the segments."""

_CLOSE_S = 10
"""How long ``close`` waits for a running write, which may take that long on a slow drive."""


class SsdTier:
    """Blocks in ``directory``, in files of ``segment_bytes``, at most ``capacity_bytes`` in all.

    Recovers existing blocks before it returns. Raises StartError if the directory is not usable.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        segment_bytes: int,
        options: SsdOptions | None = None,
    ) -> None:
        options = options or SsdOptions()
        check_sizes(capacity_bytes, segment_bytes)
        self.properties = TierProperties(
            TierName.SSD, is_persistent=True, is_shared=False, num_workers=options.num_workers
        )
        self._age = AgeLimit(options.max_age_s, options.now_s)
        check_private(directory)
        self._directory_lock = DirectoryLock(directory)
        try:
            self._open(directory, capacity_bytes, segment_bytes, options)
        except OSError as error:
            self._directory_lock.release()
            raise unusable(directory, error) from error
        except BaseException:
            self._directory_lock.release()
            raise
        self._writer_lock = threading.Lock()
        self._is_closed = False

    def tune(self, options: SsdOptions) -> None:
        """Apply the floors, write budget and maximum age of ``options``. Thread-safe.

        Its other values apply only when a store is opened.
        """
        pool, volume, budget = self._pool, self._pool.volume, self._pool.budget
        if options.write_budget_bytes != budget.day_bytes:
            was_limited = budget.is_limited
            budget.change(options.write_budget_bytes)
            if not was_limited:  # recent writes were not deducted yet
                with pool.lock:
                    written_bytes = pool.index.written_bytes(budget.day_ago_s())
                budget.recall(written_bytes)
        volume.free_space_floor_bytes = options.free_space_floor_bytes
        volume.free_inodes_floor = options.free_inodes_floor
        self._age.max_age_s = options.max_age_s

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Append blocks, removing segments for them if the tier is full.

        Segments that hold blocks of this call are kept. Blocks evicted by a call that raised are
        reported by the next one that does not.
        """
        with self._writing(deadline_ns):
            self._quarantine.mark(self._disk)
            self._reclaimer.prepare(blocks, deadline_ns)
            outcomes = self._appender.append(blocks, deadline_ns)
            return WriteReport(outcomes, self._pool.take_evicted())

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read blocks, neighbours in one operation; damaged ones are forgotten."""
        with self._faults(), contextlib.ExitStack() as pins:
            seconds_left(deadline_ns)
            results, located = locate(self._pool, blocks, self._age.oldest_s())
            for each in located:
                pins.callback(self._pool.unpin, each.segment)
            for run in runs_of(located):
                with self._staging(deadline_ns) as staging:
                    self._fetcher.fetch(run, staging, results)
        return results

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> list[bool]:
        """Return for each hash whether it is in the index."""
        with self._faults():
            seconds_left(deadline_ns)
            index = self._pool.index
            with self._pool.lock:
                rows = index.find(hashes)
                present = (rows >= 0) & (index.written_s[rows] >= self._age.oldest_s())
        return [bool(each) for each in present]

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Forget blocks durably: they do not return after a restart."""
        with self._writing(deadline_ns):
            return remove_blocks(self._pool, hashes, deadline_ns)

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Forget the blocks of a selection and erase their bytes.

        If all are selected, removes every file. A file that cannot be read or changed is removed
        entirely, and its other blocks are reported as evicted. Running reads may still see what
        they were reading.
        """
        with self._writing(deadline_ns):
            if selection.is_all:
                return purge_all(self._pool)
            return purge_selected(self._pool, selection, deadline_ns)

    def health_check(self, deadline_ns: int) -> None:
        """Write and read a page in the directory, which must be the one that was opened.

        If the directory or files are missing, the store continues with the rest: the check that
        finds this raises TierError, and the next one does not.
        """
        with self._writing(deadline_ns):
            check_directory(self._pool, self._directory_lock)
            self._pool.volume.accepts_writes()  # checked here in case there are no writes

    @contextlib.contextmanager
    def scratch(self, block_bytes: int, num_blocks: int, deadline_ns: int) -> Iterator["SsdTier"]:
        """Open a store of one segment in a directory beside the segments.

        It reads and writes like this store. Its bytes count as written, but not as blocks. A write
        that needs a new segment does not wait for it: both stores may briefly exceed the capacity
        together, which is better than evicting a segment.
        """
        segment_bytes = _segment_bytes(block_bytes, num_blocks)
        with self._writing(deadline_ns):
            if _segment_bytes(block_bytes, 1) > self._pool.segment_bytes:
                raise TierFull(f"the tier does not accept blocks of {block_bytes} bytes")
            self._pool.check_room(segment_bytes)
            self._disk.written.metadata_bytes += segment_bytes
        try:
            with contextlib.closing(self._open_scratch(segment_bytes)) as scratch:
                with self._faults():
                    made = scratch._pool.open_segment(0, ())  # before writes are timed
                if made is None:
                    raise TierFull(scratch.health().reason)
                yield scratch
        finally:
            if not self._is_closed:  # else another process may be measuring there
                self._remove_scratch()

    def _open_scratch(self, segment_bytes: int) -> "SsdTier":
        options = replace(
            self._options,
            direct_io=DirectIO.ON if self._disk.is_direct else DirectIO.OFF,
            is_persistent=False,
            value_per_byte=None,
            write_budget_bytes=0,
        )
        directory = self._disk.directory / SCRATCH_NAME
        try:
            return SsdTier(directory, 2 * segment_bytes + METADATA_BYTES, segment_bytes, options)
        except StartError as error:
            raise TierError(f"ssd: {error.problem}") from error

    def _remove_scratch(self) -> None:
        shutil.rmtree(self._disk.directory / SCRATCH_NAME, ignore_errors=True)

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify the next records, expire old blocks, and remove segments without live blocks."""
        with self._writing(deadline_ns):
            self._quarantine.mark(self._disk)
            self._scrubber.expire()
            self._scrubber.remove_dead_segments()
        with self._faults():
            seen = self._scrubber.step(max_bytes, deadline_ns)
        return replace(seen, evicted=self._pool.take_evicted())

    def health(self) -> Health:
        """Return degraded with the reason while nothing is written."""
        reason = self._pool.volume.read_only
        return Health(HealthState.DEGRADED, f"read-only: {reason}") if reason else Health()

    def headers(self) -> Iterator[Headers]:
        """Yield the headers of stored blocks, a batch per segment, in the order of writing.

        They are read from the disk as stored: the checksum of a sealed block is its tag.
        """
        with self._pool.lock:
            segments = sorted(self._pool.segments.values(), key=lambda segment: segment.number)
        for segment in segments:
            yield self._headers_of(segment)

    def usage(self) -> TierUsage:
        """Return occupancy: the full sizes of files, filled or not."""
        pool, written = self._pool, self._disk.written
        others = [each.size_bytes for each in list(pool.segments.values()) if each.is_set_aside]
        detail: dict[str, str | int | float | bool] = {
            "direct_io": self._disk.is_direct,
            "segments": len(pool.segments),
            "segment_bytes": pool.segment_bytes,
            "block_bytes": pool.index.payload_total_bytes,
            "written_blocks_bytes": written.blocks_bytes,
            "written_moved_bytes": written.moved_bytes,
            "written_metadata_bytes": written.metadata_bytes,
            "refused_blocks": pool.volume.num_refused,
            "read_only": pool.volume.read_only is not None,
            "quarantined_blocks": self._quarantine.num_blocks,
            "files_dropped_at_start": self._recovered.num_dropped,
            "files_unreadable_at_start": self._recovered.num_unreadable,
            "footers_refused_at_start": self._recovered.num_footers_refused,
            "files_set_aside_at_start": self._recovered.num_set_aside,
            "files_set_aside": len(others),
            "set_aside_bytes": sum(others),
        }
        if pool.budget.is_limited:
            detail["write_budget"] = "used_up" if pool.budget.is_used_up else "left"
            detail["write_budget_bytes"] = pool.budget.available_bytes()
            detail["write_budget_day_bytes"] = pool.budget.day_bytes
        return TierUsage(len(pool.index), pool.allocated_bytes, pool.capacity_bytes, detail)

    def close(self) -> None:
        """Make blocks durable and let other processes use the directory.

        Raises TierError if that fails, or if a hanging write prevents it.
        """
        if not self._writer_lock.acquire(timeout=_CLOSE_S):
            raise TierTimeout("ssd: a write did not finish; the last blocks may be lost")
        try:
            if not self._is_closed:
                self._is_closed = True
                self._end()
        finally:
            self._writer_lock.release()

    def _open(
        self, directory: Path, capacity_bytes: int, segment_bytes: int, options: SsdOptions
    ) -> None:
        """Read the existing store and prepare to serve it. The caller holds the lock."""
        self._options = options
        self._disk = Disk(directory, options.direct_io, options.hook)
        self._remove_scratch()  # left by a crash during a measurement
        self._pool = _new_pool(self._disk, capacity_bytes, segment_bytes, options)
        self._is_persistent = options.is_persistent
        if not self._is_persistent:  # left by a crash
            purge_all(self._pool)
        self._recovered = recover(self._pool, self._age.oldest_s())
        is_synced = options.durability is Durability.BATCH or not self._disk.is_direct
        self._quarantine = Quarantine()
        self._appender = Appender(self._pool, options.seal, self._age, is_synced=is_synced)
        self._reclaimer = Reclaimer(self._pool, options.seal, self._age, self._appender.staging)
        self._fetcher = Fetcher(self._pool, options.seal, self._quarantine)
        start = int.from_bytes(os.urandom(4))
        self._scrubber = SegmentScrubber(
            self._pool, options.seal, self._age, self._quarantine, start=start
        )
        self._stagings: queue.Queue[memoryview] = queue.Queue(maxsize=options.num_workers)
        for _ in range(options.num_workers):
            self._stagings.put_nowait(new_staging())
        self._pool.volume.check_floors()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # files that stay are recovered by the next start
            self._pool.remove_retired_files()
        try:
            if not self._is_persistent:
                purge_all(self._pool)
                return
            while self._quarantine.mark(self._disk):
                pass
            if self._pool.active is not None:
                with contextlib.suppress(FileNotFoundError):  # removed by others: a miss
                    self._disk.sync(self._pool.active.path)
        except OSError as error:
            harm = (
                "the last blocks may be lost" if self._is_persistent else "some files may be left"
            )
            raise TierError(f"ssd: {harm}: {error.strerror}") from error
        finally:
            self._pool.is_closed = True
            self._directory_lock.release()

    def _headers_of(self, segment: Segment) -> Headers:
        """Read the headers of a segment's blocks; none if it was removed or is unreadable."""
        pool = self._pool
        with pool.lock:
            if segment.is_retired or segment.is_unreadable or segment.is_set_aside:
                return np.empty(0, PACKED_HEADER)
            segment.num_pins += 1
            packed = bytes(segment.entries)
        try:
            with self._faults():
                entries = np.frombuffer(packed, ENTRY_DTYPE)
                if not packed:
                    entries = entries_of(self._disk, segment)
            entries = written_since(entries, self._age.oldest_s())
            with pool.lock:
                is_live = pool.index.is_at(entries, segment.number)
            live: Headers = entries["header"][is_live]
            return live
        finally:
            pool.unpin(segment)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn device faults into TierError."""
        if self._is_closed:
            raise TierError("the ssd tier is closed")
        try:
            yield
        except OSError as error:
            raise TierError(f"ssd: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _writing(self, deadline_ns: int) -> Iterator[None]:
        """Hold the writer lock."""
        if not self._writer_lock.acquire(timeout=seconds_left(deadline_ns)):
            raise TierTimeout("ssd: another write did not finish in time")
        try:
            with self._faults():
                yield
        finally:
            self._writer_lock.release()

    @contextlib.contextmanager
    def _staging(self, deadline_ns: int) -> Iterator[memoryview]:
        """Borrow one of the ``num_workers`` staging buffers."""
        try:
            staging = self._stagings.get(timeout=seconds_left(deadline_ns))
        except queue.Empty:
            raise TierTimeout("ssd: other reads did not finish in time") from None
        try:
            yield staging
        finally:
            self._stagings.put_nowait(staging)


def _segment_bytes(block_bytes: int, num_blocks: int) -> int:
    """Return the size of a segment that holds exactly these blocks."""
    return PAGE_BYTES + num_blocks * record_bytes(block_bytes) + footer_bytes(num_blocks)


def _new_pool(
    disk: Disk, capacity_bytes: int, segment_bytes: int, options: SsdOptions
) -> SegmentPool:
    """Return a pool without files."""
    volume = Volume(
        disk.measure,
        options.now_s,
        free_space_floor_bytes=options.free_space_floor_bytes,
        free_inodes_floor=options.free_inodes_floor,
    )
    budget = WriteBudget(
        options.write_budget_bytes, lambda: disk.written.total_bytes, options.now_s
    )
    order = (
        ReadOrder(segment_bytes)
        if options.value_per_byte is None
        else ValueOrder(segment_bytes, options.value_per_byte, options.now_s)
    )
    return SegmentPool(
        disk, capacity_bytes, segment_bytes, volume=volume, budget=budget, order=order
    )
