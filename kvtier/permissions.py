"""Checks that no other user can change a directory, as sshd does for its keys.

A user who can write to a directory can replace its contents: plant blocks that engines are then
served, or replace a socket. A user who can write to a parent directory can replace the directory
itself, unless the parent is sticky like /tmp.

The root of a mounted volume is not checked as a parent. In a container it belongs to root and is
often writable by everybody (an emptyDir has mode 0777); access to it is decided by the mount.
"""

import os
import stat
import tempfile
from pathlib import Path

from kvtier.errors import StartError, reason_of

__all__ = [
    "check_owner",
    "check_parents",
    "check_writable",
    "directory_mode",
    "ensure_private",
    "is_foreign",
    "is_writable_by_others",
]

_MODE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def ensure_private(directory: Path, field: str) -> bool:
    """Ensure that only this user and root can change a directory's contents, or raise StartError.

    If others may write to it and it belongs to this user, its mode becomes 0700. Returns whether
    the mode was changed. Raises OSError if the directory cannot be examined.
    """
    check_parents(directory, field, os.geteuid())
    for found in (directory.lstat(), directory.stat()):
        if is_foreign(found):
            raise StartError(
                field,
                f"{directory} belongs to user {found.st_uid}, who could change its contents",
                f"chown it to user {os.geteuid()}, or set another one",
            )
    if not found.st_mode & _OTHERS_WRITE:
        return False
    try:
        directory.chmod(_MODE)
    except PermissionError:
        raise StartError(
            field,
            f"other users may write to {directory} (mode {stat.S_IMODE(found.st_mode):04o})",
            f"chmod {_MODE:o} {directory}, or set a subdirectory, which is created with that mode",
        ) from None
    return True


def check_parents(path: Path, field: str, uid: int) -> None:
    """Check that only user ``uid`` and root can replace what is at a path; raises StartError.

    Changes nothing. Missing parents are skipped, because they are created later.
    """
    ways = {*path.absolute().parents, *path.resolve().parents}
    for parent in sorted(each for each in ways if each.exists() and not os.path.ismount(each)):
        found = parent.stat()
        if found.st_uid not in {0, uid}:
            problem = f"{parent} belongs to user {found.st_uid}, who could replace {path}"
            raise StartError(field, problem, f"chown {parent}, or set another path")
        if is_writable_by_others(found):
            mode = stat.S_IMODE(found.st_mode)
            problem = f"other users may write to {parent} (mode {mode:04o}) and replace {path}"
            raise StartError(field, problem, f"chmod go-w {parent}, or set another path")


def is_foreign(found: os.stat_result) -> bool:
    """Return whether a file belongs to neither this user nor root."""
    return found.st_uid not in {0, os.geteuid()}


def is_writable_by_others(found: os.stat_result) -> bool:
    """Return whether other users may replace the contents of a directory.

    This process's own group does not count as other users: many systems give each user a group.
    """
    if found.st_mode & stat.S_ISVTX:
        return False
    is_own_group = found.st_gid in {0, os.getegid()}
    return bool(found.st_mode & (stat.S_IWOTH if is_own_group else _OTHERS_WRITE))


def check_writable(field: str, directory: Path, mode: int = 0o700) -> None:
    """Make the directory, by default private to this user, and write a file into it."""
    try:
        is_new = not directory.exists()
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        if is_new:
            directory.chmod(mode)  # regardless of the umask
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartError(
            field,
            f"{directory} cannot be written: {reason_of(error)}",
            "give a directory that this user may write",
        ) from error


def directory_mode(*, is_shared: bool) -> int:
    """Return the mode of a new directory for sockets; if shared, other users can enter it."""
    return 0o711 if is_shared else 0o700


def check_owner(directory: Path, uid: int) -> None:
    """Check that root or user ``uid`` owns the directory, so that nobody else replaces sockets."""
    owner = directory.stat().st_uid  # the default may be in /tmp, where anyone could create it
    if owner not in {0, uid}:
        raise StartError(
            "daemon.socket",
            f"{directory} belongs to user {owner}, who could replace the socket",
            "use a directory of your own",
        )
