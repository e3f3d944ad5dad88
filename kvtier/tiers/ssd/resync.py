"""Finding the next record behind a page that should begin one and does not.

Records say how long they are, so one that has lost its header hides all that follow it. But each
begins at a page, with a magic, the number of its segment and a checksum: a look at every page finds
the next one. No page of a payload passes for a header by accident; what is found is a record like
any other, and is verified when it is read.
"""

import errno
import os

from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.check import NO_DEADLINE_NS, seconds_left
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead

__all__ = ["find_record"]

_CHUNK_BYTES = 1 << 20
"""Read at a time: whole segments pass through, at the drive's speed (0.1 s for 256 MiB, of cached
pages, half of it for looking at them)."""


def find_record(
    fd: int,
    segment_number: int,
    opening: int,
    start: int,
    end: int,
    *,
    deadline_ns: int = NO_DEADLINE_NS,
) -> int | None:
    """Return the offset of the first record of a segment in ``[start, end)``, which are pages.

    Records of an earlier ``opening`` are leftovers. Holes and unreadable pages are skipped, so that
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
            if head is not None and head.opening >= opening:
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
