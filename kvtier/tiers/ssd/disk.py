"""All calls to the operating system that touch the block store's files.

Aligned data moves directly between the caller's memory and the device; other data goes through a
staging buffer. Each step first calls the ``hook`` with its name: tests stop the process or raise an
OSError there.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import StartError
from kvtier.tiers.ssd.record import padded
from kvtier.tiers.ssd.store_limits import NO_WRITES

__all__ = [
    "STAGING_BYTES",
    "DirectIO",
    "Disk",
    "PageReader",
    "PageWriter",
    "ShortRead",
    "StepHook",
    "WriteCounters",
    "new_staging",
    "no_hook",
]

StepHook = Callable[[str], None]
"""Called with the name of each step before it is taken."""

STAGING_BYTES = 4 << 20
"""Size of a staging buffer. Larger ones gain nothing once an operation is several MiB
(bench/ssd.py).
"""

_PIECES_MAX = 1000
"""Maximum number of buffers per operation; Linux accepts 1024."""

_FALLOC_FL_ZERO_RANGE = 0x10
"""From linux/falloc.h; Python has no name for it."""

_ZEROS_BYTES_MAX = 1 << 20
"""Zeros written at a time if the file system cannot zero ranges."""

_CHECK_NAME = "probe"
_ZEROS = bytes(PAGE_BYTES)


class DirectIO(StrEnum):
    """Whether the page cache is bypassed."""

    AUTO = "auto"
    """Uses direct I/O if the file system supports it."""
    ON = "on"
    """Requires direct I/O; the tier does not start without it."""
    OFF = "off"
    """Buffered I/O; written pages are synced and dropped from the cache after each write."""


class ShortRead(OSError):
    """The file ended before the requested bytes."""


@dataclass(slots=True)
class WriteCounters:
    """Bytes written since startup; updated by the writer."""

    blocks_bytes: int = 0
    """Payloads of stored blocks, with padding."""
    moved_bytes: int = 0
    """Payloads moved to another segment, with padding."""
    metadata_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the sum."""
        return self.blocks_bytes + self.moved_bytes + self.metadata_bytes


def new_staging() -> memoryview:
    """Return a staging buffer. Its memory is allocated on first use."""
    return memoryview(mmap.mmap(-1, STAGING_BYTES))


def no_hook(_step: str) -> None:
    """Do nothing."""


