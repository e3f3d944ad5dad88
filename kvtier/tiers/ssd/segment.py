"""A segment: a preallocated file that records are appended to until it is full.

::

    page 0    header: magic, format version, instance, number, size, xxh3-64 of these;
              the same in every version, so that each can recognize the others' files
    page 1…   records (record.py), one after another
    …         free
    last      footer: one entry per record, then a trailer in the last bytes of the file

A sealed segment has a footer, so that recovery reads a few pages of it instead of one page per
record. The footer is an optimization: without a valid one, the records are walked. Space for it is
reserved from the start, so sealing never fails for lack of space.

An entry repeats a record's header, its page and its write time in seconds since 1970. The entry of
a record that no longer counts stays as a *tombstone*: its write time is 0, before all others.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.core.identity import PACKED_HEADER
from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.check import NO_DEADLINE_NS, seconds_left
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.record import (
    RECORD_HEAD_BYTES,
    RecordHead,
    RecordState,
    find_record,
    padded,
    record_bytes,
)

__all__ = [
    "ENTRY_DTYPE",
    "PAYLOAD_BYTES_MAX",
    "TOMBSTONE_S",
    "Entries",
    "Segment",
    "add_tombstones",
    "create_segment",
    "declared_size",
    "entries_of",
    "footer_bytes",
    "is_in_place",
    "is_of_other_version",
    "load_segment",
    "mark_records",
    "seal_segment",
    "segment_number",
    "walk_records",
    "write_footer",
    "written_since",
]

_FORMAT_VERSION = 2
"""Version of the segment format. Files of another version are not read, and are the first to be
removed for space.
"""

_HEADER = struct.Struct("<8sHH4x16sQQ")
_HEADER_MAGIC = b"KVTSEGMT"
_TRAILER = struct.Struct("<8sQII")
_TRAILER_MAGIC = b"KVTFOOTR"
_CHECK = struct.Struct("<Q")
_TRAILER_BYTES = _TRAILER.size + _CHECK.size
_PLACE = struct.Struct("<II")
_SUFFIX = ".segment"

ENTRY_DTYPE = np.dtype([("header", PACKED_HEADER), ("page", "<u4"), ("written_s", "<u4")])
"""A record in a footer: its block's header, its first page, and its write time."""

TOMBSTONE_S = 0
"""``written_s`` of a record that no longer counts."""

PAYLOAD_BYTES_MAX = (1 << 32) - 1
"""Largest block size that a row of the index can store."""

_SEGMENT_BYTES_MAX = 16 << 30
"""Largest value of ``ssd.segment``: a file that declares more is not a segment."""

_LATEST_S = (1 << 32) - 1
"""Latest time that an entry can store."""

Entries = npt.NDArray[np.void]
"""An array of ``ENTRY_DTYPE`` in the order of appending."""


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file. Guarded by the pool's lock, except for appending, which has one writer."""

    path: Path
    number: int
    size_bytes: int
    tail_bytes: int = PAGE_BYTES
    """Offset of the next record."""
    epoch: int = 0
    entries: bytearray = field(default_factory=bytearray)
    """Packed ``ENTRY_DTYPE`` while the segment is appended to; empty once it is sealed."""
    has_footer: bool = False
    is_footer_refused: bool = False
    """The footer is intact but lists records that cannot be in this file."""
    is_unreadable: bool = False
    """The file was unreadable at startup, so the index lacks its blocks."""
    is_set_aside: bool = False
    """Another version wrote the file: it is not read or changed, and is removed first."""
    num_faults: int = 0
    """Failed appends since the last success."""
    num_pins: int = 0
    is_retired: bool = False
    """No longer part of the store; the file is removed with the last pin."""

    def fitting(self, payload_sizes: Iterable[int]) -> int:
        """Return how many leading records of these sizes fit, with their footer entries."""
        count, end = 0, self.tail_bytes
        num_records = len(self.entries) // ENTRY_DTYPE.itemsize
        for payload_bytes in payload_sizes:
            end += record_bytes(payload_bytes)
            if end + footer_bytes(num_records + count + 1) > self.size_bytes:
                break
            count += 1
        return count

    def note(self, header: bytes, payload_bytes: int, written_s: int) -> int:
        """Append an entry for a record that starts at the tail; return its page."""
        page = self.tail_bytes // PAGE_BYTES
        self.entries += header + _PLACE.pack(page, min(written_s, _LATEST_S))
        self.tail_bytes += record_bytes(payload_bytes)
        return page


def written_since(entries: Entries, oldest_s: int) -> Entries:
    """Return the live entries that are not older than ``oldest_s``."""
    is_kept = entries["written_s"] >= max(oldest_s, TOMBSTONE_S + 1)
    return entries if is_kept.all() else entries[is_kept]


def footer_bytes(num_records: int) -> int:
    """Return the size of a footer, in whole pages."""
    return padded(num_records * ENTRY_DTYPE.itemsize + _TRAILER_BYTES)


