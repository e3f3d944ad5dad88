"""A file lock that names its holder, and that ends with its holder, however that ends."""

import fcntl
import os
import socket
from pathlib import Path

from kvtier.errors import StartError

__all__ = ["hold_lock", "let_go"]

_NOTE_BYTES_MAX = 256


def hold_lock(path: Path, field: str, subject: str, note: str = "") -> int:
    """Hold the lock file ``path``, made where needed; returns what ``let_go`` takes.

    The file tells who holds it, and ``note``.

    Raises StartError naming ``field``, and who holds ``subject`` where somebody does.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(
            field,
            f"cannot write to {path.parent}: {error.strerror}",
            "make it writable for this user or name another one",
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, _NOTE_BYTES_MAX, 0).decode(errors="replace").strip()
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise StartError(
                field, f"cannot lock {path}: {error.strerror}", "use a local file system"
            ) from None
        raise StartError(
            field,
            f"{subject} is held by {holder or 'another process'}",
            "stop that one or name another one",
        ) from None
    holder = f"pid {os.getpid()} on host {socket.gethostname()} {note}".strip() + "\n"
    content = holder.encode()[:_NOTE_BYTES_MAX]
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))
    return fd


def let_go(lock: int) -> None:
    """Let another process in."""
    os.ftruncate(lock, 0)
    os.close(lock)
