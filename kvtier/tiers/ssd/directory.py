"""One process a directory, and still the same directory."""

import contextlib
import os
from pathlib import Path

from kvtier.errors import StartError, TierError
from kvtier.lock import acquire_lock, release_lock
from kvtier.permissions import ensure_private
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.purge import remove_unknown_files
from kvtier.tiers.ssd.segment import Segment, is_in_place
from kvtier.tiers.ssd.store_limits import NO_WRITES

__all__ = ["DirectoryLock", "check_directory"]


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
        release_lock(self._lock)
        self._lock = renewed

    def release(self) -> None:
        """Let another process in."""
        release_lock(self._lock)

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
        return acquire_lock(self._path, _FIELD, str(directory))


def check_directory(pool: SegmentPool, lock: DirectoryLock) -> None:
    """Touch the directory as reads and writes do, and keep it private. Only the writer calls this.

    Raises OSError if it does not work, and TierError if something was gone and the store goes on
    without it. A volume that takes no more writes is not a fault here, as long as it can be read.
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
        num_lost = _give_up_missing(pool, list(pool.segments.values()))
        remove_unknown_files(
            pool
        )  # what came with another directory takes space that nobody counts
    elif pool.active is not None:
        num_lost = _give_up_missing(pool, [pool.active])
    try:
        pool.disk.probe()
    except OSError as error:
        if error.errno not in NO_WRITES:
            raise
        pool.volume.stop(f"the volume takes no more: {error.strerror}")
        num_lost += _give_up_missing(pool, list(pool.segments.values())[:1])
    if num_lost:
        raise TierError(f"ssd: {num_lost} files were taken away or exchanged; goes on without them")


def _give_up_missing(pool: SegmentPool, segments: list[Segment]) -> int:
    missing = [segment for segment in segments if not is_in_place(pool.disk, segment)]
    for segment in missing:
        pool.give_up(segment)
    return len(missing)
