"""A Unix socket that the kernel guards: whoever connects is known by uid and gets a ticket.

Theory
------
gRPC does not tell a server which user calls, but the kernel tells it of each connection. So a
client first connects here. If its user is one that may, it is sent a ticket, which nobody can
guess, and shows it with each call it makes elsewhere. The connection stays open without another
byte: it is the client's lifeline. When the client's process ends, however it ends, the kernel
closes the connection, and the ticket is worth nothing from then on.

A client in another user namespace is seen under its id outside; one that has none there is seen as
user 65534, as is every other such client.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log, Repeated

__all__ = ["Door", "Greeting", "Visitor", "knock", "peer_of", "socket_mode"]

_MESSAGE_BYTES_MAX = 1024
_ACCEPT_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Visitor:
    """One client that was let in."""

    ticket: str
    place: int
    """A number below the door's ``num_places`` that is this visitor's alone."""
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a visitor is sent beside its ticket: fields, and open files."""

    fields: Mapping[str, str | int]
    fds: Sequence[int] = ()


def _no_greeting(_visitor: Visitor) -> Greeting:
    return Greeting({})


def _nothing(_visitor: Visitor) -> None:
    pass


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of who connected, as the kernel saw them then."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("iII", packed)
    return pid, uid


def socket_mode(allowed_uids: Collection[int]) -> int:
    """Return the mode of a socket file: open to all where the door asks who it is."""
    return 0o666 if allowed_uids else 0o600


class Door:
    """Lets in root, this process's own user and ``allowed_uids``, ``num_places`` at a time.

    ``greet`` says what a visitor is sent; ``on_end`` is told when one is gone.
    """

    def __init__(
        self,
        allowed_uids: Collection[int],
        num_places: int,
        *,
        greet: Callable[[Visitor], Greeting] = _no_greeting,
        on_end: Callable[[Visitor], None] = _nothing,
        peer: Callable[[socket.socket], tuple[int, int]] = peer_of,
    ) -> None:
        self._mode = socket_mode(allowed_uids)
        self._uids = {0, os.geteuid(), *allowed_uids}
        self._greet = greet
        self._on_end = on_end
        self._peer = peer
        self._inside: dict[str, tuple[Visitor, socket.socket]] = {}
        self._places = list(range(num_places))
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._warnings = Repeated(Log("kvtier.transfer"))

    async def start(self, path: Path) -> None:
        """Listen at ``path``; a socket that an earlier daemon left there is replaced."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(self._mode)
        listener.listen(len(self._places))
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    def visitor(self, ticket: str) -> Visitor | None:
        """Return who holds a ticket, or None where nobody does any more."""
        found = self._inside.get(ticket)
        return found[0] if found else None

    async def stop(self) -> None:
        """Let nobody in any more and let all visitors go."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        for ticket in list(self._inside):
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
            try:
                self._admit(connection)
            except Exception:  # of one client: those who come next are let in all the same
                self._warnings.exception("a client could not be let in")
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        pid, uid = self._peer(connection)
        if uid not in self._uids:
            self._warnings.warning("a user was turned away", uid=uid, pid=pid)
            remedy = "add it to daemon.allowed_uids, or run as the daemon's own user"
            _turn_away(connection, f"user {uid} may not attach or operate; {remedy}")
        elif not self._places:
            _turn_away(connection, "there is no room for another client")
        else:
            self._let_in(connection, pid, uid)

    def _let_in(self, connection: socket.socket, pid: int, uid: int) -> None:
        visitor = Visitor(secrets.token_hex(16), self._places.pop(), pid, uid)
        self._inside[visitor.ticket] = (visitor, connection)
        try:
            greeting = self._greet(visitor)
            message = json.dumps({"ticket": visitor.ticket, **greeting.fields}).encode()
            socket.send_fds(connection, [message], list(greeting.fds))
            asyncio.get_running_loop().add_reader(connection, self._listen, visitor.ticket)
        except BaseException as error:
            self._end(visitor.ticket)
            if not isinstance(error, ConnectionError):  # else he is gone again
                raise

    def _listen(self, ticket: str) -> None:
        """Notice the end of a visitor. One that says something breaks the protocol."""
        try:
            with contextlib.suppress(ConnectionError):
                self._inside[ticket][1].recv(1)
        except BlockingIOError:
            return
        self._end(ticket)

    def _end(self, ticket: str) -> None:
        visitor, connection = self._inside.pop(ticket)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        self._places.append(visitor.place)
        self._on_end(visitor)


def _turn_away(connection: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps({"refused": reason}).encode())
    connection.close()


def knock(
    path: Path, timeout_s: float, num_fds: int = 0
) -> tuple[socket.socket, dict[str, str | int], list[int]]:
    """Be let in at ``path``: returns the lifeline, the message and the files that came with it.

    A door lies beside its daemon's socket, with one more suffix. The ticket, ``message["ticket"]``,
    is good until the lifeline is closed. Raises DaemonUnavailable, which says why where the daemon
    did.
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
    """Return a message's fields, none where it is something else."""
    message = json.loads(content)
    return message if isinstance(message, dict) else {}
