"""The host arena: the memory of the CPU tier, which engines map into their own processes.

It is a memfd, not a named file in /dev/shm: it has no name that could collide or be left behind,
does not count against the size of /dev/shm, and is freed with the last process that maps it. It is
sealed against shrinking, so no client can make the daemon fault by truncating it.
"""

import fcntl
import mmap
import os

from kvtier.core.limits import PAGE_BYTES
from kvtier.errors import StartError, reason_of

__all__ = ["HostArena"]

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): create page table entries now instead of by faults."""


class HostArena:
    """``num_slabs * slab_bytes`` bytes for blocks, followed by one page for handshakes.

    Raises StartError if the process may not create it.
    """

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.num_slabs = num_slabs
        self.capacity_bytes = num_slabs * slab_bytes
        self.size_bytes = self.capacity_bytes + PAGE_BYTES
        self.fd = os.memfd_create("kvtier-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._mapping = mmap.mmap(self.fd, self.size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise StartError(
                "cpu.capacity",
                f"cannot create an arena of {self.size_bytes} bytes: {reason_of(error)}",
                "raise the limit on file size (ulimit -f, LimitFSIZE=) or memory (-v, "
                "LimitAS=), or lower it",
            ) from error
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # keep users' data out of core dumps
        self._view = memoryview(self._mapping)

    def reserve(self, slab: int) -> None:
        """Allocate memory for a slab, so that a shortage is an error here and not a SIGBUS later.

        Blocks for about 20 ms per 64 MiB. Raises StartError.
        """
        start = slab * self.slab_bytes
        try:
            os.posix_fallocate(self.fd, start, self.slab_bytes)
        except OSError as error:
            raise StartError(
                "cpu.capacity",
                f"out of memory for slab {slab} of {self.num_slabs}: {error.strerror}",
                "lower cpu.capacity or free memory",
            ) from error
        try:
            self._mapping.madvise(_POPULATE_WRITE, start, self.slab_bytes)
        except OSError:
            return  # older kernels map pages on first use

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of the arena, to be released before ``close``."""
        return self._view[offset : offset + num_bytes]

    @property
    def proof(self) -> memoryview:
        """Return the page in which handshakes leave their patterns."""
        return self._view[self.capacity_bytes :]

    def close(self) -> None:
        """Unmap the arena. Clients keep their own mappings until they exit."""
        os.close(self.fd)
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            return  # a hung transfer holds a view; memory is freed with the process
