"""Connections to Redis servers.

The redis library makes the connection (name resolution, TCP, TLS); kvtier then uses its socket.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvtier.certificate import Certificates, read_authorities
from kvtier.errors import TierError, TierTimeout, reason_of
from kvtier.secret import Secret
from kvtier.tiers.check import seconds_left
from kvtier.tiers.redis.address import RedisAddress, ServerAddress
from kvtier.tiers.redis.resp import Piece, ProtocolError, Reply, ReplyReader, RespCommand, encode

__all__ = ["Connected", "Connector", "OnReply", "ServerConnection"]


# Untyped in the library.
_Plain: Any = Connection
_Tls: Any = SSLConnection
_Unix: Any = UnixDomainSocketConnection

_KEEPALIVE: Mapping[int, int] = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 2,
}
"""In seconds. Idle connections are checked this often, so that load balancers do not drop them
silently and dead ones are noticed before they are used.
"""


class Connected(Protocol):
    """The part of the library's connection that is used here."""

    _sock: socket.socket

    def connect(self) -> None:
        """Connect."""

    def disconnect(self) -> None:
        """Close the connection. Idempotent."""


class Connector:
    """Makes connections. Called on threads that may hang in name resolution or connect.

    ``address`` may be replaced by one that differs in its login, which new connections then use. So
    may the contents of the file of ``authorities``.
    """

    def __init__(self, address: RedisAddress, timeout_s: float, tls_ca: Path | None) -> None:
        self.address = address
        self.authorities: Secret[Certificates] | None = None
        """Certificate authorities for servers; None: those of the system."""
        self._timeout_s = timeout_s
        if address.has_tls and tls_ca is not None:
            read = partial(read_authorities, tls_ca, "remote.tls_ca")
            self.authorities = Secret("remote_ca", lambda: (tls_ca,), read)

    def connect(self, place: ServerAddress) -> Connected:
        """Return a new connection, before any login.

        Raises the library's errors and OSError.
        """
        made: Connected
        if not place.port:
            made = _Unix(path=place.host, **self._common)
        else:
            kind = _Tls if self.address.has_tls else _Plain
            made = kind(
                host=place.host,
                port=place.port,
                socket_keepalive=True,
                socket_keepalive_options=_KEEPALIVE,
                **self._common,
                **self._tls,
            )
        made.connect()
        return made

    def login(self) -> list[RespCommand]:
        """Return the commands to send first.

        The library could send them, but its reader accepts replies of any size.
        """
        address = self.address
        login = [word for word in (address.username, address.password) if word]
        words = [word.encode(errors="surrogateescape") for word in login]
        commands = [RespCommand((b"AUTH", *words))] if words else []
        if address.database:
            commands.append(RespCommand((b"SELECT", b"%d" % address.database)))
        return commands

    def client_options(self, *, has_login: bool) -> dict[str, Any]:
        """Return options for the library's clients of Sentinels and clusters."""
        address = self.address
        login = {"username": address.username, "password": address.password}
        return (
            self._common
            | self._tls
            | (login if has_login else {})
            | {"ssl": address.has_tls, "encoding_errors": "surrogateescape"}
        )

    @property
    def _tls(self) -> dict[str, str]:
        authorities = self.authorities
        return {"ssl_ca_data": authorities.value.pem.decode("ascii")} if authorities else {}

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),  # a retry would double the cost of a dead server
            "protocol": 2,
            "driver_info": None,  # saves two round trips and ACL permissions
        }


_IN_FLIGHT_BYTES = 2 << 20
"""Bytes requested and not yet received on a connection: enough to keep 10 Gbit/s busy at 1.5 ms of
latency. The server holds them in memory and serves no other client while it copies them.
"""

_IN_FLIGHT_COMMANDS = 512
"""A server serves no other client while it processes what has arrived."""

_PIECES_MAX = 512
"""Maximum number of buffers per system call; Linux accepts 1,024."""

