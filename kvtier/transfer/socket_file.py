"""The file of a Unix socket: created atomically, and removed only by the process that owns it.

A listener is bound to a temporary name, which is then renamed to its path. So nobody can connect
before the file has its permissions, and a library that unlinks the bound name, as gRPC does when a
server stops, never removes a file that another process has since put at the path.
"""

import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import StartError, reason_of

__all__ = ["SocketFile"]


class SocketFile:
    """A socket file at ``path`` with the permissions ``mode``."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._own: os.stat_result | None = None
        """The placed file; its inode number is not reused while the bound socket is open."""

    @contextlib.contextmanager
    def placing(self) -> Iterator[Path]:
        """Yield a name to bind a listener to; on exit the file is renamed to ``path``.

        A socket that nobody listens on is replaced. Raises StartError if another process listens
        there or the file is not a socket, and OSError.
        """
        self._check_unused()
        # A short name, because the whole path may have at most 107 bytes (sun_path).
        fresh = self.path.with_name(f".{secrets.token_hex(3)}")
        try:
            yield fresh
            fresh.chmod(self._mode)
            own = fresh.lstat()
            fresh.replace(self.path)
            self._own = own
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    def is_in_place(self) -> bool:
        """Return whether the file at ``path`` is still the one that was placed."""
        try:
            return self._own is not None and os.path.samestat(self.path.lstat(), self._own)
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the file if it is still the one that was placed. The listener must be open."""
        if self.is_in_place():
            self.path.unlink(missing_ok=True)
        self._own = None

    def _check_unused(self) -> None:
        if self.is_in_place():
            return
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise self._refusal("is not a socket", "remove it or set another path")
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)  # the kernel connects at once, or the queue is full
            try:
                client.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                return
            except BlockingIOError:
                pass
            except OSError as error:
                why = f"exists and cannot be connected to: {reason_of(error)}"
                raise self._refusal(why, "remove it or set another path") from error
        raise self._refusal("is in use by another process", "stop it or set another path")

    def _refusal(self, why: str, remedy: str) -> StartError:
        return StartError("daemon.socket", f"{self.path} {why}", remedy)
