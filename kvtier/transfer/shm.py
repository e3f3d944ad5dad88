"""Shared memory: the daemon passes its arena to clients over a Unix socket.

Theory
------
A client connects to the arena socket and is sent, as one message, the arena's file descriptor and
a ticket. The connection then stays open without another byte: it is the client's lifeline. When
the client's process ends, however it ends, the kernel closes the connection, and the daemon knows
at once that nobody maps the arena under that ticket any more.

The mapping is proved rather than assumed. The daemon leaves a random pattern in the arena's last
page and the client must answer with a digest of what it reads there; the client leaves a digest in
turn, which the daemon must find. Two processes that do not see the same memory never get further.
"""

import asyncio
import contextlib
import hashlib
import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.core.limits import PAGE_BYTES, SESSIONS_MAX
from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log, Repeated
from kvtier.tiers.host import HostArena

__all__ = ["ArenaServer", "Attachment", "arena_socket", "attach"]

_PATTERN_BYTES = 32
_SPOT_BYTES = PAGE_BYTES // SESSIONS_MAX
_MESSAGE_BYTES_MAX = 1024
_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_ACCEPT_PAUSE_S = 0.2
assert _SPOT_BYTES >= 2 * _PATTERN_BYTES


def arena_socket(socket_path: Path) -> Path:
    """Return where a daemon passes its arena, given where it serves its calls."""
    return socket_path.with_name(socket_path.name + ".arena")


def _answer(pattern: bytes) -> bytes:
    return hashlib.sha256(b"client" + pattern).digest()


@dataclass(frozen=True, slots=True)
class _Visitor:
    spot: int
    pid: int
    connection: socket.socket
    pattern: bytes


class ArenaServer:
    """Passes ``arena`` to whoever connects; ``on_end(ticket)`` is called when one is gone."""

    def __init__(self, arena: HostArena, boot: str, on_end: Callable[[str], None]) -> None:
        self._arena = arena
        self._boot = boot
        self._on_end = on_end
        self._visitors: dict[str, _Visitor] = {}
        self._spots = list(range(SESSIONS_MAX))
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._warnings = Repeated(Log("kvtier.transfer"))

    async def start(self, path: Path) -> None:
        """Listen at ``path``, which only this user may then connect to."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(SESSIONS_MAX)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    def proves(self, ticket: str, proof: bytes) -> bool:
        """Tell whether the client of a ticket sees the same memory as this process."""
        visitor = self._visitors.get(ticket)
        if visitor is None:
            return False
        start = visitor.spot * _SPOT_BYTES + _PATTERN_BYTES
        left = bytes(self._arena.proof[start : start + _PATTERN_BYTES])
        wanted = _answer(visitor.pattern)
        return secrets.compare_digest(proof, wanted) and secrets.compare_digest(left, wanted)

    def pid_of(self, ticket: str) -> int:
        """Return the process that holds a ticket, as the kernel tells it; 0 if it is gone."""
        visitor = self._visitors.get(ticket)
        return visitor.pid if visitor else 0

    async def stop(self) -> None:
        """Accept nobody any more and let all clients go."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        if self._listener is not None:
            self._listener.close()
        for ticket in list(self._visitors):
            self._end(ticket)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is left; the client waits in the queue
                self._warnings.warning("no client can be let in", error=error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._spots:
                self._welcome(connection)
            else:
                connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        ticket, pattern = secrets.token_hex(16), secrets.token_bytes(_PATTERN_BYTES)
        spot = self._spots.pop()
        self._visitors[ticket] = _Visitor(
            spot, struct.unpack("3i", credentials)[0], connection, pattern
        )
        start = spot * _SPOT_BYTES
        self._arena.proof[start : start + _PATTERN_BYTES] = pattern
        message = {
            "ticket": ticket,
            "boot": self._boot,
            "size_bytes": self._arena.size_bytes,
            "proof_offset": self._arena.capacity_bytes + start,
        }
        try:
            socket.send_fds(connection, [json.dumps(message).encode()], [self._arena.fd])
        except OSError:
            self._end(ticket)
            return
        asyncio.get_running_loop().add_reader(connection, self._listen, ticket)

    def _listen(self, ticket: str) -> None:
        """Notice the end of a client. A client that says something breaks the protocol."""
        try:
            with contextlib.suppress(ConnectionError):
                self._visitors[ticket].connection.recv(1)
        except BlockingIOError:
            return
        self._end(ticket)

    def _end(self, ticket: str) -> None:
        visitor = self._visitors.pop(ticket)
        asyncio.get_running_loop().remove_reader(visitor.connection)
        visitor.connection.close()
        self._spots.append(visitor.spot)
        self._on_end(ticket)


class Attachment:
    """A client's end: the mapped arena, the ticket, and the lifeline."""

    def __init__(self, connection: socket.socket, fd: int, message: dict[str, str | int]) -> None:
        self.ticket = str(message["ticket"])
        self.boot = str(message["boot"])
        self._connection = connection
        try:
            self._mapping = mmap.mmap(fd, int(message["size_bytes"]))
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        offset = int(message["proof_offset"])
        self.proof = _answer(bytes(self._view[offset : offset + _PATTERN_BYTES]))
        self._view[offset + _PATTERN_BYTES : offset + 2 * _PATTERN_BYTES] = self.proof

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of the arena."""
        return self._view[offset : offset + num_bytes]

    def fileno(self) -> int:
        """Return the lifeline, readable once the daemon is gone."""
        return self._connection.fileno()

    def populate(self, is_over: Callable[[], bool]) -> None:
        """Make page table entries for the whole arena now, so that no copy waits for faults.

        Takes about 20 ms per gigabyte, and stops where ``is_over`` says so; meant for a thread of
        its own. Older kernels lack it.
        """
        size = len(self._view) // PAGE_BYTES * PAGE_BYTES
        with contextlib.suppress(OSError, ValueError):
            for start in range(0, size, _POPULATE_BYTES):
                if is_over():
                    return
                length = min(_POPULATE_BYTES, size - start)
                self._mapping.madvise(_POPULATE_WRITE, start, length)

    def close(self) -> None:
        """Let go of arena and lifeline: the daemon ends the session. Idempotent."""
        self._connection.close()
        self._view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()  # else a copy still holds a view, and the mapping goes with it


def attach(socket_path: Path, timeout_s: float) -> Attachment:
    """Get the arena of the daemon that serves at ``socket_path``. Raises DaemonUnavailable."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(arena_socket(socket_path)))
        message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, 1)
    except OSError as error:
        connection.close()
        raise DaemonUnavailable(f"no daemon at {socket_path}: {error}") from error
    if not fds:
        connection.close()
        raise DaemonUnavailable(f"the daemon at {socket_path} has no room for another client")
    return Attachment(connection, fds[0], json.loads(message))
