"""Files that hold secrets: read whole, in one place, and only where nobody else could read them."""

import os
import stat
from pathlib import Path

from kvtier.errors import StartError, reason_of

__all__ = ["read_secret", "read_token", "secret_lines"]

_MAX_BYTES = 1 << 20
"""Thousands of keys; a file given by mistake is mostly larger."""

_TOKEN_CHARACTERS_MIN = 16


def read_secret(path: Path, field: str) -> str:
    """Return the text of a secret file. Raises StartError, which never tells what is in it.

    As PostgreSQL has it: a file of this user must be closed to everybody else, one of root's may
    be read by its group, for that is how a container gets its secrets.
    """
    try:
        # A FIFO must not keep us waiting for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(
            field,
            f"{path} cannot be read: {reason_of(error)}",
            "give a file that this user may read",
        ) from error
    try:
        _check_rights(os.fstat(descriptor), path, field)
        content = os.read(descriptor, _MAX_BYTES + 1)
    except OSError as error:
        raise StartError(field, f"{path}: {error.strerror}", "give a readable file") from error
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        raise StartError(field, f"{path} is larger than 1 MiB", "give the right file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise StartError(field, f"{path} is not UTF-8", "save it as plain text") from None


def secret_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of a secret file with their numbers, without blank ones and comments."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def read_token(path: Path, field: str) -> str:
    """Return the token in a file that only this user reads; raises StartError."""
    lines = secret_lines(read_secret(path, field))
    remedy = f"write one line there: openssl rand -hex 32 > {path}"
    if len(lines) != 1:
        raise StartError(field, f"{path} has {len(lines)} lines and not one", remedy)
    ((_, token),) = lines
    if len(token) < _TOKEN_CHARACTERS_MIN:
        problem = f"{path} has a token of fewer than {_TOKEN_CHARACTERS_MIN} characters"
        raise StartError(field, problem, remedy)
    if not token.isascii() or not token.isprintable() or " " in token:
        problem = f"{path} has a token with blanks or characters beyond ASCII"
        raise StartError(field, problem, remedy)
    return token


def _check_rights(found: os.stat_result, path: Path, field: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StartError(field, f"{path} is no file", "give a file")
    if found.st_uid not in {0, os.geteuid()}:
        raise StartError(
            field, f"{path} belongs to another user", "give a file of this user's, or of root's"
        )
    closed = 0o037 if found.st_uid == 0 else 0o077
    if stat.S_IMODE(found.st_mode) & closed:
        raise StartError(
            field, f"{path} is open to other users", f"take their rights away: chmod 600 {path}"
        )
