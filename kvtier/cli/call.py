"""Calls to a running daemon, over its Unix socket or over TCP."""

import argparse
import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from kvtier.api.rpc.operator_client import RemoteDaemon, local_operator, remote_operator
from kvtier.cli.files import read_bytes
from kvtier.cli.options import add_config_options, config_from
from kvtier.config.model import SYSTEM_SOCKET, find_socket
from kvtier.errors import ConfigError, DaemonUnavailable, StartError, reason_of
from kvtier.secret import read_tokens
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["Target", "add_target_options", "call_daemon", "fetch_status", "target_from"]

T = TypeVar("T")

Target = Path | RemoteDaemon
"""A daemon on this node, by its socket, or a remote one."""

_HOST_AND_PORT = re.compile(r"(\[[^\]/]+\]|[^/:]+):\d{1,5}")
_START_REMEDY = "start it with `kvtier serve`, or pass --connect"
_STATUS_TIMEOUT_S = 1.0
"""With startup, within the two seconds that a script may wait for an answer."""

_DETAILS_MAX = 300
_CA_BYTES_MAX = 1 << 20


def add_target_options(parser: argparse.ArgumentParser, *shortcuts: tuple[str, str, str]) -> None:
    """Add the options that select a daemon, and ``shortcuts`` to other keys."""
    add_config_options(parser, *shortcuts)
    parser.add_argument(
        "--connect",
        "--socket",
        dest="connect",
        metavar="SOCKET|HOST:PORT",
        help="Unix socket of the daemon (default: daemon.socket, or "
        f"{SYSTEM_SOCKET} if this user runs no daemon), or its TCP address (rpc.listen)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="with HOST:PORT: file with the token"
    )
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="with HOST:PORT: trusted CA certificates (default: the system's)",
    )


def target_from(options: argparse.Namespace, machine: Path = SYSTEM_SOCKET) -> Target:
    """Return the daemon that the options select; by default the user's, else the machine's.

    Raises StartError.
    """
    given: str | None = options.connect
    if given is not None and _HOST_AND_PORT.fullmatch(given):
        return _remote(given, options)
    for option, value in (("--token-file", options.token_file), ("--ca", options.ca)):
        if value is not None:
            raise StartError(
                option, "only valid for TCP", "pass --connect HOST:PORT, or omit the option"
            )
    if given == "":  # mostly an unset shell variable
        raise ConfigError("daemon.socket", "is empty", "give a value, or omit the option")
    if given is not None:
        setattr(options, "key:daemon.socket", given)
    return find_socket(config_from(options).daemon.socket, machine)


def _remote(address: str, options: argparse.Namespace) -> RemoteDaemon:
    if options.token_file is None:
        raise StartError("--connect", "TCP connections need a token", "pass --token-file")
    token, *_ = read_tokens(options.token_file, "--token-file")
    if options.ca is None:
        return RemoteDaemon(address, token)
    content = read_bytes("--ca", options.ca, _CA_BYTES_MAX)
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise StartError("--ca", f"{options.ca} has no certificate", "name a PEM file")
    return RemoteDaemon(address, token, content)


def fetch_status(target: Target, timeout_s: float = _STATUS_TIMEOUT_S) -> dict[str, Any]:
    """Return the daemon's status document. Raises StartError like ``call_daemon``."""
    reply = call_daemon(target, lambda stub: stub.Stat(pb.StatRequest(), timeout=timeout_s))
    document: dict[str, Any] = json.loads(reply.json)
    return document


def call_daemon(target: Target, call: Callable[[operator_pb2_grpc.OperatorStub], T]) -> T:
    """Return the result of ``call``. Raises StartError if the daemon does not answer in time."""
    try:
        with (
            remote_operator(target)
            if isinstance(target, RemoteDaemon)
            else local_operator(target) as stub
        ):
            return call(stub)
    except DaemonUnavailable as error:
        problem, cause = str(error), error.__cause__
        if isinstance(cause, TimeoutError):
            problem = f"the daemon at {target} did not answer in time"
        elif isinstance(cause, OSError) and not isinstance(cause, PermissionError):
            problem = f"cannot reach the daemon at {target}: {reason_of(cause)}"
        raise StartError("daemon.socket", problem, _START_REMEDY) from error
    except grpc.RpcError as error:
        raise _call_error(target, cast("grpc.Call", error)) from error


def _connect(
    target: Target,
) -> contextlib.AbstractContextManager[operator_pb2_grpc.OperatorStub]:
    return remote_operator(target) if isinstance(target, RemoteDaemon) else local_operator(target)


def _call_error(target: Target, call: grpc.Call) -> StartError:
    """Return the error for a failed call, with the details from gRPC."""
    details = " ".join(str(call.details()).split())[:_DETAILS_MAX]
    is_remote = isinstance(target, RemoteDaemon)
    where = target.address if isinstance(target, RemoteDaemon) else str(target)
    field = "--connect" if is_remote else "daemon.socket"
    match call.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            problem = f"the daemon at {where} did not answer in time"
            return StartError(field, problem, "see its log; restart it if this persists")
        case grpc.StatusCode.UNAVAILABLE if is_remote and "CERTIFICATE_VERIFY_FAILED" in details:
            return StartError(
                "--ca",
                f"the certificate of {where} is not trusted or has another name: {details}",
                "pass the CA certificate that issued it, and a name that it contains",
            )
        case grpc.StatusCode.UNAVAILABLE:
            problem = f"cannot reach the daemon at {where}" + (f": {details}" if is_remote else "")
            return StartError(field, problem, _START_REMEDY)
        case grpc.StatusCode.PERMISSION_DENIED if is_remote:
            problem = f"the daemon at {where} rejected the token"
            return StartError("--token-file", problem, "use the token in its rpc.token_file")
        case grpc.StatusCode.UNIMPLEMENTED:
            return StartError(
                field,
                f"the daemon at {where} is too old for this command",
                "upgrade and restart the daemon, or use the kvtier of its version",
            )
    return StartError(field, f"the daemon at {where} refused the call", details)
