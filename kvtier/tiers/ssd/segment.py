"""One segment: a preallocated file that records are appended to until it is full.

::

    page 0    header: magic, format version, instance, number, size, xxh3-64 of these
    page 1…   records (record.py), one after the other
    …         free
    last      footer: one entry a record, then a trailer in the last bytes of the file

A sealed segment has a footer, so that recovery reads a few pages of it instead of one page a
record. The footer is a shortcut: without a valid one the records are walked. Room for it is kept
from the start, so sealing never fails for want of space.
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
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.record import (
    RECORD_HEAD_BYTES,
    RecordHead,
    RecordState,
    padded,
    record_bytes,
)

__all__ = [
    "ENTRY_DTYPE",
    "Entries",
    "Segment",
    "create_segment",
    "footer_bytes",
    "load_segment",
    "mark_removed",
    "read_entries",
    "seal_segment",
    "segment_number",
]

_FORMAT_VERSION = 1
"""Of segments; another version is not read, and its space is taken back."""

_HEADER = struct.Struct("<8sHH4x16sQQ")
_HEADER_MAGIC = b"KVTSEGMT"
_TRAILER = struct.Struct("<8sQII")
_TRAILER_MAGIC = b"KVTFOOTR"
_CHECK = struct.Struct("<Q")
_TRAILER_BYTES = _TRAILER.size + _CHECK.size
_PLACE = struct.Struct("<II")
_SUFFIX = ".segment"

ENTRY_DTYPE = np.dtype([("header", PACKED_HEADER), ("page", "<u4"), ("padding", "<u4")])
"""One record in a footer: its block's header and the page its record starts at."""

Entries = npt.NDArray[np.void]
"""An array of ``ENTRY_DTYPE``, in the order of appending."""


@dataclass(slots=True, eq=False)
class Segment:
    """One file. Guarded by the pool's lock, but for the appending part: that has one writer."""

    path: Path
    number: int
    size_bytes: int
    tail_bytes: int = PAGE_BYTES
    """Where the next record goes."""
    opening: int = 0
    entries: bytearray = field(default_factory=bytearray)
    """Packed ``ENTRY_DTYPE`` of a segment that is appended to; empty once it is sealed."""
    removed_pages: set[int] = field(default_factory=set)
    """Records of ``entries`` that have been removed since."""
    has_footer: bool = False
    num_faults: int = 0
    """Failed appends since the last that succeeded."""
    num_pins: int = 0
    is_retired: bool = False
    """No longer part of the store; the file goes with the last pin."""

    def fitting(self, payload_sizes: Iterable[int]) -> int:
        """Return how many leading records of these sizes fit, their footer entries included."""
        count, end = 0, self.tail_bytes
        num_records = len(self.entries) // ENTRY_DTYPE.itemsize
        for payload_bytes in payload_sizes:
            end += record_bytes(payload_bytes)
            if end + footer_bytes(num_records + count + 1) > self.size_bytes:
                break
            count += 1
        return count

    def note(self, header: bytes, payload_bytes: int) -> int:
        """Append an entry for a record that starts at the tail; returns its page."""
        page = self.tail_bytes // PAGE_BYTES
        self.entries += header + _PLACE.pack(page, 0)
        self.tail_bytes += record_bytes(payload_bytes)
        return page


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
    """Make the file of a segment, with all its space."""
    path = disk.directory / f"{number:016x}{_SUFFIX}"
    packed = _HEADER.pack(_HEADER_MAGIC, _FORMAT_VERSION, 0, instance, number, size_bytes)
    disk.create(path, size_bytes, packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed)))
    return Segment(path, number, size_bytes)


def seal_segment(disk: Disk, segment: Segment) -> None:
    """Write the footer and make the whole segment durable; nothing is appended afterwards."""
    entries = np.frombuffer(bytes(segment.entries), ENTRY_DTYPE)
    if segment.removed_pages:
        entries = entries[~np.isin(entries["page"], list(segment.removed_pages))]
    packed = entries.tobytes()
    trailer = _TRAILER.pack(_TRAILER_MAGIC, segment.number, len(entries), segment.opening)
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(packed + trailer))
    size = footer_bytes(len(entries))
    footer = packed.ljust(size - _TRAILER_BYTES, b"\0") + trailer + check
    disk.overwrite(segment.path, segment.size_bytes - size, footer, "segment.footer")
    segment.has_footer = True
    segment.entries = bytearray()
    segment.removed_pages = set()


