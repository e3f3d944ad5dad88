"""A Unix socket that identifies each peer by its uid and gives it a ticket.

Theory
------
gRPC does not tell a server which user calls, but the kernel does for each connection. So a client
first connects here. If its user is allowed, the client gets an unguessable ticket, which it sends
with each call on other sockets. The connection stays open without further data; the ticket becomes
invalid when the client closes it or the client's process ends. The process is watched by a pidfd,
because a forked child may hold the connection open. On kernels without pidfds, only the end of the
connection counts.

A client must use its ticket within a few seconds. Otherwise it is disconnected, and even earlier if
a new client needs its place.

A client in another user namespace is seen under its user id outside. If it has none there, it is
seen as user 65534, like all such clients.
"""

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.transfer.socket_file import SocketFile

__all__ = [
    "Peer",
    "TicketServer",
    "Welcome",
    "peer_of",
    "pidfd_of",
    "request_ticket",
    "socket_mode",
]

_MESSAGE_BYTES_MAX = 1024
_ACCEPT_PAUSE_S = 0.2
_SO_PEERPIDFD = 77
"""Since Linux 6.5; the module ``socket`` does not define it."""

_PATIENCE_S = 10.0
"""Time for a client to use its ticket: attaching takes milliseconds, and gives up after 2 s."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One admitted client."""

    ticket: str
    place: int
    """A number below the server's ``num_places`` that no other admitted peer has."""
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a peer receives with its ticket: fields and open files."""

    fields: Mapping[str, str | int]
    fds: Sequence[int] = ()


def _empty_welcome(_peer: Peer) -> Welcome:
    return Welcome({})


def _nothing(_peer: Peer) -> None:
    pass


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the peer at the time it connected."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("iII", packed)
    return pid, uid


def pidfd_of(connection: socket.socket, pid: int, option: int = _SO_PEERPIDFD) -> int | None:
    """Return a pidfd of the process that connected; it becomes readable when the process ends.

    Returns None if there is no way to get one. The caller closes it. Raises ProcessLookupError if
    the process has already ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, option)
    except OSError as error:
        if error.errno in {errno.ESRCH, errno.EINVAL}:
            raise ProcessLookupError from error
    if not pid:  # the process is in a PID namespace that is not visible from here
        return None
    try:
        # If the client is dead, another process may have this pid by now. Then only the end of the
        # connection counts.
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def socket_mode(allowed_uids: Collection[int]) -> int:
    """Return the mode of a socket file: open to all if the server checks users."""
    return 0o666 if allowed_uids else 0o600


@dataclass(slots=True)
class _Entry:
    """A peer and the resources that are released when it leaves."""

    peer: Peer
    connection: socket.socket
    pidfd: int | None
    timer: asyncio.TimerHandle | None = None
    """Disconnects the peer at its deadline; None if it may stay until it ends."""
    is_used: bool = False
    """Whether the peer has used its ticket."""


