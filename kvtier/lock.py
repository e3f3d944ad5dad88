"""A file lock that names its holder, and is released when the holder exits for any reason."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from functools import partial
from pathlib import Path

from kvtier.errors import LockHeld, StartError

__all__ = ["PathLock", "acquire_lock", "release_lock"]

_NOTE_BYTES_MAX = 256

_LOOK_S = 0.05
"""A process that checks whether the lock is held holds it for less than this."""

_PAUSE_S = 0.005


def acquire_lock(path: Path, field: str, subject: str, note: str = "") -> int:
    """Lock the file ``path``, creating it if missing; returns a handle for ``release_lock``.

    Writes the holder and ``note`` to the file if possible. Raises StartError about ``field``, or
    LockHeld with the holder's name if another process holds ``subject``.
    """
    try:
        fd = _open(path)
    except OSError as error:
        raise StartError(
            field,
            f"cannot write to {path.parent}: {error.strerror}",
            "make it writable for this user or use another one",
        ) from None
    try:
        _lock(fd)
    except OSError as error:
        holder = os.pread(fd, _NOTE_BYTES_MAX, 0).decode(errors="replace").strip()
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise StartError(
                field, f"cannot lock {path}: {error.strerror}", "use a local file system"
            ) from None
        raise LockHeld(
            field,
            f"{subject} is held by {holder or 'another process'}",
            "stop that process or use another path",
        ) from None
    holder = f"pid {os.getpid()} on host {socket.gethostname()} {note}".strip() + "\n"
    _write_note(fd, holder.encode()[:_NOTE_BYTES_MAX])
    return fd


def release_lock(lock: int) -> None:
    """Release a lock."""
    _write_note(lock, b"")
    os.close(lock)


class PathLock:
    """A lock as from ``acquire_lock``, which can be renewed if its file is removed."""

    def __init__(self, path: Path, field: str, subject: str, note: str = "") -> None:
        self.path = path
        self._hold = partial(acquire_lock, path, field, subject, note)
        self._fd = self._hold()

    def is_in_place(self) -> bool:
        """Return whether the file at the path is still the one that is locked."""
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._fd))
        except OSError:
            return False

    def renew(self) -> None:
        """Lock the file that is at the path now, creating it if missing; may take 50 ms.

        Raises StartError if another process holds it. Call it only if the lock is not in place.
        """
        renewed = self._hold()
        release_lock(self._fd)
        self._fd = renewed

    def release(self) -> None:
        """Release the lock."""
        release_lock(self._fd)


def _open(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, flags | os.O_RDONLY)  # can be locked, but cannot name its holder


def _lock(fd: int) -> None:
    """Lock an open file. Raises BlockingIOError if another process holds it, or OSError."""
    until_s = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _write_note(fd: int, content: bytes) -> None:
    """Replace the note in the file; a full or read-only disk is ignored, the lock still counts."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)  # first, so that an earlier holder's note does not stay
        os.pwrite(fd, content, 0)
