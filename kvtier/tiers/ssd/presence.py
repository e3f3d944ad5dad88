"""Checks that the directory and files of a store are still there, and goes on without those lost.

Files are opened by name for each operation. If a store's directory was deleted, emptied or
replaced, this check finds it, and gives up the files that are gone. A read may find it earlier: a
block whose file is gone is a miss.
"""

import contextlib

from kvtier.errors import StartError, TierError
from kvtier.private import keep_private
from kvtier.tiers.ssd.lock import DirectoryLock
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.purge import remove_strangers
from kvtier.tiers.ssd.segment import Segment, is_in_place
from kvtier.tiers.ssd.volume import NO_WRITES

__all__ = ["check_presence"]


def check_presence(pool: SegmentPool, lock: DirectoryLock) -> None:
    """Touch the directory as reads and writes do, and keep it private. Only the writer calls this.

    Raises OSError if it does not work, and TierError if something was gone and the store goes on
    without it. A volume that takes no more writes is not a fault here, as long as it can be read.
    """
    with contextlib.suppress(FileNotFoundError):  # it is created again
        try:
            keep_private(pool.disk.directory, "ssd.directory")
        except StartError as error:
            raise TierError(f"ssd: {error}") from error
    num_lost = 0
    if not lock.is_in_place():
        try:
            lock.renew()
        except StartError as error:
            raise TierError(f"ssd: {error}") from error
        num_lost = _give_up_missing(pool, list(pool.segments.values()))
        remove_strangers(pool)  # what came with another directory takes space that nobody counts
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
