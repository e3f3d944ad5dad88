"""One block in a segment: a header page and its payload, both padded to whole pages.

::

    page 0   [0, 128)    the packed BlockHeader
             [128, 152)  mark: magic, segment number, opening, state
             [152, 160)  xxh3-64 of [0, 152)
    page 1…  the payload, padded with zeros

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

import struct
from enum import IntEnum

import xxhash

from kvtier.core.identity import HEADER_BYTES
from kvtier.core.limits import PAGE_BYTES

__all__ = [
    "RECORD_HEAD_BYTES",
    "RecordHead",
    "RecordState",
    "padded",
    "record_bytes",
]

_MAGIC = b"KVTRECRD"
_MARK = struct.Struct("<8sQII")
_CHECK = struct.Struct("<Q")
RECORD_HEAD_BYTES = HEADER_BYTES + _MARK.size + _CHECK.size
"""The used part of a header page."""

_PAYLOAD_BYTES = struct.Struct("<Q")
_PAYLOAD_BYTES_AT = 80
"""Where a packed BlockHeader has it, as in PACKED_HEADER; a test compares both with the header."""


class RecordState(IntEnum):
    """Whether a record still counts."""

    LIVE = 0
    REMOVED = 1


def padded(size_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Return what a block of ``payload_bytes`` takes in a segment."""
    return PAGE_BYTES + padded(payload_bytes)


class RecordHead:
    """The used part of a header page, written and read back."""

    __slots__ = ("header", "opening", "state")

    def __init__(self, header: bytes, opening: int, state: RecordState = RecordState.LIVE) -> None:
        assert len(header) == HEADER_BYTES
        self.header = header
        self.opening = opening
        self.state = state

    def pack(self, segment_number: int) -> bytes:
        """Return ``RECORD_HEAD_BYTES`` bytes for a record of that segment."""
        marked = self.header + _MARK.pack(_MAGIC, segment_number, self.opening, self.state)
        return marked + _CHECK.pack(xxhash.xxh3_64_intdigest(marked))

    @classmethod
    def unpack(cls, packed: bytes, segment_number: int) -> "RecordHead | None":
        """Read a head back; None unless it is whole and belongs to that segment."""
        if len(packed) < RECORD_HEAD_BYTES:
            return None
        magic, number, opening, state = _MARK.unpack_from(packed, HEADER_BYTES)
        if magic != _MAGIC or number != segment_number:
            return None
        (check,) = _CHECK.unpack_from(packed, RECORD_HEAD_BYTES - _CHECK.size)
        if check != xxhash.xxh3_64_intdigest(packed[: RECORD_HEAD_BYTES - _CHECK.size]):
            return None
        return cls(packed[:HEADER_BYTES], opening, RecordState(state))

    @property
    def payload_bytes(self) -> int:
        """Return the length of the payload that follows."""
        (payload_bytes,) = _PAYLOAD_BYTES.unpack_from(self.header, _PAYLOAD_BYTES_AT)
        return int(payload_bytes)
