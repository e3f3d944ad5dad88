"""A record: one block in a segment, a header page and a payload, both padded to whole pages.

::

    page 0   [0, 128)     packed BlockHeader; in a sealed block its checksum field is the tag
             [128, 136)   magic "KVTRECRD"
             [136, 144)   segment number, u64
             [144, 148)   epoch, u32
             [148, 152)   state, u32: 0 live, 1 removed, 2 quarantined
             [152, 184)   packed Stamp: codec, key id, write time, nonce
             [184, 192)   xxh3-64 of [0, 184)
             [192, 4096)  zeros
    page 1…  the payload as stored, padded with zeros

Numbers are little-endian. A change of state rewrites page 0 in place. Otherwise only a purge
changes a record: it leaves the lengths of the header and zeros the payload.

Theory
------
The block's checksum covers its payload, so it cannot be verified from the header page alone. The
mark (bytes 128 to 192) can: recovery steps from header page to header page, and trusts one only if
its check holds and it was written into this segment. A record torn in its header ends the segment;
a reader finds one torn in its payload.

The *epoch* counts how often appending to a segment started anew: after a restart, and after a
failed write. It never decreases from one record to the next, so that a leftover of a failed write
cannot become valid behind a newer record that happens to end where the leftover starts.

A record states its length, so an unreadable header hides all records that follow it. Since each one
starts at a page, with a magic, the segment's number and a checksum, ``find_record`` finds the next
one by looking at every page. No payload page passes for a header by accident, and the found record
is verified like any other when it is read.
"""

import errno
import os
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from kvtier.core.identity import HEADER_BYTES
from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.check import NO_DEADLINE_NS, seconds_left
from kvtier.tiers.seal import STAMP_BYTES, Stamp

__all__ = [
    "RECORD_HEAD_BYTES",
    "RecordHead",
    "RecordState",
    "find_record",
    "padded",
    "record_bytes",
    "redacted",
]


_MAGIC = b"KVTRECRD"
_MARK = struct.Struct("<8sQII")
_CHECK = struct.Struct("<Q")
_STAMP_AT = HEADER_BYTES + _MARK.size
_CHECK_AT = _STAMP_AT + STAMP_BYTES
RECORD_HEAD_BYTES = _CHECK_AT + _CHECK.size
"""Size of the used part of a header page."""

_PAYLOAD_BYTES = struct.Struct("<Q")
_PAYLOAD_BYTES_AT = 80
"""Offset of the payload length in a packed BlockHeader, as in PACKED_HEADER; a test compares
both.
"""


class RecordState(IntEnum):
    """Whether a record is live. A closed set, stored on disk."""

    LIVE = 0
    REMOVED = 1
    QUARANTINED = 2
    """Failed verification; kept for inspection, never served."""


def padded(size_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Return the size of a block of ``payload_bytes`` in a segment."""
    return PAGE_BYTES + padded(payload_bytes)


def redacted(header: bytes) -> bytes:
    """Return what may remain of a packed header once its block must not be identifiable."""
    kept = slice(_PAYLOAD_BYTES_AT, _PAYLOAD_BYTES_AT + _PAYLOAD_BYTES.size)
    return (bytes(_PAYLOAD_BYTES_AT) + header[kept]).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The used part of a header page."""

    header: bytes
    """The packed header."""
    stamp: Stamp
    epoch: int
    state: RecordState = RecordState.LIVE

    def pack(self, segment_number: int) -> bytes:
        """Return ``RECORD_HEAD_BYTES`` bytes for a record of that segment."""
        assert len(self.header) == HEADER_BYTES
        mark = _MARK.pack(_MAGIC, segment_number, self.epoch, self.state)
        marked = self.header + mark + self.stamp.pack()
        return marked + _CHECK.pack(xxhash.xxh3_64_intdigest(marked))

    @classmethod
    def unpack(cls, packed: bytes, segment_number: int) -> "RecordHead | None":
        """Unpack a head; None unless it is intact and belongs to that segment."""
        if len(packed) < RECORD_HEAD_BYTES:
            return None
        magic, number, epoch, state = _MARK.unpack_from(packed, HEADER_BYTES)
        if magic != _MAGIC or number != segment_number:
            return None
        (check,) = _CHECK.unpack_from(packed, _CHECK_AT)
        if check != xxhash.xxh3_64_intdigest(packed[:_CHECK_AT]):
            return None
        stamp = Stamp.unpack(packed[_STAMP_AT:_CHECK_AT])
        if stamp is None or state > RecordState.QUARANTINED:
            return None
        return cls(packed[:HEADER_BYTES], stamp, epoch, RecordState(state))

    @property
    def payload_bytes(self) -> int:
        """Return the length of the payload that follows."""
        (payload_bytes,) = _PAYLOAD_BYTES.unpack_from(self.header, _PAYLOAD_BYTES_AT)
        return int(payload_bytes)

    def marked(self, state: RecordState) -> "RecordHead":
        """Return the head of the same record in another state."""
        return replace(self, state=state)

    def erased(self) -> "RecordHead":
        """Return the head of a removed record that only allows skipping it."""
        return replace(self, header=redacted(self.header), state=RecordState.REMOVED)


_CHUNK_BYTES = 1 << 20
"""Bytes read at a time. Whole segments are read at the drive's speed (0.1 s for 256 MiB of cached
pages, half of it for checking them).
"""


def find_record(
    fd: int,
    segment_number: int,
    epoch: int,
    start: int,
    end: int,
    *,
    deadline_ns: int = NO_DEADLINE_NS,
) -> int | None:
    """Return the offset of the first record of a segment in ``[start, end)``, both page offsets.

    Records of an earlier ``epoch`` are leftovers. Holes and unreadable pages are skipped, so that
    hardly anything is read of a segment that was never filled. The file may be shorter than
    ``end``, because it can be truncated at any time. Raises TierTimeout.
    """
    while (start := _next_content(fd, start, end)) < end:
        seconds_left(deadline_ns)
        chunk = _read(fd, start, min(_CHUNK_BYTES, end - start))
        if chunk is None:
            start += PAGE_BYTES
            continue
        if not chunk:
            return None  # the file ends here
        for at in range(0, len(chunk), PAGE_BYTES):
            head = RecordHead.unpack(chunk[at : at + RECORD_HEAD_BYTES], segment_number)
            if head is not None and head.epoch >= epoch:
                return start + at
        start += max(len(chunk), PAGE_BYTES)
    return None


def _next_content(fd: int, start: int, end: int) -> int:
    """Return the first page from ``start`` on that was ever written; ``end`` if there is none.

    Returns ``start`` if the file system cannot tell.
    """
    try:
        found = os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        return end if error.errno == errno.ENXIO else start
    return max(start, found // PAGE_BYTES * PAGE_BYTES)


def _read(fd: int, start: int, size_bytes: int) -> bytes | None:
    """Read all bytes, or else only the first page; None if neither is readable."""
    for length in (size_bytes, PAGE_BYTES):
        try:
            return os.pread(fd, length, start)
        except OSError:
            continue
    return None
