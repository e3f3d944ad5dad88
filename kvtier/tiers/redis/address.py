"""Parses the URL of the Redis tier.

    redis://[user:password@]host[:port][/database]                  one server; rediss:// with TLS
    unix://[user:password@]/path/of/socket[?db=database]            one server on this machine
    redis+sentinel://[user:password@]host[:port],…/service[/database]
    redis+cluster://[user:password@]host[:port],…

Rules
-----
* User and password may contain any character, raw or percent-encoded, even ``@`` and ``/``:
  everything before the last ``@`` is credentials.
* Messages and reprs contain only host, port, path and service of the URL.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from kvtier.errors import StartError

__all__ = ["Form", "RedisAddress", "ServerAddress"]

_PORT = 6379
_SENTINEL_PORT = 26379


class Form(StrEnum):
    """How the servers are organized."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    """One primary, named by Sentinels."""
    CLUSTER = "cluster"
    """Several primaries, each with some of the slots."""


_FORMS: Mapping[str, tuple[Form, bool]] = {
    "redis": (Form.SINGLE, False),
    "rediss": (Form.SINGLE, True),
    "unix": (Form.SINGLE, False),
    "redis+sentinel": (Form.SENTINEL, False),
    "rediss+sentinel": (Form.SENTINEL, True),
    "redis+cluster": (Form.CLUSTER, False),
    "rediss+cluster": (Form.CLUSTER, True),
}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of one server: a host and a port, or the path of a socket without a port."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. ``places`` are the server, the Sentinels, or some nodes of the cluster."""

    form: Form
    places: tuple[ServerAddress, ...]
    has_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    service: str = ""

    def __str__(self) -> str:
        places = ",".join(map(str, self.places))
        return f"{places}/{self.service}" if self.service else places

    def differs_only_in_login(self, other: "RedisAddress") -> bool:
        """Return whether another address differs at most in user and password."""
        return replace(self, username=other.username, password=other.password) == other

    @classmethod
    def parse(cls, url: str) -> "RedisAddress":
        """Parse a URL. Raises StartError("remote.url", …), which never repeats it."""
        scheme, colon, rest = url.partition("://")
        if not colon or scheme not in _FORMS:
            _refuse("not a URL of a Redis server", f"begin it with one of {', '.join(_FORMS)} ://")
        form, has_tls = _FORMS[scheme]
        credentials, _, location = rest.rpartition("@")
        username, password = _login(credentials)
        service = ""
        places: tuple[ServerAddress, ...]
        if scheme == "unix":
            path, _, query = location.partition("?")
            if not path.startswith("/"):
                _refuse("no path of a socket", "write unix:///path/of/socket")
            places, database = (ServerAddress(path),), query.removeprefix("db=")
        else:
            hosts, _, database = location.partition("/")
            if form is Form.SENTINEL:
                service, _, database = database.partition("/")
                service = unquote(service)
            places = _places(hosts, _SENTINEL_PORT if form is Form.SENTINEL else _PORT)
        if form is Form.SINGLE and len(places) > 1:
            _refuse("more than one server", "name one, or begin with redis+cluster://")
        if form is Form.SENTINEL and not service:
            _refuse("no service for the Sentinels", "end it with /service, as they call it")
        number = _database(database)
        if form is Form.CLUSTER and number:
            _refuse("a cluster has database 0 only", "leave the path away")
        return cls(form, places, has_tls, username, password, number, service)


def _refuse(problem: str, remedy: str) -> NoReturn:
    raise StartError("remote.url", problem, remedy)


def _login(credentials: str) -> tuple[str | None, str | None]:
    username, colon, password = credentials.partition(":")
    if username and not (colon and password):
        _refuse("a user without a password", "write user:password@, or :password@")
    # Any bytes are allowed, as in the environment and on the server.
    return (
        unquote(username, errors="surrogateescape") or None,
        unquote(password, errors="surrogateescape") or None,
    )


def _places(hosts: str, port: int) -> tuple[ServerAddress, ...]:
    places: list[ServerAddress] = []
    for host in hosts.split(","):
        try:
            parts = urlsplit(f"//{host}")
            name, number = parts.hostname, parts.port or port
        except ValueError:
            name, number = None, 0
        if not name or parts.query or parts.fragment:
            _refuse("no host and port where they belong", "write host:port, or [IPv6 address]:port")
        places.append(ServerAddress(name, number))
    return tuple(places)


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdecimal()):
        _refuse("its path is no database number", "end it with /0, or with nothing after the port")
    return int(text or "0")