class Disk:
    """Reads and writes the files of one directory."""

    def __init__(self, directory: Path, mode: DirectIO, hook: StepHook = no_hook) -> None:
        self.directory = directory
        self.hook = hook
        self.written = WriteCounters()
        self.is_direct = mode is not DirectIO.OFF and self._supports_direct()
        if mode is DirectIO.ON and not self.is_direct:
            raise StartError(
                "ssd.direct_io",
                f"the file system of {directory} does not support direct I/O",
                'set "auto" or use another directory',
            )

    def check_io(self) -> None:
        """Write a page and read it back, as blocks are. Raises OSError."""
        self._write_and_read_page(os.O_DIRECT if self.is_direct else 0)

    def _supports_direct(self) -> bool:
        """Return whether direct I/O works, by writing and reading a page in the directory.

        On a volume that accepts no writes it opens a file instead. Raises OSError.
        """
        try:
            self._write_and_read_page(os.O_DIRECT)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, *NO_WRITES}:
                raise
            return error.errno in NO_WRITES and self._opens_direct()
        return True

    def _opens_direct(self) -> bool:
        try:
            with _opened(self.directory / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT):
                return True
        except OSError:
            return False

    def _write_and_read_page(self, flags: int) -> None:
        path = self.directory / _CHECK_NAME
        written, found = mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES)
        written[:] = os.urandom(PAGE_BYTES)
        self.hook("probe")
        try:
            with _opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags) as fd:
                num_bytes = os.pwritev(fd, [written], 0)
                num_bytes = min(num_bytes, os.preadv(fd, [found], 0))
        finally:
            path.unlink(missing_ok=True)
        if num_bytes < PAGE_BYTES or found[:] != written[:]:
            raise OSError(errno.EIO, "a page read back differs from what was written")

    @contextlib.contextmanager
    def opened(self, path: Path, *, writing: bool = False) -> Iterator[int]:
        """Open a file for whole pages, with direct I/O where possible."""
        flags = os.O_NOFOLLOW | (os.O_RDWR if writing else os.O_RDONLY)
        with _opened(path, flags | (os.O_DIRECT if self.is_direct else 0)) as fd:
            yield fd

    @contextlib.contextmanager
    def opened_buffered(self, path: Path) -> Iterator[int]:
        """Open a file to read small parts of it."""
        with _opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            yield fd

    def create(self, path: Path, size_bytes: int, first_page: bytes) -> None:
        """Create a file of its full size, or none. It survives a power loss."""
        self.hook("segment.create")
        try:
            with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
                os.posix_fallocate(fd, 0, size_bytes)
                self.hook("segment.header")
                os.pwrite(fd, first_page.ljust(PAGE_BYTES, b"\0"), 0)
                os.fsync(fd)
        except FileExistsError:  # not our file
            raise
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self.written.metadata_bytes += PAGE_BYTES
        self.sync_directory()

    def overwrite(self, path: Path, offset: int, content: bytes, step: str) -> None:
        """Write whole metadata pages of a file and make them durable."""
        self.hook(step)
        with self.opened(path, writing=True) as fd, mmap.mmap(-1, padded(len(content))) as pages:
            pages[: len(content)] = content
            os.pwrite(fd, pages, offset)
            os.fdatasync(fd)
            self.written.metadata_bytes += len(pages)

    def rewrite(self, path: Path, pages: list[int], change: Callable[[bytes], bytes]) -> None:
        """Change single pages in place and make that durable. Raises ShortRead past the end."""
        with self.opened(path, writing=True) as fd, mmap.mmap(-1, PAGE_BYTES) as page:
            for number in pages:
                if os.preadv(fd, [page], number * PAGE_BYTES) < PAGE_BYTES:
                    raise ShortRead(f"{path.name} ends before page {number}")
                page[:] = change(page[:]).ljust(PAGE_BYTES, b"\0")
                os.pwritev(fd, [page], number * PAGE_BYTES)
            os.fdatasync(fd)
        self.written.metadata_bytes += PAGE_BYTES * len(pages)

    def zero(self, path: Path, ranges: Iterable[tuple[int, int]]) -> None:
        """Zero the page ranges [start, end) without freeing their space; durable."""
        self.hook("segment.zero")
        with self.opened(path, writing=True) as fd:
            for start, end in ranges:
                if not _zero_range(fd, start, end - start):
                    self._write_zeros(fd, start, end)
            os.fdatasync(fd)

    def _write_zeros(self, fd: int, start: int, end: int) -> None:
        with mmap.mmap(-1, min(_ZEROS_BYTES_MAX, end - start)) as zeros:
            while start < end:
                written = os.pwrite(fd, memoryview(zeros)[: end - start], start)
                self.written.metadata_bytes += written
                start += written

    def sync(self, path: Path) -> None:
        """Make the contents of a file durable."""
        self.hook("segment.sync")
        with _opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            os.fdatasync(fd)
            if not self.is_direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def drop_cache(self, fd: int) -> None:
        """Drop a file from the page cache after buffered reads."""
        if not self.is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        """Remove a file, which may be missing."""
        self.hook("segment.unlink")
        path.unlink(missing_ok=True)

    def sync_directory(self) -> None:
        """Make the creation and removal of files durable."""
        with _opened(self.directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    def measure(self) -> os.statvfs_result:
        """Return the file system statistics of the volume."""
        return os.statvfs(self.directory)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _zero_range(fd: int, start: int, size_bytes: int) -> bool:
    """Let the file system zero a range without writing it; False if it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64
    if libc.fallocate(fd, _FALLOC_FL_ZERO_RANGE, size(start), size(size_bytes)) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
        return False
    raise OSError(code, os.strerror(code))


def _is_aligned(view: memoryview) -> bool:
    return bool(np.frombuffer(view, np.uint8).ctypes.data % PAGE_BYTES == 0)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, pieces: list[memoryview], start: int
) -> None:
    """Transfer all buffers, with more system calls after a partial transfer."""
    while pieces:
        count = call(fd, pieces, start)
        if count == 0:
            raise ShortRead(f"the file ends at {start}")
        start += count
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if count:
            pieces[0] = pieces[0][count:]


class _Pages:
    """Buffers that are contiguous in a file, transferred in as few operations as possible."""

    def __init__(self, disk: Disk, fd: int, start: int, staging: memoryview) -> None:
        self._disk = disk
        self._fd = fd
        self._start = start
        self._staging = staging
        self._staged = 0
        self._pieces: list[memoryview] = []
        self._length = 0

    def _add(self, piece: memoryview) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        if len(self._pieces) >= _PIECES_MAX:
            self.flush()

    def _take(self, size_bytes: int) -> memoryview:
        """Return part of the staging buffer; flush it first if it is full."""
        if self._staged + size_bytes > len(self._staging):
            self.flush()
        part = self._staging[self._staged : self._staged + size_bytes]
        self._staged += size_bytes
        return part

    def _parts(self, view: memoryview) -> Iterator[tuple[memoryview, bool]]:
        """Split a view into parts that transfer directly and parts to be staged."""
        size = len(view)
        straight = size // PAGE_BYTES * PAGE_BYTES
        if self._disk.is_direct and straight and not _is_aligned(view):
            straight = 0
        if straight:
            yield view[:straight], True
        step = len(self._staging)
        for at in range(straight, size, step):
            yield view[at : at + step], False

    def flush(self) -> None:
        raise NotImplementedError


class PageWriter(_Pages):
    """Writes buffers one after another, each padded to whole pages."""

    def add(self, view: memoryview) -> None:
        """Append the bytes of ``view``, which must not change until ``flush``."""
        for part, is_straight in self._parts(view):
            if is_straight:
                self._add(part)
                continue
            pages = self._take(padded(len(part)))
            pages[: len(part)] = part
            pages[len(part) :] = _ZEROS[: len(pages) - len(part)]
            self._add(pages)

    def flush(self) -> None:
        """Write what was added."""
        if self._pieces:
            self._disk.hook("record.write")
            _transfer(os.pwritev, self._fd, self._pieces, self._start)
        self._start += self._length
        self._pieces, self._length, self._staged = [], 0, 0


class PageReader(_Pages):
    """Reads buffers one after another, each of which fills whole pages in the file."""

    def __init__(self, disk: Disk, fd: int, start: int, staging: memoryview) -> None:
        super().__init__(disk, fd, start, staging)
        self._copies: list[tuple[memoryview, memoryview]] = []

    def add(self, into: memoryview) -> None:
        """Read the next whole pages into ``into``, by ``flush`` at the latest."""
        for part, is_straight in self._parts(into):
            if is_straight:
                self._add(part)
                continue
            pages = self._take(padded(len(part)))
            self._copies.append((part, pages[: len(part)]))
            self._add(pages)

    def flush(self) -> None:
        """Read what was added."""
        if self._pieces:
            self._disk.hook("record.read")
            _transfer(os.preadv, self._fd, self._pieces, self._start)
            for into, staged in self._copies:
                into[:] = staged
        self._start += self._length
        self._pieces, self._length, self._staged = [], 0, 0
        self._copies = []