def segment_number(path: Path) -> int | None:
    """Return the number in a segment's file name; None for any other file."""
    stem = path.name.removesuffix(_SUFFIX)
    if stem == path.name or len(stem) != 16 or not set(stem) <= set("0123456789abcdef"):
        return None
    return int(stem, 16)


def create_segment(disk: Disk, number: int, size_bytes: int, instance: bytes) -> Segment:
    """Create a segment's file with all its space."""
    path = disk.directory / f"{number:016x}{_SUFFIX}"
    packed = _HEADER.pack(_HEADER_MAGIC, _FORMAT_VERSION, 0, instance, number, size_bytes)
    disk.create(path, size_bytes, packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed)))
    return Segment(path, number, size_bytes)


def seal_segment(disk: Disk, segment: Segment) -> None:
    """Write the footer and make the segment durable; nothing is appended afterwards."""
    write_footer(disk, segment, bytes(segment.entries), "segment.footer")
    segment.has_footer = True
    segment.entries = bytearray()


def write_footer(disk: Disk, segment: Segment, packed: bytes, step: str) -> None:
    """Write the footer for these packed entries and make it durable."""
    count = len(packed) // ENTRY_DTYPE.itemsize
    trailer = _TRAILER.pack(_TRAILER_MAGIC, segment.number, count, segment.epoch)
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(packed + trailer))
    size = footer_bytes(count)
    footer = packed.ljust(size - _TRAILER_BYTES, b"\0") + trailer + check
    disk.overwrite(segment.path, segment.size_bytes - size, footer, step)


def mark_records(disk: Disk, segment: Segment, pages: list[int], state: RecordState) -> None:
    """Durably mark records as not live, so that recovery does not find them again.

    Writes the tombstones before the marks. In the opposite order, a restart in between would find
    entries of dead records, and their blocks could not be stored again.
    """
    add_tombstones(disk, segment, pages)
    disk.hook("record.remove")
    disk.rewrite(segment.path, pages, lambda page: _marked(page, segment.number, state))


def add_tombstones(disk: Disk, segment: Segment, pages: list[int]) -> None:
    """Turn the entries of records into tombstones, on disk if there is a footer."""
    if not segment.has_footer:
        # Sealed without a footer: recovery walks the records and needs no entries.
        _set_tombstones(np.frombuffer(segment.entries, ENTRY_DTYPE), pages)
        return
    with disk.opened_buffered(segment.path) as fd:
        read = _read_footer(fd, segment)
    if read is None:
        segment.has_footer = False  # it is damaged now: recovery walks the records
        return
    entries = read.copy()
    _set_tombstones(entries, pages)
    write_footer(disk, segment, entries.tobytes(), "footer.drop")


def _set_tombstones(entries: Entries, pages: list[int]) -> None:
    entries["written_s"][np.isin(entries["page"], pages)] = TOMBSTONE_S


def _marked(page: bytes, number: int, state: RecordState) -> bytes:
    head = RecordHead.unpack(page[:RECORD_HEAD_BYTES], number)
    if head is None:
        return page  # damaged: recovery ignores it as well
    return head.marked(state).pack(number)


def load_segment(disk: Disk, path: Path) -> tuple[Segment, Entries] | None:
    """Read a segment as far as it is intact; None if nothing is usable."""
    with disk.opened_buffered(path) as fd:
        size_bytes = declared_size(fd, segment_number(path))
        file_bytes = os.fstat(fd).st_size
        if size_bytes is None or file_bytes > size_bytes:
            return None
        segment = Segment(path, segment_number(path) or 0, file_bytes)
        entries = _read_footer(fd, segment)
        if entries is None:
            entries = _walk(fd, segment)
            if file_bytes < size_bytes:
                segment.tail_bytes = file_bytes  # truncated: nothing more is appended
    return segment, entries


def is_in_place(disk: Disk, segment: Segment) -> bool:
    """Return whether a segment's file exists with unchanged size. Raises OSError."""
    try:
        with disk.opened_buffered(segment.path) as fd:
            is_there = _read_header(fd, segment.number) is not None
            return is_there and os.fstat(fd).st_size == segment.size_bytes
    except FileNotFoundError:
        return False


def declared_size(fd: int, number: int | None) -> int | None:
    """Return the size in a segment's header; None if it is not this segment's header."""
    version, size_bytes = _read_header(fd, number) or (None, 0)
    return size_bytes if version == _FORMAT_VERSION and size_bytes <= _SEGMENT_BYTES_MAX else None


def is_of_other_version(disk: Disk, path: Path) -> bool:
    """Return whether a file is a segment of a version that cannot be read here."""
    with disk.opened_buffered(path) as fd:
        header = _read_header(fd, segment_number(path))
    return header is not None and header[0] != _FORMAT_VERSION