def mark_removed(disk: Disk, segment: Segment, pages: list[int]) -> None:
    """Make the removal of records durable, so that recovery does not find them again."""
    if segment.has_footer:
        last_page = segment.size_bytes - PAGE_BYTES
        disk.overwrite(segment.path, last_page, bytes(PAGE_BYTES), "footer.drop")
        segment.has_footer = False
    else:
        segment.removed_pages.update(pages)
    disk.hook("record.remove")
    disk.rewrite(segment.path, pages, lambda page: _removed(page, segment.number))


def _removed(page: bytes, number: int) -> bytes:
    head = RecordHead.unpack(page[:RECORD_HEAD_BYTES], number)
    if head is None:
        return page  # damaged: recovery will not take it for a record either
    return RecordHead(head.header, head.opening, RecordState.REMOVED).pack(number)


def load_segment(disk: Disk, path: Path) -> tuple[Segment, Entries] | None:
    """Read a segment back: as much of it as is whole; None where nothing can be made of it."""
    number = segment_number(path)
    with disk.opened_buffered(path) as fd:
        packed = os.pread(fd, PAGE_BYTES, 0)[: _HEADER.size + _CHECK.size]
        file_bytes = os.fstat(fd).st_size
        if len(packed) < _HEADER.size + _CHECK.size:
            return None
        magic, version, _, _, written_number, size_bytes = _HEADER.unpack_from(packed)
        (check,) = _CHECK.unpack_from(packed, _HEADER.size)
        if (
            check != xxhash.xxh3_64_intdigest(packed[: _HEADER.size])
            or (magic, version, written_number) != (_HEADER_MAGIC, _FORMAT_VERSION, number)
            or file_bytes > size_bytes
        ):
            return None
        segment = Segment(path, written_number, file_bytes)
        entries = _read_footer(fd, segment)
        if entries is None:
            entries = _walk(fd, segment)
            if file_bytes < size_bytes:
                segment.tail_bytes = file_bytes  # cut short by someone: nothing more goes in
    return segment, entries


def read_entries(disk: Disk, segment: Segment) -> Entries:
    """Read the entries of a segment that is not appended to now."""
    with disk.opened_buffered(segment.path) as fd:
        entries = _read_footer(fd, segment)
        return (
            _walk(fd, Segment(segment.path, segment.number, segment.size_bytes))
            if (entries is None)
            else entries
        )


def _read_footer(fd: int, segment: Segment) -> Entries | None:
    end = segment.size_bytes - _TRAILER_BYTES
    trailer = os.pread(fd, _TRAILER_BYTES, max(end, 0))
    if len(trailer) < _TRAILER_BYTES:
        return None
    magic, number, count, opening = _TRAILER.unpack_from(trailer)
    start = segment.size_bytes - footer_bytes(count)
    if (magic, number) != (_TRAILER_MAGIC, segment.number) or start < PAGE_BYTES:
        return None
    packed = os.pread(fd, count * ENTRY_DTYPE.itemsize, start)
    (check,) = _CHECK.unpack_from(trailer, _TRAILER.size)
    if check != xxhash.xxh3_64_intdigest(packed + trailer[: _TRAILER.size]):
        return None
    segment.has_footer = True
    segment.opening = opening
    return np.frombuffer(packed, ENTRY_DTYPE)


def _walk(fd: int, segment: Segment) -> Entries:
    """Hop from record to record up to the first that is not whole; sets the tail."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    num_bytes = RECORD_HEAD_BYTES
    while True:
        try:
            packed = os.pread(fd, num_bytes, segment.tail_bytes)
        except OSError:
            break  # an unreadable sector ends the segment like a torn record
        head = RecordHead.unpack(packed, segment.number)
        if head is None or head.opening < segment.opening:
            break
        payload_bytes = head.payload_bytes
        if not segment.fitting([payload_bytes]):
            break
        segment.opening = head.opening
        page = segment.note(head.header, payload_bytes)
        if head.state is RecordState.REMOVED:
            segment.removed_pages.add(page)
    entries = np.frombuffer(bytes(segment.entries), ENTRY_DTYPE)
    if segment.removed_pages:
        entries = entries[~np.isin(entries["page"], list(segment.removed_pages))]
    return entries
