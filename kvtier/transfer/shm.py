"""Shared memory: the daemon passes its arena to clients over a Unix socket.

Theory
------
A client that the arena's ticket server admits gets the arena's file descriptor with its ticket. It
may map the arena while it holds the connection. Once its process or that connection has ended, the
daemon knows that nobody writes to the arena under that ticket any more.

The mapping is verified. The daemon writes a random pattern to the arena's last page, and the client
must answer with a digest of it; the client writes a digest in turn, which the daemon must find.
Processes that do not share the memory fail here.
"""

import contextlib
import hashlib
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from kvtier.core.limits import PAGE_BYTES, SESSIONS_MAX
from kvtier.tiers.host import HostArena
from kvtier.transfer.ticket_server import Peer, TicketServer, Welcome, request_ticket

__all__ = ["ArenaPin", "ArenaServer", "Attachment", "arena_socket", "attach"]

_PATTERN_BYTES = 32
_SPOT_BYTES = PAGE_BYTES // SESSIONS_MAX
_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_POPULATE_PAUSE_S = 0.1
assert _SPOT_BYTES >= 2 * _PATTERN_BYTES


def arena_socket(socket_path: Path) -> Path:
    """Return the path at which the daemon that serves at ``socket_path`` passes its arena."""
    return socket_path.with_name(socket_path.name + ".arena")


def _answer(pattern: bytes) -> bytes:
    return hashlib.sha256(b"client" + pattern).digest()


class ArenaServer:
    """Passes ``arena`` to admitted clients; calls ``on_end(ticket)`` when one is gone."""

    def __init__(
        self,
        arena: HostArena,
        boot: str,
        on_end: Callable[[str], None],
        allowed_uids: Collection[int] = (),
    ) -> None:
        self._arena = arena
        self._boot = boot
        self._on_end = on_end
        self._patterns: dict[str, bytes] = {}
        self._ticket_server = TicketServer(
            allowed_uids, SESSIONS_MAX, welcome=self._welcome, on_end=self._end
        )

    @property
    def ticket_server(self) -> TicketServer:
        """Return the server that admits clients."""
        return self._ticket_server

    async def start(self, path: Path) -> None:
        """Listen at ``path``; replaces a socket of an earlier daemon. Raises StartError."""
        await self._ticket_server.start(path)

    def proves(self, ticket: str, proof: bytes) -> bool:
        """Return whether the client with a ticket sees the same memory as this process."""
        peer = self._ticket_server.peer(ticket)
        if peer is None:
            return False
        start = peer.place * _SPOT_BYTES + _PATTERN_BYTES
        left = bytes(self._arena.proof[start : start + _PATTERN_BYTES])
        wanted = _answer(self._patterns[ticket])
        return secrets.compare_digest(proof, wanted) and secrets.compare_digest(left, wanted)

    def pid_of(self, ticket: str) -> int:
        """Return the pid of the process that holds a ticket; 0 if it is gone."""
        peer = self._ticket_server.peer(ticket)
        return peer.pid if peer else 0

    def keep(self, ticket: str) -> None:
        """Let a registered client stay until it ends."""
        self._ticket_server.keep(ticket)

    async def stop(self) -> None:
        """Admit no more clients, and disconnect all."""
        await self._ticket_server.stop()

    def _welcome(self, peer: Peer) -> Welcome:
        pattern = self._patterns[peer.ticket] = secrets.token_bytes(_PATTERN_BYTES)
        start = peer.place * _SPOT_BYTES
        self._arena.proof[start : start + _PATTERN_BYTES] = pattern
        fields: dict[str, str | int] = {
            "boot": self._boot,
            "size_bytes": self._arena.size_bytes,
            "proof_offset": self._arena.capacity_bytes + start,
        }
        return Welcome(fields, (self._arena.fd,))

    def _end(self, peer: Peer) -> None:
        del self._patterns[peer.ticket]
        self._on_end(peer.ticket)


class ArenaPin(Protocol):
    """Registers an arena with a device that copies from and to it."""

    def pin(self, arena: memoryview, is_over: Callable[[], bool]) -> None:
        """Register it piece by piece until ``is_over``. Called on a thread of its own."""

    def unpin(self, arena: memoryview) -> None:
        """Unregister it: the arena is about to be unmapped."""


class Attachment:
    """A client's side: the mapped arena, the ticket, and the connection that keeps it valid."""

    def __init__(
        self,
        connection: socket.socket,
        fd: int,
        message: dict[str, str | int],
        pin: ArenaPin | None = None,
    ) -> None:
        self.ticket = str(message["ticket"])
        self.boot = str(message["boot"])
        self._connection = connection
        self._pin = pin
        self._fd = fd
        self._mapping = mmap.mmap(fd, int(message["size_bytes"]))
        self._mapping.madvise(mmap.MADV_DONTDUMP)  # see HostArena
        self._view = memoryview(self._mapping)
        offset = int(message["proof_offset"])
        self.proof = _answer(bytes(self._view[offset : offset + _PATTERN_BYTES]))
        self._view[offset + _PATTERN_BYTES : offset + 2 * _PATTERN_BYTES] = self.proof

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of the arena."""
        return self._view[offset : offset + num_bytes]

    def fileno(self) -> int:
        """Return the connection's descriptor; it becomes readable when the daemon is gone."""
        return self._connection.fileno()

    def populate(self, is_over: Callable[[], bool]) -> None:
        """Create page table entries for the whole arena, so that no copy waits for page faults.

        Takes about 20 ms per gigabyte and stops when ``is_over``; call it on a separate thread. It
        follows the daemon, which commits the arena's memory while it serves: memory that the client
        touched first would be charged to its own container, which may not have enough. Older
        kernels lack the system call. Afterwards the arena is pinned, if there is a ``pin``.
        """
        self._populate(is_over)
        if self._pin is not None:
            self._pin.pin(self._view, is_over)

    def _populate(self, is_over: Callable[[], bool]) -> None:
        size = len(self._view) // PAGE_BYTES * PAGE_BYTES
        with contextlib.suppress(OSError, ValueError):
            self._mapping.madvise(
                _POPULATE_WRITE, size - PAGE_BYTES, PAGE_BYTES
            )  # is the call supported?
            for start in range(0, size, _POPULATE_BYTES):
                length = min(_POPULATE_BYTES, size - start)
                while os.lseek(self._fd, start, os.SEEK_HOLE) < start + length:
                    if is_over():
                        return
                    time.sleep(_POPULATE_PAUSE_S)
                if is_over():
                    return
                self._mapping.madvise(_POPULATE_WRITE, start, length)

    def close(self) -> None:
        """Unmap the arena and close the connection; the daemon ends the session. Idempotent."""
        pin, self._pin = self._pin, None
        try:
            if pin is not None:
                pin.unpin(self._view)
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(BufferError):  # a view exists; the mapping ends with it
                self._view.release()
                self._mapping.close()
            self._connection.close()

    def abandon(self) -> None:
        """In a forked child, close the inherited parts; the parent's session continues."""
        self._pin = None  # a device is not usable after a fork
        self.close()


def attach(socket_path: Path, timeout_s: float, pin: ArenaPin | None = None) -> Attachment:
    """Map the arena of the daemon that serves at ``socket_path``. Raises DaemonUnavailable."""
    connection, message, (fd,) = request_ticket(arena_socket(socket_path), timeout_s, num_fds=1)
    try:
        return Attachment(connection, fd, message, pin)
    except BaseException:
        os.close(fd)
        connection.close()
        raise
