"""The engine's Unix socket: the same HTTP API, with the calling user identified by the kernel.

The engine answers questions about recent prompts only on this socket, and only to users who may
operate the daemon.
"""

import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import StartError
from kvtier.observe.log import Log
from kvtier.transfer.socket_file import SocketFile
from kvtier.transfer.ticket_server import peer_of, socket_mode

__all__ = ["OperatorSocket", "Operators", "engine_socket"]

_log = Log("kvtier.http")


def engine_socket(daemon_socket: Path, port: int) -> Path:
    """Return the Unix socket of the engine that listens on TCP port ``port``."""
    return daemon_socket.with_name(f"{daemon_socket.name}.{port}")


@dataclass(frozen=True, slots=True)
class OperatorSocket:
    """A listening Unix socket."""

    listener: socket.socket
    file: SocketFile
    operators: "Operators"

    def close(self) -> None:
        """Remove the file, and stop listening. Idempotent."""
        self.file.remove()
        self.listener.close()


@dataclass(frozen=True, slots=True)
class Operators:
    """Users who may operate the daemon: root, this process's user and ``allowed_uids``.

    ``peer`` returns the process and user id of a connection's other end; tests replace it.
    """

    daemon_socket: Path
    allowed_uids: Collection[int] = ()
    peer: Callable[[socket.socket], tuple[int, int]] = peer_of

    def include(self, connection: socket.socket) -> bool:
        """Return whether the connected user is an operator."""
        _, uid = self.peer(connection)
        return uid in {0, os.geteuid(), *self.allowed_uids}

    def listen(self, port: int) -> OperatorSocket | None:
        """Open the socket of the engine on ``port``; returns None if that fails."""
        file = SocketFile(engine_socket(self.daemon_socket, port), socket_mode(self.allowed_uids))
        listener = socket.socket(socket.AF_UNIX)
        try:
            with file.placing() as path:
                listener.bind(str(path))
                listener.listen()
        except (OSError, StartError) as error:
            listener.close()
            _log.info(
                "cannot open the engine's Unix socket; kvtier explain cannot compare prompts with "
                "recent ones of this engine",
                path=file.path,
                error=error,
            )
            return None
        return OperatorSocket(listener, file, self)
