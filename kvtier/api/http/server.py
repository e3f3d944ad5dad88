"""Serves an ASGI application on a TCP port, in a thread of its own, with limits on connections.

Theory
------
An idle connection costs a file descriptor, and the tiers and engines of the process need
descriptors too. At the limit a new connection is still accepted, because it may be a health probe,
and the oldest connection without a request in progress is closed. The head of a request must be
complete within some seconds, however slowly it is sent.
"""

import asyncio
import contextlib
import math
import socket
import threading
from functools import partial
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.api.http.cross_origin import CrossOriginGuard, CrossOriginRules
from kvtier.api.http.operator_socket import Operators, OperatorSocket
from kvtier.errors import StartError
from kvtier.observe.log import Log, RateLimitedLog

__all__ = [
    "Connection",
    "HttpServer",
    "UnixConnection",
    "serve",
]

_CONNECTIONS_MAX = 512
"""Half of the usual limit of 1024 descriptors, and twice the number of concurrent prompts."""

_HEAD_SECONDS = 30.0
"""Time from the connection, or from a later request's first byte, to the end of the head."""


class Connection(H11Protocol):
    """One connection, of at most ``_CONNECTIONS_MAX``."""

    _made_s = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    """Closes the connection at the deadline; set while the head of a request is incomplete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Accept the connection; beyond the limit, close another one for it."""
        super().connection_made(transport)
        self._made_s = self.loop.time()
        if len(self.connections) > _CONNECTIONS_MAX:
            one = min(filter(_is_idle, self.connections), key=_patience)
            self.connections.discard(one)  # else it could be chosen again before the loop closes it
            one.transport.abort()
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; uvicorn's own timeout ends at the first byte of a request."""
        super().data_received(data)
        self._update_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        super().connection_lost(exc)
        self._cancel_head_timer()

    def _update_head_timer(self) -> None:
        if not _is_idle(self):
            self._cancel_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class UnixConnection(Connection):
    """A connection over the engine's Unix socket, which records whether an operator calls."""

    def __init__(self, operators: Operators, **more: Any) -> None:
        super().__init__(**more)
        self._operators = operators

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Record ``is_operator`` in the state of the connection's requests."""
        super().connection_made(transport)
        is_operator = self._operators.include(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "is_operator": is_operator}


def _is_idle(connection: Any) -> bool:
    return connection.cycle is None or connection.cycle.response_complete


def _patience(connection: Any) -> tuple[bool, float]:
    """Return a sort key: connections that never sent a request first, then the oldest."""
    return connection.cycle is not None, connection._made_s


_log = Log("kvtier.http")

_START_SECONDS = 10.0
"""Starting normally takes milliseconds."""

_CUT_SECONDS = 2
"""Time for calls to end after their connections were closed. Uvicorn then cancels them."""

_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s of common load balancers, which could otherwise reuse a closing one."""

_BACKLOG = 128
"""Pending connections; accepting all of them at once stays within 1024 descriptors."""

_UNREAD_SECONDS = 60
"""Time for a client to acknowledge sent data, which is buffered until then."""


class HttpServer:
    """A listening server; ``stop`` ends it within its deadline.

    With ``operators`` it also serves on a Unix socket, if that can be opened.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        grace_seconds: float,
        operators: Operators | None = None,
    ) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self._grace_seconds = grace_seconds
        self._listener = listener
        self._unix_socket = operators.listen(self.port) if operators else None
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,  # the process has its own logging
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(grace_seconds) + _CUT_SECONDS,
            ),
            self._unix_socket,
        )
        self._thread = threading.Thread(target=self._run, name="kvtier-http", daemon=True)

    @property
    def url(self) -> str:
        """Return the server's URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Start serving; returns once connections are accepted."""
        self._thread.start()
        if not self._server.has_begun.wait(_START_SECONDS):
            raise StartError("listen", "the HTTP server did not start in time", "see the log")

    def stop(self) -> None:
        """Accept no more connections, and close those still open at the deadline. Idempotent.

        Clients whose connections are closed see an aborted response; their requests are aborted.
        """
        self._server.should_exit = True
        self._thread.join(self._grace_seconds)
        if self._thread.is_alive():
            self._server.cut()
            self._thread.join(2 * _CUT_SECONDS)
        if self._thread.is_alive():
            _log.error("the HTTP server did not stop in time, abandoning it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
            if self._unix_socket:
                self._unix_socket.close()


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    field: str = "listen",
    grace_seconds: float = 10.0,
    allowed: CrossOriginRules = CrossOriginRules(),  # noqa: B008 - frozen
    operators: Operators | None = None,
) -> HttpServer:
    """Bind, start and return a server; port 0 takes any free one.

    A ``CrossOriginGuard`` refuses web pages of other origins. Raises ``StartError`` with ``field``,
    the configuration key of the address.
    """
    guarded = CrossOriginGuard(app, allowed)
    listener = _bind(host, port, field)
    server = HttpServer(guarded, listener, grace_seconds=grace_seconds, operators=operators)
    server.start()
    return server


class _Uvicorn(uvicorn.Server):
    """Uvicorn that signals when it has started, and also serves on a Unix socket if given one."""

    def __init__(self, config: uvicorn.Config, unix_socket: OperatorSocket | None) -> None:
        super().__init__(config)
        self._unix_socket = unix_socket
        self.has_begun = threading.Event()
        self._warnings = RateLimitedLog(_log)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._complain)
        await super().startup(sockets)
        if self._unix_socket:
            self.servers.append(await self._serve_unix(self._unix_socket))
        self.has_begun.set()

    async def _serve_unix(self, unix_socket: OperatorSocket) -> asyncio.Server:
        connect = partial(
            UnixConnection,
            unix_socket.operators,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(connect, sock=unix_socket.listener)

    def cut(self) -> None:
        """Abort all connections; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log unhandled exceptions, at a limited rate.

        When no descriptors are left, asyncio reports it once for each connection in the backlog,
        and tries again a second later.
        """
        error = context.get("exception", "none")
        self._warnings.warning(f"event loop: {context['message']}", error=repr(error))


def _bind(host: str, port: int, field: str) -> socket.socket:
    address = f"{host}:{port}"
    if not 0 <= port < 1 << 16:
        raise StartError(
            field, f"{port} is not a valid port", "use 1 to 65535, or 0 for any free port"
        )
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(
            field, f"cannot resolve {address}: {error}", "use HOST:PORT, for example 127.0.0.1:8000"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections of a server that has just stopped linger for minutes, without a conflict.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000
        )  # connections inherit it
        listener.bind(target)
        listener.listen()
    except OSError as error:
        listener.close()
        raise StartError(
            field,
            f"cannot listen on {address}: {error.strerror}",
            "use a free port of this machine, or 0 for any",
        ) from error
    return listener
