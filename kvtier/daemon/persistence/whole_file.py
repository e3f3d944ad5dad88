"""Small files, written as a whole and read with care: whoever else writes there does no harm."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from kvtier.permissions import is_foreign

__all__ = ["read_file", "replace_file"]

_NAME_CHARACTERS_MAX = 64
"""Of a file's name in that of its successor: a name may have 255 bytes, and this one has more."""


def replace_file(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    successor: str = ".new",
    keep: Path | None = None,
) -> None:
    """Replace a file, all or nothing; raises OSError, and then it is as it was.

    ``successor`` ends the name of the file that takes its place. What has that name is removed, be
    it what a crash left, a link or a pipe: so no two may write with the same one at once.
    What is replaced has the name ``keep`` from then on, if there is one.
    """
    fresh = path.with_name(path.name[:_NAME_CHARACTERS_MAX] + successor)
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        if keep is not None:
            path.replace(keep)
        fresh.replace(path)
    except BaseException:  # also where somebody has had enough
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the beginning of a regular file; raises OSError.

    Refuses links, anything that is not a regular file, and files of another user. Opening a pipe
    would block until somebody writes to it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if is_foreign(found):
            raise OSError(errno.EPERM, f"belongs to user {found.st_uid}", str(path))
        return file.read(most_bytes)