def _read_header(fd: int, number: int | None) -> tuple[int, int] | None:
    """Return format version and size; None if it is not the header of this segment."""
    packed = os.pread(fd, _HEADER.size + _CHECK.size, 0)
    if len(packed) < _HEADER.size + _CHECK.size:
        return None
    magic, version, _, _, written_number, size_bytes = _HEADER.unpack_from(packed)
    (check,) = _CHECK.unpack_from(packed, _HEADER.size)
    if check != xxhash.xxh3_64_intdigest(packed[: _HEADER.size]):
        return None
    is_this = (magic, written_number) == (_HEADER_MAGIC, number)
    return (int(version), int(size_bytes)) if is_this else None


def entries_of(disk: Disk, segment: Segment, *, deadline_ns: int = NO_DEADLINE_NS) -> Entries:
    """Return the entries of all records, with tombstones, from memory or from the file.

    If the segment is appended to, the caller must prevent that. Raises TierTimeout if the records
    have to be walked and that takes too long.
    """
    if segment.entries:
        return np.frombuffer(bytes(segment.entries), ENTRY_DTYPE)
    with disk.opened_buffered(segment.path) as fd:
        entries = _read_footer(fd, segment)
        if entries is None:
            walked = Segment(segment.path, segment.number, segment.size_bytes)
            entries = _walk(fd, walked, deadline_ns)
    return entries


def walk_records(disk: Disk, segment: Segment) -> tuple[Segment, Entries]:
    """Return the segment as its records alone describe it, ready to seal, and their entries."""
    walked = Segment(segment.path, segment.number, segment.size_bytes)
    with disk.opened_buffered(segment.path) as fd:
        return walked, _walk(fd, walked)


def _read_footer(fd: int, segment: Segment) -> Entries | None:
    end = segment.size_bytes - _TRAILER_BYTES
    trailer = os.pread(fd, _TRAILER_BYTES, max(end, 0))
    if len(trailer) < _TRAILER_BYTES:
        return None
    magic, number, count, epoch = _TRAILER.unpack_from(trailer)
    start = segment.size_bytes - footer_bytes(count)
    if (magic, number) != (_TRAILER_MAGIC, segment.number) or start < PAGE_BYTES:
        return None
    packed = os.pread(fd, count * ENTRY_DTYPE.itemsize, start)
    (check,) = _CHECK.unpack_from(trailer, _TRAILER.size)
    if check != xxhash.xxh3_64_intdigest(packed + trailer[: _TRAILER.size]):
        return None
    entries = np.frombuffer(packed, ENTRY_DTYPE)
    if not _are_within(entries, start):
        segment.is_footer_refused = True
        return None
    segment.has_footer = True
    segment.epoch = epoch
    return entries


def _are_within(entries: Entries, end: int) -> bool:
    """Return whether records follow one another between the header page and ``end``.

    A valid checksum does not guarantee that, and later code allocates memory by these sizes.
    """
    sizes = entries["header"]["payload_bytes"]
    if (sizes > min(end, PAYLOAD_BYTES_MAX)).any():
        return False  # checked before sizes are added, which could overflow
    starts = entries["page"].astype(np.int64) * PAGE_BYTES
    ends = starts + PAGE_BYTES + -(-sizes.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
    edges_before = np.concatenate([[PAGE_BYTES], ends])
    return bool((edges_before <= np.concatenate([starts, [end]])).all())


def _walk(fd: int, segment: Segment, deadline_ns: int = NO_DEADLINE_NS) -> Entries:
    """Walk from record to record, skipping anything else; sets the tail."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    end = segment.tail_bytes
    while True:
        seconds_left(deadline_ns)
        head = _head_at_tail(fd, segment)
        if head is None:
            found = find_record(
                fd,
                segment.number,
                segment.epoch,
                segment.tail_bytes + PAGE_BYTES,
                segment.size_bytes,
                deadline_ns=deadline_ns,
            )
            if found is None:
                break
            segment.tail_bytes = found
            continue
        segment.epoch = head.epoch
        written_s = head.stamp.written_s if head.state is RecordState.LIVE else TOMBSTONE_S
        segment.note(head.header, head.payload_bytes, written_s)
        end = segment.tail_bytes
    segment.tail_bytes = end
    return np.frombuffer(bytes(segment.entries), ENTRY_DTYPE)


def _head_at_tail(fd: int, segment: Segment) -> RecordHead | None:
    """Return the head of the record at the tail; None for a leftover or an unreadable one."""
    try:
        packed = os.pread(fd, RECORD_HEAD_BYTES, segment.tail_bytes)
    except OSError:
        return None
    head = RecordHead.unpack(packed, segment.number)
    if head is None or head.epoch < segment.epoch:
        return None
    is_possible = head.payload_bytes <= PAYLOAD_BYTES_MAX and segment.fitting([head.payload_bytes])
    return head if is_possible else None
