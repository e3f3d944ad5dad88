"""One process a directory, by a lock that ends with its holder, however that ends."""

import fcntl
import os
import socket
from pathlib import Path

from kvtier.errors import StartError

__all__ = ["lock_directory", "unlock_directory"]

_NAME = "lock"
_FIELD = "ssd.directory"
_NOTE_BYTES_MAX = 256


def lock_directory(directory: Path) -> int:
    """Make the directory where needed and hold it; returns what ``unlock_directory`` takes.

    A directory made here is 0700; one that exists keeps its mode. Raises StartError.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(directory / _NAME, flags, 0o600)
    except FileExistsError:
        raise StartError(_FIELD, f"{directory} is no directory", "name another one") from None
    except NotADirectoryError:
        raise StartError(
            _FIELD, f"a part of {directory} is no directory", "name another one"
        ) from None
    except OSError as error:
        raise StartError(
            _FIELD,
            f"cannot write to {directory}: {error.strerror}",
            "make it writable for this user or name another one",
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, _NOTE_BYTES_MAX, 0).decode(errors="replace").strip()
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise StartError(
                _FIELD, f"cannot lock {directory}: {error.strerror}", "use a local file system"
            ) from None
        raise StartError(
            _FIELD,
            f"{directory} is held by {holder or 'another process'}",
            "stop that one or name another directory",
        ) from None
    note = f"pid {os.getpid()} on host {socket.gethostname()}\n".encode()
    os.pwrite(fd, note[:_NOTE_BYTES_MAX], 0)
    os.ftruncate(fd, min(len(note), _NOTE_BYTES_MAX))
    return fd


def unlock_directory(lock: int) -> None:
    """Let another process in."""
    os.ftruncate(lock, 0)
    os.close(lock)