class TicketServer:
    """Admits root, this process's own user and ``allowed_uids``, ``num_places`` peers at a time.

    ``welcome`` returns what a peer is sent; ``on_end`` is called when a peer is gone. A peer is
    disconnected unless ``keep`` is called for it within ``patience_s``.
    """

    def __init__(
        self,
        allowed_uids: Collection[int],
        num_places: int,
        *,
        welcome: Callable[[Peer], Welcome] = _empty_welcome,
        on_end: Callable[[Peer], None] = _nothing,
        identify: Callable[[socket.socket], tuple[int, int]] = peer_of,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._mode = socket_mode(allowed_uids)
        self._uids = {0, os.geteuid(), *allowed_uids}
        self._welcome = welcome
        self._on_end = on_end
        self._identify = identify
        self._patience_s = patience_s
        self._entries: dict[str, _Entry] = {}
        self._places = list(range(num_places))
        self._num_places = num_places
        self._file: SocketFile | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._warnings = RateLimitedLog(Log("kvtier.transfer"))

    async def start(self, path: Path) -> None:
        """Listen at ``path``; a socket that an earlier daemon left there is replaced.

        Raises StartError if another process listens there, and OSError.
        """
        self._file = SocketFile(path, self._mode)
        await self.reopen()

    @property
    def is_in_place(self) -> bool:
        """Return whether the socket file is still this server's."""
        return self._file is not None and self._file.is_in_place()

    async def reopen(self) -> None:
        """Listen at the same path with a new file; peers stay. Raises the same as ``start``."""
        assert self._file is not None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            with self._file.placing() as fresh:
                listener.bind(str(fresh))
                listener.listen(socket.SOMAXCONN)  # beyond it, connecting fails without a reason
        except BaseException:
            listener.close()
            raise
        await self._close_listener()
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    def peer(self, ticket: str) -> Peer | None:
        """Return the peer with a ticket, or None if it is gone."""
        found = self._entries.get(ticket)
        return found.peer if found else None

    def keep(self, ticket: str, seconds: float | None = None) -> bool:
        """Let a peer stay for ``seconds`` more, or until it ends if that is None.

        Returns False if the peer is gone.
        """
        found = self._entries.get(ticket)
        if found is None:
            return False
        found.is_used = True
        self._set_timer(found, seconds)
        return True

    async def stop(self) -> None:
        """Admit no more peers, and disconnect all."""
        if self._file is not None:
            self._file.remove()
        await self._close_listener()
        for ticket in list(self._entries):
            self._end(ticket)

    async def _close_listener(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor left; the client stays queued
                self._warnings.warning("cannot accept clients", error=error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                self._admit(connection)
            except Exception:  # concerns this client only: continue with the next ones
                self._warnings.exception("cannot admit a client")
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        pid, uid = self._identify(connection)
        if uid not in self._uids:
            self._warnings.warning("user refused", uid=uid, pid=pid)
            remedy = "add it to daemon.allowed_uids, or run as the daemon's own user"
            _refuse(connection, f"user {uid} may not attach or operate; {remedy}")
        elif not self._has_place():
            self._warnings.warning("no room for another client", places=self._num_places, pid=pid)
            _refuse(connection, "there is no room for another client")
        else:
            self._admit_peer(connection, pid, uid)

    def _has_place(self) -> bool:
        """Return whether there is a place, after evicting the oldest unused peer if necessary."""
        if not self._places:
            unused = (ticket for ticket, each in self._entries.items() if not each.is_used)
            if (ticket := next(unused, None)) is not None:
                self._evict(ticket, "a new client needed its place")
        return bool(self._places)

    def _admit_peer(self, connection: socket.socket, pid: int, uid: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            pidfd = pidfd_of(connection, pid)
        except ProcessLookupError:
            connection.close()
            return
        peer = Peer(secrets.token_hex(16), self._places.pop(), pid, uid)
        ticket = peer.ticket
        entry = self._entries[ticket] = _Entry(peer, connection, pidfd)
        try:
            welcome = self._welcome(peer)
            message = json.dumps({"ticket": ticket, **welcome.fields}).encode()
            socket.send_fds(connection, [message], list(welcome.fds))
            loop.add_reader(connection, self._listen, ticket)
            if pidfd is not None:
                loop.add_reader(pidfd, self._end, ticket)
            self._set_timer(entry, self._patience_s)
        except BaseException as error:
            self._end(ticket)
            if not isinstance(error, ConnectionError):  # else the client is already gone
                raise

    def _set_timer(self, entry: _Entry, seconds: float | None) -> None:
        """Disconnect a peer after ``seconds`` from now; None removes the deadline."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if seconds is not None:
            loop, ticket = asyncio.get_running_loop(), entry.peer.ticket
            entry.timer = loop.call_later(seconds, self._expire, ticket)

    def _expire(self, ticket: str) -> None:
        if self._entries[ticket].is_used:
            self._end(ticket)
        else:
            self._evict(ticket, f"it did not register within {self._patience_s:g} s")

    def _evict(self, ticket: str, why: str) -> None:
        peer = self._entries[ticket].peer
        self._warnings.warning("idle client disconnected", why=why, pid=peer.pid)
        self._end(ticket)

    def _listen(self, ticket: str) -> None:
        """End a peer that has closed its connection, or violated the protocol by sending data."""
        try:
            with contextlib.suppress(ConnectionError):
                self._entries[ticket].connection.recv(1)
        except BlockingIOError:
            return
        self._end(ticket)

    def _end(self, ticket: str) -> None:
        entry = self._entries.pop(ticket)
        loop = asyncio.get_running_loop()
        self._set_timer(entry, None)
        loop.remove_reader(entry.connection)
        entry.connection.close()
        if entry.pidfd is not None:
            loop.remove_reader(entry.pidfd)
            os.close(entry.pidfd)
        self._places.append(entry.peer.place)
        self._on_end(entry.peer)


def _refuse(connection: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps({"refused": reason}).encode())
    connection.close()


def request_ticket(
    path: Path, timeout_s: float, num_fds: int = 0
) -> tuple[socket.socket, dict[str, str | int], list[int]]:
    """Connect to the ticket server at ``path``; returns the connection, the message and its files.

    The server's path is the daemon's socket path with a suffix. The ticket, ``message["ticket"]``,
    is valid until the connection is closed. Raises DaemonUnavailable, with the daemon's reason if
    it gave one.
    """
    daemon = path.with_suffix("")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        try:
            connection.connect(str(path))
            content, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, num_fds)
            for fd in fds:
                undo.callback(os.close, fd)
                os.set_inheritable(fd, False)
            message = _fields(content)
        except PermissionError as error:
            who = f"user {os.geteuid()} may not connect to {daemon}"
            raise DaemonUnavailable(f"{who}: daemon.allowed_uids does not name it") from error
        except TimeoutError as error:
            raise DaemonUnavailable(f"the daemon at {daemon} gave no answer") from error
        except (OSError, ValueError, RecursionError) as error:
            raise DaemonUnavailable(f"no daemon answers at {daemon}: {error}") from error
        if "refused" in message:
            raise DaemonUnavailable(f"the daemon at {daemon} refuses: {message['refused']}")
        if len(fds) != num_fds or "ticket" not in message:
            raise DaemonUnavailable(f"what answers at {daemon} is no daemon of this version")
        undo.pop_all()
    return connection, message, fds


def _fields(content: bytes) -> dict[str, str | int]:
    """Return a message's fields; none if it is not an object."""
    message = json.loads(content)
    return message if isinstance(message, dict) else {}
