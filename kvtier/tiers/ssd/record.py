"""One block in a segment: a header page and its payload, both padded to whole pages.

::

    page 0   [0, 128)    the packed BlockHeader; of a sealed block, its checksum field is the tag
             [128, 136)  mark: magic "KVTRECRD"
             [136, 144)        segment number, u64
             [144, 148)        opening, u32
             [148, 152)        state, u32: 0 live, 1 removed, 2 quarantined
             [152, 184)  the packed Stamp: codec, key id, when written, nonce
             [184, 192)  xxh3-64 of [0, 184)
             [192, 4096) zeros
    page 1…  the payload as stored, padded with zeros

Numbers are little-endian. A change of state rewrites page 0 in place, and nothing else of a record
ever changes but by a purge: that leaves of a header its lengths alone, and of a payload zeros.

Theory
------
The block's own checksum covers its payload, so it cannot be verified from the header page alone.
The mark can: recovery hops from header page to header page and trusts one only if its check holds
and it was written into this very segment. A record torn in its header ends the segment; one torn
in its payload is found by whoever reads it.

*Opening* counts the times that appending to a segment started anew: after a restart, and after a
write that failed. It never falls from one record to the next, so that a leftover of a failed write
cannot come back to life behind a newer record that happens to end where the leftover starts.
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
"""The used part of a header page."""

_PAYLOAD_BYTES = struct.Struct("<Q")
_PAYLOAD_BYTES_AT = 80
"""Where a packed BlockHeader has it, as in PACKED_HEADER; a test compares both with the header."""


class RecordState(IntEnum):
    """Whether a record still counts, and if not, why; a closed set on the disk."""

    LIVE = 0
    REMOVED = 1
    QUARANTINED = 2
    """Failed a check; kept for whoever wants to know, never served."""


def padded(size_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Return what a block of ``payload_bytes`` takes in a segment."""
    return PAGE_BYTES + padded(payload_bytes)


def redacted(header: bytes) -> bytes:
    """Return what may stay of a packed header once its block must not be told any more."""
    kept = slice(_PAYLOAD_BYTES_AT, _PAYLOAD_BYTES_AT + _PAYLOAD_BYTES.size)
    return (bytes(_PAYLOAD_BYTES_AT) + header[kept]).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The used part of a header page, written and read back."""

    header: bytes
    """Packed."""
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
        """Read a head back; None unless it is whole and belongs to that segment."""
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
        """Return the head of a removed record that tells nothing but how to hop over it."""
        return replace(self, header=redacted(self.header), state=RecordState.REMOVED)


_CHUNK_BYTES = 1 << 20
"""Read at a time: whole segments pass through, at the drive's speed (0.1 s for 256 MiB, of cached
pages, half of it for looking at them)."""


def find_record(
    fd: int,
    segment_number: int,
    epoch: int,
    start: int,
    end: int,
    *,
    deadline_ns: int = NO_DEADLINE_NS,
) -> int | None:
    """Return the offset of the first record of a segment in ``[start, end)``, which are pages.

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
    """Read all bytes, or else only the first page; returns None if neither can be read."""
    for length in (size_bytes, PAGE_BYTES):
        try:
            return os.pread(fd, length, start)
        except OSError:
            continue
    return None
