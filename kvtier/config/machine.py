"""The daemon of a machine: where it is, and how it is configured, for whoever names no other.

What deploy/ has for systemd, for pods and for containers puts both there.
"""

import os
from pathlib import Path

from kvtier.config.model import default_socket

__all__ = ["MACHINE_CONFIG", "MACHINE_SOCKET", "nearest_socket"]

MACHINE_SOCKET = Path("/run/kvtier/kvtier.sock")
"""Where it serves; the folder has to be root's, or the daemon's own."""

MACHINE_CONFIG = Path("/etc/kvtier/kvtier.toml")
"""What it is started with."""


def nearest_socket(socket: Path, machine: Path = MACHINE_SOCKET) -> Path:
    """Return where to look for a daemon now: at ``socket``, or else at the machine's.

    That is only meant where nobody named a socket, so that it is the user's, and none is there.
    """
    is_named = socket != default_socket()
    if is_named or os.access(socket, os.F_OK) or not os.access(machine, os.F_OK):
        return socket
    return machine
