"""Replaces small files atomically, and reads them safely from directories that others can write."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from kvtier.permissions import is_foreign

__all__ = ["read_file", "replace_file"]

_NAME_CHARACTERS_MAX = 64
"""Characters of a file's name used in that of its successor: a name has at most 255 bytes."""


def replace_file(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o600,
    successor: str = ".new",
    keep: Path | None = None,
) -> None:
    """Replace a file atomically. Raises OSError, and then the file is unchanged.

    ``successor`` is the suffix of the temporary file. A file with that name is removed first, even
    a link or a pipe, so concurrent writers need different suffixes. With ``keep``, the replaced
    file is renamed to it.
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
    except BaseException:  # also when interrupted
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the beginning of a regular file; raises OSError.

    Refuses links, files that are not regular, and files of another user. Opening a pipe does not
    block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if is_foreign(found):
            raise OSError(errno.EPERM, f"belongs to user {found.st_uid}", str(path))
        return file.read(most_bytes)
