"""One process a directory, and still the same directory."""

import os
from pathlib import Path

from kvtier.errors import StartError
from kvtier.lock import hold_lock, let_go

__all__ = ["DirectoryLock"]

_FIELD = "ssd.directory"


class DirectoryLock:
    """Locks a directory until ``release``, and creates it with mode 0700. Raises StartError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "lock"
        self._lock = self._hold()

    def is_in_place(self) -> bool:
        """Tell whether what is held is what the directory's name still leads to."""
        try:
            found = self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def renew(self) -> None:
        """Hold what the directory's name leads to now, making it where it is gone.

        Raises StartError, and FileNotFoundError where the name leads to another volume: the one
        that was there is not mounted, and its place is not for our bytes.
        """
        nearest = next(
            each for each in (self._directory, *self._directory.parents) if each.exists()
        )
        if nearest.stat().st_dev != os.fstat(self._lock).st_dev:
            raise FileNotFoundError(
                f"{self._directory} is not on the volume it was on at the start"
            )
        renewed = self._hold()
        let_go(self._lock)
        self._lock = renewed

    def release(self) -> None:
        """Let another process in."""
        let_go(self._lock)

    def _hold(self) -> int:
        directory = self._directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise StartError(_FIELD, f"{directory} is no directory", "name another one") from None
        except NotADirectoryError:
            raise StartError(
                _FIELD, f"a part of {directory} is no directory", "name another one"
            ) from None
        except OSError as error:
            raise StartError(
                _FIELD,
                f"cannot make {directory}: {error.strerror}",
                "make its parent writable for this user or name another one",
            ) from None
        return hold_lock(self._path, _FIELD, str(directory))
