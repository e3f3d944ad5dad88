"""Reads files with secrets, and reloads them when they change.

Theory
------
Secrets are replaced while the daemon runs: by an editor, by ``install``, or by Kubernetes, which
redirects a symbolic link. So a ``Secret`` keeps the value of the last time that all its files were
valid. Nothing signals that a new file is complete: it counts as complete once it is the same at two
checks. A new certificate whose key is not there yet does not match the old key, and is checked
again later.
"""

import os
import stat
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvtier.errors import StartError, reason_of

__all__ = ["Secret", "read_secret", "read_tokens", "secret_lines"]

T = TypeVar("T")

_MAX_BYTES = 1 << 20
"""Enough for thousands of keys; a wrong file is usually larger."""

_TOKEN_CHARACTERS_MIN = 16
_TOKENS_MAX = 8
"""Enough for the old and the new token during a rotation, and a few per tool."""


def read_secret(path: Path, field: str) -> str:
    """Return the text of a secret file. Raises StartError, which never contains the secret.

    As in PostgreSQL, a file of this user must not be accessible to others. A file of root may be
    readable by its group, because containers get their secrets that way.
    """
    try:
        # Nonblocking: opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(
            field,
            f"cannot read {path}: {reason_of(error)}",
            "give a file that this user can read",
        ) from error
    try:
        _check_rights(os.fstat(descriptor), path, field)
        content = os.read(descriptor, _MAX_BYTES + 1)
    except OSError as error:
        raise StartError(
            field, f"cannot read {path}: {reason_of(error)}", "give a readable file"
        ) from error
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        raise StartError(field, f"{path} is larger than 1 MiB", "give the right file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise StartError(field, f"{path} is not UTF-8", "save it as plain text") from None


def secret_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of a secret file with their numbers, without blank lines and comments."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def read_tokens(path: Path, field: str) -> tuple[str, ...]:
    """Return the tokens in a secret file, one per line; raises StartError."""
    remedy = f"create a token: openssl rand -hex 32 > {path}"
    lines = secret_lines(read_secret(path, field))
    if not lines:
        raise StartError(field, f"{path} contains no token", remedy)
    if len(lines) > _TOKENS_MAX:
        problem = f"{path} has {len(lines)} tokens, the maximum is {_TOKENS_MAX}"
        raise StartError(field, problem, "remove the tokens that are no longer used")
    for number, token in lines:
        where = f"line {number} of {path}"
        if len(token) < _TOKEN_CHARACTERS_MIN:
            problem = f"the token on {where} has fewer than {_TOKEN_CHARACTERS_MIN} characters"
            raise StartError(field, problem, remedy)
        if not token.isascii() or not token.isprintable() or " " in token:
            problem = f"the token on {where} has blanks or non-ASCII characters"
            raise StartError(field, problem, remedy)
    return tuple(token for _, token in lines)


class Secret(Generic[T]):
    """The last valid ``value`` of one or more files, and ``name`` for messages.

    Any thread may read the value, but only one at a time may call the methods.
    """

    def __init__(
        self, name: str, paths: Callable[[], Sequence[Path]], read: Callable[[], T]
    ) -> None:
        """Watch ``paths``, and read them with ``read``. Raises StartError if ``read`` does."""
        self.name = name
        self.fault = ""
        """Why the current files are invalid; empty if they are valid."""
        self._paths = paths
        self._read = read
        self._seen = self._loaded = self._stamps()
        self.value = read()

    def reload(self) -> bool:
        """Read the files, and return whether the value changed. Raises StartError if invalid."""
        return self._load(self._stamps())

    def look(self) -> bool:
        """Reload if the files changed, but not since the previous call."""
        before, self._seen = self._seen, self._stamps()
        is_settled = before == self._seen
        if not is_settled or (self._seen == self._loaded and not self.fault):
            return False
        return self._load(self._seen)

    def _load(self, stamps: Hashable) -> bool:
        """Read the files, whose ``stamps`` were taken before."""
        try:
            value = self._read()
        except StartError as error:
            self.fault = str(error)
            raise
        is_changed = value != self.value
        if is_changed:
            self.value = value
        self._loaded, self.fault = stamps, ""
        return is_changed

    def _stamps(self) -> Hashable:
        """Return a value that changes if a file is replaced or its contents or mode change."""
        return tuple((str(path), _stamp_of(path)) for path in self._paths())


def _stamp_of(path: Path) -> Hashable:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_rights(found: os.stat_result, path: Path, field: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StartError(field, f"{path} is not a regular file", "give a file")
    if found.st_uid not in {0, os.geteuid()}:
        raise StartError(
            field, f"{path} belongs to another user", "give a file that this user or root owns"
        )
    closed = 0o037 if found.st_uid == 0 else 0o077
    if stat.S_IMODE(found.st_mode) & closed:
        raise StartError(field, f"other users can access {path}", f"chmod 600 {path}")
