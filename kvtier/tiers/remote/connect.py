"""Connector: makes connections to servers of one address, by the library."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvtier.errors import StartError
from kvtier.tiers.remote.address import Address, Place

__all__ = ["Connector", "LoggedIn"]

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


class LoggedIn(Protocol):
    """What is used of the library's connection."""

    _sock: socket.socket

    def connect(self) -> None:
        """Connect and log in."""

    def disconnect(self) -> None:
        """End it. Idempotent."""


class Connector:
    """Makes connections. Called on threads that may hang in a name or a connect."""

    def __init__(self, address: Address, timeout_s: float, tls_ca: Path | None) -> None:
        if address.has_tls and tls_ca is not None and not tls_ca.is_file():
            raise StartError("remote.tls_ca", f"{tls_ca} is no file", "name a file of certificates")
        self._address = address
        self._timeout_s = timeout_s
        self._tls_ca = tls_ca

    def connect(self, place: Place) -> LoggedIn:
        """Return a connection that is logged in. Raises the library's errors and OSError."""
        connection = self._made(place)
        connection.connect()
        return connection

    def _made(self, place: Place) -> LoggedIn:
        options = self._common()
        if not place.port:
            return cast("LoggedIn", _Unix(path=place.host, **options))
        options |= {
            "host": place.host,
            "port": place.port,
            "socket_keepalive": True,
            "socket_keepalive_options": _KEEPALIVE,
        }
        if self._address.has_tls:
            return cast("LoggedIn", _Tls(**options, **self._tls()))
        return cast("LoggedIn", _Plain(**options))

    def client_options(self, *, has_login: bool) -> dict[str, Any]:
        """Return options of the library's clients, for what it knows of Sentinels and clusters."""
        options = self._common()
        if not has_login:
            options |= {"username": None, "password": None}
        return options | {"ssl": self._address.has_tls, "db": 0} | self._tls()

    def _common(self) -> dict[str, Any]:
        return {
            "db": self._address.database,
            "username": self._address.username,
            "password": self._address.password,
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),  # a second try would double what a dead server costs
            "protocol": 2,
            "driver_info": None,  # saves two round trips, and rights that an ACL must give
        }

    def _tls(self) -> dict[str, Any]:
        return {"ssl_ca_certs": str(self._tls_ca)} if self._tls_ca else {}
