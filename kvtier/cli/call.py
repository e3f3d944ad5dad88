"""One call to a running daemon, for commands that ask and print."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from kvtier.cli.options import add_config_options, config_of
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2_grpc

__all__ = ["add_socket_options", "ask", "socket_of"]

T = TypeVar("T")


def add_socket_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which daemon is meant."""
    add_config_options(parser, ("--socket", "daemon.socket", "Unix socket of the daemon"))


def socket_of(options: argparse.Namespace) -> Path:
    """Return the socket that the options name."""
    return config_of(options).daemon.socket


def ask(socket_path: Path, call: Callable[[operator_pb2_grpc.OperatorStub], T]) -> T:
    """Make one call. Raises StartError, for exit code 2, where no daemon answers in time."""
    if not socket_path.is_socket():
        raise StartError(
            "daemon.socket", f"no daemon at {socket_path}", "start one with `kvtier serve`"
        )
    channel = grpc.insecure_channel(f"unix:{socket_path}")
    try:
        return call(operator_pb2_grpc.OperatorStub(channel))
    except grpc.RpcError as error:
        details: Any = cast("grpc.Call", error)
        problem = f"the daemon at {socket_path} gave no answer"
        if details.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            problem = f"no daemon answers at {socket_path}"
        raise StartError(
            "daemon.socket", problem, "look at its log, or start one with `kvtier serve`"
        ) from error
    finally:
        channel.close()
