"""The daemon's gRPC servers: one on the Unix socket for everyone, one on TCP for operators."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

import grpc

from kvtier.api.rpc.credentials import Credentials
from kvtier.api.rpc.interceptors import MalformedRequestInterceptor, OperatorAuthInterceptor
from kvtier.api.rpc.operator_client import operator_ticket_socket
from kvtier.config import ListenAddress
from kvtier.errors import StartError
from kvtier.transfer.socket_file import SocketFile
from kvtier.transfer.ticket_server import TicketServer, socket_mode
from kvtier.v1 import engine_pb2_grpc, operator_pb2_grpc

__all__ = ["OPERATORS_MAX", "UnixServer", "open_tcp", "open_unix"]

OPERATORS_MAX = 64
"""Concurrent operator connections to the Unix socket; enough for scripts and health probes."""

_TCP_CALLS_MAX = 16
"""Concurrent calls over TCP, so that callers without a token cannot take up the daemon's time."""


_TICKET_IDLE_S = 60.0
"""How long an operator's ticket is valid after its last call began; tools get one for each call."""

_SERVERS_MAX = 4
"""Servers on the Unix socket: the current one, and earlier ones whose socket file was removed."""

_OPTIONS = (
    # For TLS and the first message of HTTP/2; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # For a connection without a call; an attached engine always has one.
    ("grpc.max_connection_idle_ms", 60_000),
    # Half of the usual limit of 1024 descriptors; tiers and engines need the others.
    ("grpc.max_allowed_incoming_connections", 512),
)
"""Limits on idle connections, which could otherwise use up all file descriptors."""

_TCP_OPTIONS = (
    *_OPTIONS[:2],
    ("grpc.max_allowed_incoming_connections", 128),
    # Otherwise two daemons could listen on the same port, and callers would reach either one.
    ("grpc.so_reuseport", 0),
    # Otherwise a call from a peer that lost its network would count as running for hours.
    ("grpc.keepalive_time_ms", 60_000),
)


class UnixServer:
    """A gRPC server at ``path`` with the services that ``add_services`` adds.

    A running gRPC server does not accept connections on another socket. So if the socket file is
    removed, ``reopen`` starts a second server at the path, and the first one goes on serving the
    clients that are connected to it.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        guard: OperatorAuthInterceptor,
        add_services: Callable[[grpc.aio.Server], None],
    ) -> None:
        self._file = SocketFile(path, mode)
        self._interceptors = (guard, MalformedRequestInterceptor())
        self._add_services = add_services
        self._servers: list[grpc.aio.Server] = []

    @property
    def is_in_place(self) -> bool:
        """Return whether the socket file is still this server's."""
        return self._file.is_in_place()

    async def reopen(self) -> None:
        """Listen at the path with a new file. Raises StartError or OSError."""
        async with contextlib.AsyncExitStack() as undo:
            server = grpc.aio.server(interceptors=self._interceptors, options=_OPTIONS)
            undo.push_async_callback(server.stop, None)
            self._add_services(server)
            with self._file.placing() as fresh:
                self._bind(server, fresh)
                await server.start()
            undo.pop_all()
        self._servers.append(server)
        if len(self._servers) > _SERVERS_MAX:  # clients of the oldest reconnect to the newest
            await self._servers.pop(0).stop(None)

    def _bind(self, server: grpc.aio.Server, fresh: Path) -> None:
        try:
            server.add_insecure_port(f"unix:{fresh}")
        except RuntimeError as error:
            why, remedy = f"cannot listen on {self._file.path}", "check its directory"
            raise StartError("daemon.socket", why, remedy) from error

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and abort those still running after ``grace_s``."""
        self._file.remove()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


async def open_unix(
    path: Path,
    ticket_server: TicketServer,
    allowed_uids: Collection[int],
    engine: engine_pb2_grpc.EngineServicer,
    operator: operator_pb2_grpc.OperatorServicer,
) -> UnixServer:
    """Serve both services at ``path``; operators need a ticket. Raises StartError."""

    def add_services(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
        operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)

    guard = OperatorAuthInterceptor(
        lambda ticket: ticket_server.keep(ticket, _TICKET_IDLE_S),
        f"this call needs a ticket from {operator_ticket_socket(path)}; use the kvtier of the "
        "daemon's version",
    )
    server = UnixServer(path, socket_mode(allowed_uids), guard, add_services)
    await server.reopen()
    return server


async def open_tcp(
    listen: ListenAddress, credentials: Credentials, operator: operator_pb2_grpc.OperatorServicer
) -> tuple[grpc.aio.Server, int]:
    """Serve operators that have the token, over TLS; returns the server and its port."""
    guard = OperatorAuthInterceptor(
        credentials.admits,
        "TCP calls need a token from rpc.token_file; pass --token-file",
    )
    server = grpc.aio.server(
        interceptors=[guard, MalformedRequestInterceptor()],
        options=_TCP_OPTIONS,
        maximum_concurrent_rpcs=_TCP_CALLS_MAX,
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    try:
        port = server.add_secure_port(str(listen), credentials.for_server())
    except RuntimeError as error:
        raise StartError("rpc.listen", f"cannot listen on {listen}", "use a free port") from error
    await server.start()
    return server, port
