"""The daemon's gRPC servers: one on the Unix socket for everyone, one on TCP for operators."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

import grpc

from kvtier.api.rpc.credentials import Credentials
from kvtier.api.rpc.guard import Guard, MessageCheck
from kvtier.api.rpc.operator import operator_door
from kvtier.config import Address
from kvtier.errors import StartError
from kvtier.transfer.door import Door, socket_mode
from kvtier.transfer.socket_file import SocketFile
from kvtier.v1 import engine_pb2_grpc, operator_pb2_grpc

__all__ = ["OPERATORS_MAX", "UnixServer", "open_tcp", "open_unix"]

OPERATORS_MAX = 64
"""Tools that operate at once over the Unix socket; scripts and probes, a few each."""

_TCP_CALLS_MAX = 16
"""Calls at once over TCP, so that strangers who only knock cannot take the daemon's time."""


_TICKET_IDLE_S = 60.0
"""An operator's ticket is good for so long after its last call began; tools take one for each."""

_SERVERS_MAX = 4
"""Servers on the Unix socket: one, and those whose socket file was removed."""

_OPTIONS = (
    # For TLS and the first message of HTTP/2; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # For a connection without a call; an attached engine always has one.
    ("grpc.max_connection_idle_ms", 60_000),
    # Of the 1024 descriptors that are the usual limit, tiers and engines need the others.
    ("grpc.max_allowed_incoming_connections", 512),
)
"""Bounds on idle connections, which in large numbers would use up every descriptor."""

_TCP_OPTIONS = (
    *_OPTIONS[:2],
    ("grpc.max_allowed_incoming_connections", 128),
    # Without this two daemons could listen on one port, and callers would reach either.
    ("grpc.so_reuseport", 0),
    # Without it the call of a peer whose network is gone would hold one of the 16 places for hours.
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
        guard: Guard,
        add_services: Callable[[grpc.aio.Server], None],
    ) -> None:
        self._file = SocketFile(path, mode)
        self._interceptors = (guard, MessageCheck())
        self._add_services = add_services
        self._servers: list[grpc.aio.Server] = []

    @property
    def is_in_place(self) -> bool:
        """Return whether the socket's file is still ours."""
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
        if len(self._servers) > _SERVERS_MAX:  # its clients reconnect, to the newest one
            await self._servers.pop(0).stop(None)

    def _bind(self, server: grpc.aio.Server, fresh: Path) -> None:
        try:
            server.add_insecure_port(f"unix:{fresh}")
        except RuntimeError as error:
            why, remedy = f"cannot listen on {self._file.path}", "look at its directory"
            raise StartError("daemon.socket", why, remedy) from error

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those under way after ``grace_s``."""
        self._file.remove()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


async def open_unix(
    path: Path,
    door: Door,
    allowed_uids: Collection[int],
    engine: engine_pb2_grpc.EngineServicer,
    operator: operator_pb2_grpc.OperatorServicer,
) -> UnixServer:
    """Serve both services at ``path``; operators show a ticket of ``door``. Raises StartError."""

    def add_services(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
        operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)

    guard = Guard(
        lambda ticket: door.keep(ticket, _TICKET_IDLE_S),
        f"an operator's call shows a ticket from {operator_door(path)}; use this version's kvtier",
    )
    server = UnixServer(path, socket_mode(allowed_uids), guard, add_services)
    await server.reopen()
    return server


async def open_tcp(
    listen: Address, credentials: Credentials, operator: operator_pb2_grpc.OperatorServicer
) -> tuple[grpc.aio.Server, int]:
    """Serve operators who show the token, over TLS; returns the server and its port."""
    guard = Guard(
        credentials.admits,
        "a call over TCP shows the token of rpc.token_file; use kvtier with --token-file",
    )
    server = grpc.aio.server(
        interceptors=[guard, MessageCheck()],
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
