"""The daemon's gRPC servers: one on the Unix socket for everyone, one on TCP for operators."""

from collections.abc import Collection
from pathlib import Path

import grpc

from kvtier.api.rpc.credentials import Credentials
from kvtier.api.rpc.guard import Guard
from kvtier.api.rpc.operator import operator_door
from kvtier.config import Address
from kvtier.errors import StartError
from kvtier.transfer.door import Door, socket_mode
from kvtier.v1 import engine_pb2_grpc, operator_pb2_grpc

__all__ = ["OPERATORS_MAX", "open_tcp", "open_unix"]

OPERATORS_MAX = 64
"""Tools that operate at once over the Unix socket; scripts and probes, a few each."""

_TCP_CALLS_MAX = 16
"""Calls at once over TCP, so that strangers who only knock cannot take the daemon's time."""


async def open_unix(
    path: Path,
    door: Door,
    allowed_uids: Collection[int],
    engine: engine_pb2_grpc.EngineServicer,
    operator: operator_pb2_grpc.OperatorServicer,
) -> grpc.aio.Server:
    """Serve both services at ``path``; operators show a ticket of ``door``."""
    guard = Guard(
        lambda ticket: door.visitor(ticket) is not None,
        f"an operator's call shows a ticket from {operator_door(path)}; use this version's kvtier",
    )
    server = grpc.aio.server(interceptors=[guard])
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    path.chmod(socket_mode(allowed_uids))
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
        interceptors=[guard],
        # Without this two daemons could listen on one port, and callers would reach either.
        options=[("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=_TCP_CALLS_MAX,
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    try:
        port = server.add_secure_port(str(listen), credentials.for_server())
    except RuntimeError as error:
        raise StartError("rpc.listen", f"cannot listen on {listen}", "use a free port") from error
    await server.start()
    return server, port
