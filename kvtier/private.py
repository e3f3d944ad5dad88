"""Directories that no other user may change, as sshd demands of those that hold keys.

Whoever can write to a directory can exchange what is in it: plant blocks that another user's engine
is served, or take the place of a socket. Whoever can write to a directory above can exchange the
directory itself, unless it is sticky as /tmp is.

The root of a mounted volume is exempt as a directory above. In a container it belongs to root and
is often writable by everybody (an emptyDir has mode 0777), and who gets to it is decided by what
mounts it.
"""

import os
import stat
from pathlib import Path

from kvtier.errors import StartError

__all__ = ["check_parents", "is_of_others", "is_open_to_others", "keep_private"]

_MODE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep_private(directory: Path, field: str) -> bool:
    """Have nobody but this user and root change what is in a directory, or raise StartError.

    If it is this user's and others may write to it, its mode becomes 0700; returns whether that was
    so. Raises OSError where it cannot be looked at.
    """
    check_parents(directory, field, os.geteuid())
    for found in (directory.lstat(), directory.stat()):
        if is_of_others(found):
            raise StartError(
                field,
                f"{directory} belongs to user {found.st_uid}, who could change what is in it",
                f"chown it to user {os.geteuid()}, or name another one",
            )
    if not found.st_mode & _OTHERS_WRITE:
        return False
    try:
        directory.chmod(_MODE)
    except PermissionError:
        raise StartError(
            field,
            f"other users may write to {directory} (mode {stat.S_IMODE(found.st_mode):04o})",
            f"chmod {_MODE:o} {directory}, or name a directory in it, which is made with that mode",
        ) from None
    return True


def check_parents(path: Path, field: str, uid: int) -> None:
    """Check that only user ``uid`` and root can exchange a path; raises StartError.

    Changes nothing. Parents that are missing are yet to be made.
    """
    ways = {*path.absolute().parents, *path.resolve().parents}
    for parent in sorted(each for each in ways if each.exists() and not os.path.ismount(each)):
        found = parent.stat()
        if found.st_uid not in {0, uid}:
            problem = f"{parent} belongs to user {found.st_uid}, who could exchange {path}"
            raise StartError(field, problem, f"chown {parent}, or name another place")
        if is_open_to_others(found):
            mode = stat.S_IMODE(found.st_mode)
            problem = f"other users may write to {parent} (mode {mode:04o}), and exchange {path}"
            raise StartError(field, problem, f"chmod go-w {parent}, or name another place")


def is_of_others(found: os.stat_result) -> bool:
    """Tell whether a file belongs to neither this user nor root."""
    return found.st_uid not in {0, os.geteuid()}


def is_open_to_others(found: os.stat_result) -> bool:
    """Tell whether other users may exchange what is in a directory.

    A group of this process is no other user: many systems give each user a group of their own.
    """
    if found.st_mode & stat.S_ISVTX:
        return False
    is_own_group = found.st_gid in {0, os.getegid()}
    return bool(found.st_mode & (stat.S_IWOTH if is_own_group else _OTHERS_WRITE))