_TLS_WRITE_BYTES = 64 << 10
"""Bytes per call: each call must end within the timeout, and TLS does not report partial writes."""


OnReply = Callable[[Reply], None]
"""Called with each reply as it arrives."""


class ServerConnection:
    """A connection. One call at a time; after a fault it can only be closed."""

    def __init__(self, connection: Connected, timeout_s: float) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._send: Callable[[list[Piece]], None] = (
            self._send_tls if isinstance(self._socket, ssl.SSLSocket) else self._send_plain
        )
        self._timeout_s = timeout_s
        self._deadline_ns = 0
        self.patience_s = 0.0
        """Timeout of the last wait in seconds."""
        self._reader = ReplyReader(self._receive)

    @property
    def is_alive(self) -> bool:
        """Return whether it is open and silent, as an idle connection must be."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False  # closed by the server, or an unexpected reply

    def ask(
        self, commands: Sequence[RespCommand], deadline_ns: int, on_reply: OnReply | None = None
    ) -> list[Reply]:
        """Send commands and return their replies, with a bounded number of bytes in flight.

        ``on_reply`` gets each reply as it arrives, while the next ones are in flight. The server
        may be silent for the timeout, or until the deadline if that is sooner. Raises TierTimeout
        and TierError.
        """
        self._deadline_ns = deadline_ns
        window = _Window(commands)
        replies: list[Reply] = []
        try:
            while len(replies) < len(commands):
                if due := window.open():
                    self._send(encode(due))
                reply = self._reader.read(window.close_one().into)
                replies.append(reply)
                if on_reply:
                    on_reply(reply)
        except ProtocolError:
            raise TierError("it does not answer like a Redis server") from None
        except TimeoutError:
            raise TierTimeout("no answer in time") from None
        except OSError as error:
            raise TierError(reason_of(error)) from None
        return replies

    def interrupt(self) -> None:
        """Make a call that runs on another thread fail now."""
        with contextlib.suppress(OSError):  # the server closed it first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.disconnect()

    def _receive(self, view: memoryview) -> int:
        self._set_timeout()
        num_bytes = self._socket.recv_into(view)
        if not num_bytes:
            raise ConnectionResetError("the server closed the connection")
        return num_bytes

    def _set_timeout(self) -> None:
        self.patience_s = 0.0
        self.patience_s = min(self._timeout_s, seconds_left(self._deadline_ns))
        self._socket.settimeout(self.patience_s)

    def _send_plain(self, pieces: list[Piece]) -> None:
        views = [memoryview(piece) for piece in pieces]
        first = 0
        while first < len(views):
            self._set_timeout()
            sent = self._socket.sendmsg(views[first : first + _PIECES_MAX])
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _send_tls(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                self._set_timeout()
                view = view[self._socket.send(view[:_TLS_WRITE_BYTES]) :]


class _Window:
    """The commands in flight. It is refilled when half of it has been answered."""

    def __init__(self, commands: Sequence[RespCommand]) -> None:
        self._commands = commands
        self._sizes = [command.size_bytes for command in commands]
        self._num_sent = self._num_answered = self._bytes = 0

    def open(self) -> Sequence[RespCommand]:
        """Return the commands to send now."""
        start = self._num_sent
        if self._holds(_IN_FLIGHT_COMMANDS // 2, _IN_FLIGHT_BYTES // 2):
            return ()
        while self._num_sent < len(self._commands):
            self._bytes += self._sizes[self._num_sent]
            self._num_sent += 1
            if self._holds(_IN_FLIGHT_COMMANDS, _IN_FLIGHT_BYTES):
                break
        return self._commands[start : self._num_sent]

    def close_one(self) -> RespCommand:
        """Return the command whose reply comes next."""
        index = self._num_answered
        self._bytes -= self._sizes[index]
        self._num_answered += 1
        return self._commands[index]

    def _holds(self, num_commands: int, num_bytes: int) -> bool:
        return self._num_sent - self._num_answered >= num_commands or self._bytes >= num_bytes
