"""Connects operators to a daemon: over its Unix socket with a ticket, or over TCP with a token."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvtier.transfer.ticket_server import request_ticket
from kvtier.v1 import operator_pb2_grpc
from kvtier.wire.channel import quiet_channel

__all__ = ["RemoteDaemon", "local_operator", "operator_ticket_socket", "remote_operator"]

_TICKET_TIMEOUT_S = 1.0
"""Enough: the kernel queues the connection, and the daemon answers in its next loop turn."""


def operator_ticket_socket(socket_path: Path) -> Path:
    """Return the socket on which a daemon issues tickets to operators."""
    return socket_path.with_name(socket_path.name + ".tools")


@contextlib.contextmanager
def local_operator(
    socket_path: Path, timeout_s: float = _TICKET_TIMEOUT_S
) -> Iterator[operator_pb2_grpc.OperatorStub]:
    """Yield a stub for the daemon at ``socket_path``. Raises DaemonUnavailable."""
    lifeline, message, _ = request_ticket(operator_ticket_socket(socket_path), timeout_s)
    with lifeline:
        transport = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
        ticket = grpc.access_token_call_credentials(str(message["ticket"]))
        both = grpc.composite_channel_credentials(transport, ticket)
        with grpc.secure_channel(f"unix:{socket_path}", both) as channel:
            yield operator_pb2_grpc.OperatorStub(quiet_channel(channel))


@dataclass(frozen=True, slots=True)
class RemoteDaemon:
    """Address and credentials of a daemon on another machine; without ``ca``, the system's CAs."""

    address: str
    token: str = field(repr=False)
    ca: bytes | None = None


@contextlib.contextmanager
def remote_operator(remote: RemoteDaemon) -> Iterator[operator_pb2_grpc.OperatorStub]:
    """Yield a stub for a daemon that listens on TCP; the first call connects."""
    transport = grpc.ssl_channel_credentials(remote.ca)
    token = grpc.access_token_call_credentials(remote.token)
    both = grpc.composite_channel_credentials(transport, token)
    with grpc.secure_channel(remote.address, both) as channel:
        yield operator_pb2_grpc.OperatorStub(quiet_channel(channel))
