"""Locks the directory of a store, and checks that the directory and its files still exist.

One process may use a directory. Files are opened by name for each operation; if the directory was
deleted, emptied or replaced, the check finds it, and the store drops the missing files. A read may
find it earlier: a block whose file is missing is a miss.
"""

import contextlib
import os
from pathlib import Path

from kvtier.errors import StartError, TierError
from kvtier.lock import acquire_lock, release_lock
from kvtier.observe.log import Log
from kvtier.permissions import ensure_private
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.purge import remove_unknown_files
from kvtier.tiers.ssd.segment import Segment, is_in_place
from kvtier.tiers.ssd.store_limits import NO_WRITES

__all__ = ["DirectoryLock", "check_directory", "check_private", "unusable"]

_log = Log("kvtier.tiers")


_FIELD = "ssd.directory"


class DirectoryLock:
    """Locks a directory until ``release``; creates it with mode 0700. Raises StartError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "lock"
        self._lock = self._hold()

    def is_in_place(self) -> bool:
        """Return whether the directory's name still refers to the locked one."""
        try:
            found = self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._lock))

    def renew(self) -> None:
        """Lock the directory that the name refers to now; create it if it is missing.

        Raises StartError. Raises FileNotFoundError if the name refers to another volume: the
        original one is not mounted, and nothing must be written to its mount point.
        """
        nearest = next(
            each for each in (self._directory, *self._directory.parents) if each.exists()
        )
        if nearest.stat().st_dev != os.fstat(self._lock).st_dev:
            raise FileNotFoundError(
                f"{self._directory} is no longer on the volume it was on at startup"
            )
        renewed = self._hold()
        release_lock(self._lock)
        self._lock = renewed

    def release(self) -> None:
        """Release the lock."""
        release_lock(self._lock)

    def _hold(self) -> int:
        directory = self._directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise StartError(_FIELD, f"{directory} is not a directory", "set another one") from None
        except NotADirectoryError:
            raise StartError(
                _FIELD, f"a parent of {directory} is not a directory", "set another one"
            ) from None
        except OSError as error:
            raise StartError(
                _FIELD,
                f"cannot create {directory}: {error.strerror}",
                "make its parent writable for this user or set another one",
            ) from None
        return acquire_lock(self._path, _FIELD, str(directory))


def check_private(directory: Path) -> None:
    """Check who may write to the directory before it is used. Raises StartError."""
    try:
        is_narrowed = ensure_private(directory, "ssd.directory")
    except FileNotFoundError:
        return  # it will be created with the right mode
    except OSError as error:
        raise unusable(directory, error) from error
    if is_narrowed:
        _log.warning("directory was writable by other users; mode set to 0700", path=directory)


def unusable(directory: Path, error: OSError) -> StartError:
    """Return the error for a directory that cannot be used."""
    return StartError(
        "ssd.directory", f"{directory}: {error.strerror}", "repair it or set another directory"
    )


def check_directory(pool: SegmentPool, lock: DirectoryLock) -> None:
    """Access the directory as reads and writes do, and keep it private. For the writer only.

    Raises OSError if that fails, and TierError if files were missing and the store continues
    without them. A volume that accepts no writes but is readable is not a fault here.
    """
    with contextlib.suppress(FileNotFoundError):  # it is created again
        try:
            ensure_private(pool.disk.directory, "ssd.directory")
        except StartError as error:
            raise TierError(f"ssd: {error}") from error
    num_lost = 0
    if not lock.is_in_place():
        try:
            lock.renew()
        except StartError as error:
            raise TierError(f"ssd: {error}") from error
        num_lost = _evict_missing(pool, list(pool.segments.values()))
        remove_unknown_files(pool)  # files of a new directory take space that is not counted
    elif pool.active is not None:
        num_lost = _evict_missing(pool, [pool.active])
    try:
        pool.disk.check_io()
    except OSError as error:
        if error.errno not in NO_WRITES:
            raise
        pool.volume.set_read_only(f"the volume accepts no more writes: {error.strerror}")
        num_lost += _evict_missing(pool, list(pool.segments.values())[:1])
    if num_lost:
        files = "1 file was" if num_lost == 1 else f"{num_lost} files were"
        raise TierError(f"ssd: {files} removed or replaced; continuing without")


def _evict_missing(pool: SegmentPool, segments: list[Segment]) -> int:
    missing = [segment for segment in segments if not is_in_place(pool.disk, segment)]
    for segment in missing:
        pool.evict(segment)
    return len(missing)
