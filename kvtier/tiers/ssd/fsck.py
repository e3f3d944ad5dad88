"""Checks and repairs a store that is not open: every record of every file.

====================  ============================================  ===========================
fault                 meaning                                       repair
====================  ============================================  ===========================
damaged record        fails verification twice                      quarantine it
duplicate record      hidden by a later record of the same block    mark it removed
footer missing        after a crash or a full disk; each start      write it
                      reads the records one by one
footer wrong          damaged, or inconsistent with the records     rewrite it
unreachable bytes     follow an unreadable header; the records      write a footer that lists
                      behind them were found page by page           these records
file cut short        its end is missing                            end it with a footer
unreadable file       named like a segment, but not one             remove it
====================  ============================================  ===========================

A check changes nothing. Each step of a repair leaves a valid store, so a repair can be interrupted
and repeated. Files of another version are not faults: they are set aside.

Unreadable sectors and files that cannot be opened are reported and left as they are: the cause may
be the drive, a cable or a permission. Records sealed with a key that was not given are counted and
assumed to be sound.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.seal import Seal
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.index import SegmentIndex
from kvtier.tiers.ssd.record import RecordState
from kvtier.tiers.ssd.segment import (
    TOMBSTONE_S,
    Segment,
    footer_bytes,
    is_of_other_version,
    load_segment,
    mark_records,
    seal_segment,
    segment_number,
    walk_records,
    written_since,
)
from kvtier.tiers.ssd.segment_check import Footer, SegmentCheck, check_segment

__all__ = ["Fsck", "FsckPurpose", "FsckReport"]

_SAVED = ("key_spaces.json", "learned.json")
_OURS = frozenset(
    {"lock", "probe", "scratch", *(name + end for name in _SAVED for end in ("", ".new", ".aside"))}
)
"""Names of other files and directories that belong to the store."""

_FOREIGN_SHOWN_MAX = 100
"""Maximum number of foreign file names reported; all are counted."""


class FsckPurpose(Enum):
    """Whether faults are only reported, or repaired."""

    CHECK = "check"
    REPAIR = "repair"


@dataclass(slots=True)
class FsckReport:
    """Findings, as they were before any repair."""

    segments: int = 0
    records: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    """Payload bytes of the live blocks."""
    removed_records: int = 0
    quarantined_records: int = 0
    unchecked_records: int = 0
    """Records sealed with a key that was not given."""
    used_bytes: int = 0
    """Bytes allocated by all files."""
    set_aside_files: int = 0
    """Files written by another version."""
    set_aside_bytes: int = 0
    foreign_files: int = 0
    foreign_names: list[str] = field(default_factory=list)
    damaged_records: Counter[str] = field(default_factory=Counter)
    """Damaged records by the reason for which a read would miss."""
    duplicate_records: int = 0
    footers_missing: int = 0
    footers_wrong: int = 0
    unreachable_bytes: int = 0
    files_cut_short: int = 0
    unreadable_files: int = 0
    unreadable_records: int = 0
    """Records on unreadable sectors."""
    repaired: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    """What could not be read or repaired, one line each."""

    @property
    def num_faults(self) -> int:
        """Return the number of faults; unreachable bytes count as one."""
        counts = (
            self.damaged_records.total(),
            self.duplicate_records,
            self.footers_missing,
            self.footers_wrong,
            self.files_cut_short,
            self.unreadable_files,
        )
        return sum(counts) + (self.unreachable_bytes > 0) + self.num_left

    @property
    def num_left(self) -> int:
        """Return how many faults cannot be repaired, or were not."""
        return self.unreadable_records + len(self.failed)


class Fsck:
    """Checks all files of a directory that the caller holds locked.

    ``keeps_others``: keep files written by another version.
    """

    def __init__(
        self, disk: Disk, seal: Seal, purpose: FsckPurpose, *, keeps_others: bool = True
    ) -> None:
        self._disk = disk
        self._seal = seal
        self._is_repair = purpose is FsckPurpose.REPAIR
        self._keeps_others = keeps_others
        self._report = FsckReport()
        self._index = SegmentIndex()
        self._num_live = 0
        """Records that would be served if each were the only one of its block."""

    def run(
        self, note_progress: Callable[[int, int], None] = lambda _done, _all: None
    ) -> FsckReport:
        """Check, and repair if that is the purpose. Calls back with files done and their total.

        Raises OSError only if the directory itself cannot be read.
        """
        paths = self._segment_paths()
        last = next((path for path in reversed(paths) if not self._is_others(path)), None)
        for done, path in enumerate(paths):
            note_progress(done, len(paths))
            with self._recording_faults(path):
                self._take(path, is_last=path is last)
        report, index = self._report, self._index
        index.drop(index.expired_rows(TOMBSTONE_S + 1))
        report.live_blocks, report.live_bytes = len(index), index.payload_total_bytes
        report.duplicate_records = self._num_live - len(index)
        if self._is_repair and report.duplicate_records:
            for path in paths:
                with self._recording_faults(path):
                    self._remove_duplicates(path)
        if report.repaired:
            self._disk.sync_directory()
        return report

    def _segment_paths(self) -> list[Path]:
        """Return the files named like segments, oldest first; count the others."""
        report, paths = self._report, []
        for path in sorted(self._disk.directory.iterdir()):
            report.used_bytes += path.lstat().st_blocks * 512
            if segment_number(path) is not None and path.is_file() and not path.is_symlink():
                paths.append(path)
            elif path.name not in _OURS:
                report.foreign_files += 1
                report.foreign_names[_FOREIGN_SHOWN_MAX:] = []
                report.foreign_names.append(path.name)
        return paths

    @contextmanager
    def _recording_faults(self, path: Path) -> Iterator[None]:
        """Record a device fault in a file and continue with the next."""
        try:
            yield
        except OSError as error:
            self._report.failed.append(f"{path.name}: {error.strerror or error}")

    def _take(self, path: Path, *, is_last: bool) -> None:
        found = check_segment(self._disk, path, self._seal, is_last=is_last)
        if found is None:
            self._take_unreadable(path)
            return
        self._count(found)
        if self._is_repair:
            self._repair(found)

    def _is_others(self, path: Path) -> bool:
        """Return whether another version wrote a file, as far as it is readable."""
        with suppress(OSError):
            return is_of_other_version(self._disk, path)
        return False

    def _take_unreadable(self, path: Path) -> None:
        report = self._report
        if is_of_other_version(self._disk, path):
            report.set_aside_files += 1
            report.set_aside_bytes += path.stat().st_blocks * 512
            if not self._keeps_others:
                self._remove(path, "files of another version removed")
            return
        report.unreadable_files += 1
        if self._is_repair:
            self._remove(path)

    def _count(self, found: SegmentCheck) -> None:
        report, entries = self._report, found.entries
        self._index.put(entries, found.segment.number)
        self._num_live += len(written_since(entries, 0))
        report.segments += 1
        report.records += len(entries)
        report.removed_records += found.num_removed
        report.quarantined_records += found.num_quarantined
        report.unchecked_records += found.num_unchecked
        report.unreadable_records += found.num_unreadable
        report.damaged_records += found.reasons
        report.footers_missing += found.footer is Footer.MISSING
        report.footers_wrong += found.footer is Footer.WRONG
        report.unreachable_bytes += found.unreachable_bytes
        report.files_cut_short += found.is_cut_short

    def _repair(self, found: SegmentCheck) -> None:
        segment, disk = found.segment, self._disk
        if found.damaged_pages:
            mark_records(disk, segment, found.damaged_pages, RecordState.QUARANTINED)
            self._report.repaired["records quarantined"] += len(found.damaged_pages)
        if found.is_cut_short:
            self._end(segment)
        elif found.footer in {Footer.MISSING, Footer.WRONG} or found.unreachable_bytes:
            self._write_footer(segment)

    def _write_footer(self, segment: Segment) -> None:
        walked, _ = walk_records(self._disk, segment)
        seal_segment(self._disk, walked)
        self._report.repaired["footers written"] += 1

    def _end(self, segment: Segment) -> None:
        """Turn a truncated file into a complete one of its present size."""
        whole = Segment(segment.path, segment.number, segment.size_bytes & -PAGE_BYTES)
        walked, entries = walk_records(self._disk, whole)
        is_worth_it = len(written_since(entries, 0)) > 0
        if not is_worth_it or whole.size_bytes < walked.tail_bytes + footer_bytes(len(entries)):
            self._remove(segment.path)
            return
        self._disk.hook("segment.truncate")
        os.truncate(segment.path, whole.size_bytes)
        seal_segment(self._disk, walked)
        self._report.repaired["files ended"] += 1

    def _remove(self, path: Path, what: str = "files removed") -> None:
        self._disk.unlink(path)
        self._report.repaired[what] += 1

    def _remove_duplicates(self, path: Path) -> None:
        """Mark the live records of a file that a later record of their block hides."""
        loaded = load_segment(self._disk, path) if path.exists() else None
        if loaded is None:
            return
        segment, entries = loaded
        counting = written_since(entries, 0)
        hidden = counting[~self._index.is_at(counting, segment.number)]
        if len(hidden):
            mark_records(self._disk, segment, hidden["page"].tolist(), RecordState.REMOVED)
            self._report.repaired["duplicates removed"] += len(hidden)
