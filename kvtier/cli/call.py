"""One call to a running daemon, for commands that ask and print."""

import argparse
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import grpc

from kvtier.api.rpc.operator_client import RemoteDaemon, local_operator, remote_operator
from kvtier.cli.options import add_config_options, config_from
from kvtier.config.model import SYSTEM_SOCKET, find_socket
from kvtier.errors import ConfigError, DaemonUnavailable, StartError, reason_of
from kvtier.secret import read_tokens
from kvtier.v1 import operator_pb2_grpc

__all__ = ["Target", "add_target_options", "call_daemon", "target_from"]

T = TypeVar("T")

Target = Path | RemoteDaemon
"""A daemon on this node by its socket, or one elsewhere."""

_HOST_AND_PORT = re.compile(r"(\[[^\]/]+\]|[^/:]+):\d{1,5}")
_NOBODY_THERE = "name another (--config, --connect), look at its log, or start it: `kvtier serve`"
_DETAILS_MAX = 300
_CA_BYTES_MAX = 1 << 20


def add_target_options(parser: argparse.ArgumentParser, *shortcuts: tuple[str, str, str]) -> None:
    """Add the options that say which daemon is meant, and ``shortcuts`` to other keys."""
    add_config_options(parser, *shortcuts)
    parser.add_argument(
        "--connect",
        "--socket",
        dest="connect",
        metavar="SOCKET|HOST:PORT",
        help="Unix socket of the daemon (daemon.socket; where no daemon of this user is at the "
        f"default, {SYSTEM_SOCKET}), or where it listens (rpc.listen)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="with HOST:PORT: the token to show"
    )
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="with HOST:PORT: certificates to trust, instead of the system's",
    )


def target_from(options: argparse.Namespace, machine: Path = SYSTEM_SOCKET) -> Target:
    """Return the daemon that the options name: with none, the user's, or else the machine's.

    Raises StartError.
    """
    given: str | None = options.connect
    if given is not None and _HOST_AND_PORT.fullmatch(given):
        return _remote(given, options)
    for option, value in (("--token-file", options.token_file), ("--ca", options.ca)):
        if value is not None:
            raise StartError(option, "is for TCP", "give --connect HOST:PORT, or leave it out")
    if given == "":  # mostly a shell variable that is not set
        raise ConfigError("daemon.socket", "is empty", "give a value, or leave the option out")
    if given is not None:
        setattr(options, "key:daemon.socket", given)
    return find_socket(config_from(options).daemon.socket, machine)


def _remote(address: str, options: argparse.Namespace) -> RemoteDaemon:
    if options.token_file is None:
        raise StartError(
            "--token-file", "is not set", "a daemon asks for a token over TCP: give its file"
        )
    token, *_ = read_tokens(options.token_file, "--token-file")
    if options.ca is None:
        return RemoteDaemon(address, token)
    try:
        with options.ca.open("rb") as file:
            content = file.read(_CA_BYTES_MAX)
    except OSError as error:
        raise StartError(
            "--ca", f"{options.ca} cannot be read: {reason_of(error)}", "give a readable PEM file"
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise StartError("--ca", f"{options.ca} has no certificate", "give a PEM file of them")
    return RemoteDaemon(address, token, content)


def call_daemon(target: Target, call: Callable[[operator_pb2_grpc.OperatorStub], T]) -> T:
    """Make one call. Raises StartError, for exit code 2, where no daemon answers in time."""
    try:
        with _reach(target) as stub:
            return call(stub)
    except DaemonUnavailable as error:
        raise StartError("daemon.socket", str(error), _NOBODY_THERE) from error
    except grpc.RpcError as error:
        raise _refusal(target, cast("grpc.Call", error)) from error


def _reach(
    target: Target,
) -> contextlib.AbstractContextManager[operator_pb2_grpc.OperatorStub]:
    return remote_operator(target) if isinstance(target, RemoteDaemon) else local_operator(target)


def _refusal(target: Target, call: grpc.Call) -> StartError:
    """Say what became of a call, with what gRPC knows of it."""
    details = " ".join(str(call.details()).split())[:_DETAILS_MAX]
    is_remote = isinstance(target, RemoteDaemon)
    where = target.address if isinstance(target, RemoteDaemon) else str(target)
    field = "--connect" if is_remote else "daemon.socket"
    match call.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            problem = f"the daemon at {where} gave no answer"
            return StartError(field, problem, "look at its log, and restart it if it stays so")
        case grpc.StatusCode.UNAVAILABLE if is_remote and "CERTIFICATE_VERIFY_FAILED" in details:
            return StartError(
                "--ca",
                f"the certificate of {where} is not trusted, or not for that name: {details}",
                "give the certificate it descends from, and a name that stands in it",
            )
        case grpc.StatusCode.UNAVAILABLE:
            problem = f"no daemon answers at {where}" + (f": {details}" if is_remote else "")
        case grpc.StatusCode.PERMISSION_DENIED if is_remote:
            why = f"is not the token of the daemon at {where}"
            return StartError("--token-file", why, "give that of its rpc.token_file")
        case grpc.StatusCode.UNIMPLEMENTED:
            return StartError(
                field,
                f"the daemon at {where} is older than this kvtier, and lacks the call",
                "upgrade and restart the daemon, or use the kvtier of its version",
            )
        case _:
            return StartError(field, f"the daemon at {where} refuses: {details}", "do as it says")
    return StartError(field, problem, _NOBODY_THERE)
