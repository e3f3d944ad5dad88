"""Files that hold secrets: read whole, in one place, and only where nobody else could read them.

Theory
------
A secret is exchanged while the daemon runs: by an editor, by ``install``, or by Kubernetes, which
points a link at a new folder. So what counts is kept apart from what lies there: a ``Secret`` has
the value of the last time that its files were good, all of them together. Nobody says when they
are whole: they count as such once they are the same at two looks, and a certificate whose key is
still the old one does not fit it, and is looked at again.
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
"""Thousands of keys; a file given by mistake is mostly larger."""

_TOKEN_CHARACTERS_MIN = 16
_TOKENS_MAX = 8
"""The old and the new one while one is exchanged, and some for others' tools."""


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


def read_tokens(path: Path, field: str) -> tuple[str, ...]:
    """Return the tokens in a file that only this user reads, one a line; raises StartError."""
    remedy = f"write one line there: openssl rand -hex 32 > {path}"
    lines = secret_lines(read_secret(path, field))
    if not lines:
        raise StartError(field, f"{path} has no token", remedy)
    if len(lines) > _TOKENS_MAX:
        problem = f"{path} has {len(lines)} lines, and not one to {_TOKENS_MAX}"
        raise StartError(field, problem, "leave the tokens that count")
    for number, token in lines:
        where = f"line {number} of {path}"
        if len(token) < _TOKEN_CHARACTERS_MIN:
            problem = f"{where} is a token of fewer than {_TOKEN_CHARACTERS_MIN} characters"
            raise StartError(field, problem, remedy)
        if not token.isascii() or not token.isprintable() or " " in token:
            problem = f"{where} is a token with blanks or characters beyond ASCII"
            raise StartError(field, problem, remedy)
    return tuple(token for _, token in lines)


class Secret(Generic[T]):
    """What files say, as of the last time that it was good: ``value``. ``name`` is for people.

    One thread at a time has it read; any may ask for the value.
    """

    def __init__(
        self, name: str, paths: Callable[[], Sequence[Path]], read: Callable[[], T]
    ) -> None:
        """``paths`` are looked at for changes; ``read`` raises StartError, and so does this."""
        self.name = name
        self.fault = ""
        """Why what lies there now does not count; empty where it does."""
        self._paths = paths
        self._read = read
        self._seen = self._counted = self._marks()
        self.value = read()

    def reload(self) -> bool:
        """Read the files; True where they say something else, StartError where they are no good."""
        return self._take(self._marks())

    def look(self) -> bool:
        """Do the same if they have changed, and are as they were at the last look."""
        before, self._seen = self._seen, self._marks()
        is_settled = before == self._seen
        if not is_settled or (self._seen == self._counted and not self.fault):
            return False
        return self._take(self._seen)

    def _take(self, marks: Hashable) -> bool:
        """Have the files count that bear ``marks``, which were seen before they are read."""
        try:
            value = self._read()
        except StartError as error:
            self.fault = str(error)
            raise
        is_changed = value != self.value
        if is_changed:
            self.value = value
        self._counted, self.fault = marks, ""
        return is_changed

    def _marks(self) -> Hashable:
        """Return what differs once a file is another, or has other contents or rights."""
        return tuple((str(path), _marks_of(path)) for path in self._paths())


def _marks_of(path: Path) -> Hashable:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
