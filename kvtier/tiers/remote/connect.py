"""Connector: makes connections to servers of one address, by the library."""

import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvtier.certificate import Certificates, read_authorities
from kvtier.secret import Secret
from kvtier.tiers.remote.address import RemoteAddress, ServerAddress
from kvtier.tiers.remote.resp import RespCommand

__all__ = ["Connected", "Connector"]

# The library leaves these untyped.
_Plain: Any = Connection
_Tls: Any = SSLConnection
_Unix: Any = UnixDomainSocketConnection

_KEEPALIVE: Mapping[int, int] = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 2,
}
"""In seconds. An idle connection is tried this often, so that balancers do not drop it silently,
and one that is dead all the same is noticed before it is used."""


class Connected(Protocol):
    """What is used of the library's connection."""

    _sock: socket.socket

    def connect(self) -> None:
        """Connect."""

    def disconnect(self) -> None:
        """End it. Idempotent."""


class Connector:
    """Makes connections. Called on threads that may hang in a name or a connect.

    ``address`` may be exchanged for one that differs in its login, by which the next ones go, and
    so may be what the file of ``authorities`` says.
    """

    def __init__(self, address: RemoteAddress, timeout_s: float, tls_ca: Path | None) -> None:
        self.address = address
        self.authorities: Secret[Certificates] | None = None
        """Those that a server's certificate must descend from; None: the system's."""
        self._timeout_s = timeout_s
        if address.has_tls and tls_ca is not None:
            read = partial(read_authorities, tls_ca, "remote.tls_ca")
            self.authorities = Secret("remote_ca", lambda: (tls_ca,), read)

    def connect(self, place: ServerAddress) -> Connected:
        """Return a connection over which nothing was said yet.

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
        """Return what has to be said first.

        Not left to the library, whose reader takes whatever a server sends, however much that is.
        """
        address = self.address
        login = [word for word in (address.username, address.password) if word]
        words = [word.encode(errors="surrogateescape") for word in login]
        commands = [RespCommand((b"AUTH", *words))] if words else []
        if address.database:
            commands.append(RespCommand((b"SELECT", b"%d" % address.database)))
        return commands

    def client_options(self, *, has_login: bool) -> dict[str, Any]:
        """Return options of the library's clients, for what it knows of Sentinels and clusters."""
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
            "retry": Retry(NoBackoff(), 0),  # a second try would double what a dead server costs
            "protocol": 2,
            "driver_info": None,  # saves two round trips, and rights that an ACL must give
        }
