"""Which segment goes when space is needed.

Theory
------
The cost-benefit rule of log-structured file systems (Rosenblum and Ousterhout, 1992). With *u* the
share of a segment that is worth keeping, cleaning it reads and writes about ``1 + u`` and frees
``1 - u``; the older it is, the longer what is freed will stay so. The segment with the most
``(1 - u) * age / (1 + u)`` goes. Worth keeping is what has been read since it was written: one-off
blocks, the most of any trace, cost nothing, so that a store that nobody reads is first in, first
out. Age is counted in segments made since, which needs no clock.

Only a share of a segment can be moved. One that has more worth keeping goes after all others: what
is hot would be lost with it. It cools down, since counts of reads are halved with each turnover.
"""

from collections.abc import Collection, Sequence

import numpy as np

from kvtier.tiers.ssd.index import Index

__all__ = ["MOVED_SHARE", "choose_victim"]

MOVED_SHARE = 0.25
"""Of a segment of 256 MiB a move reads and writes 64 MiB: 0.1 s on a drive that does 1 GB/s."""


def choose_victim(
    index: Index, candidates: Sequence[int], segment_bytes: int, unknown: Collection[int] = ()
) -> int | None:
    """Return the segment to reclaim, of ``candidates`` in ascending order; None of none.

    One without a block that counts goes before all others: it costs nothing. Of ``unknown`` ones
    nobody can tell, and they go when it is their turn.
    """
    if not candidates:
        return None
    first, last = candidates[0], candidates[-1]
    numbers = np.array(candidates)
    num_blocks, read_bytes = (each[numbers - first] for each in index.weigh(first, last))
    is_dead = (num_blocks == 0) & ~np.isin(numbers, list(unknown))
    if is_dead.any():
        return int(numbers[np.argmax(is_dead)])
    kept = read_bytes / segment_bytes
    gain = (1 - kept) * (last + 1 - numbers) / (1 + kept)
    if (kept <= MOVED_SHARE).any():
        gain[kept > MOVED_SHARE] = 0
    return int(numbers[np.argmax(gain)])  # the first, and so the oldest, of equals
