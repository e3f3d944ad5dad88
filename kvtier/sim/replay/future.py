"""What only a replay knows: which blocks come back, and when; the bound that follows from it."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.sim.replay.trace import Trace

__all__ = ["NEVER", "best_hits", "next_uses", "truths"]

NEVER = np.iinfo(np.int32).max
"""The next use of a block that does not come back."""

_HINT_NS = 600 * 10**9
"""A client says whether its chain goes on within ten minutes."""


def next_uses(trace: Trace) -> list[npt.NDArray[np.int32]]:
    """Return for each request the number of the next one that uses each of its blocks."""
    coming = np.full(trace.num_distinct, NEVER, np.int32)
    uses: list[npt.NDArray[np.int32]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses.append(coming[blocks])
        coming[blocks] = number
    uses.reverse()
    return uses


def truths(trace: Trace) -> list[bool]:
    """Return for each request whether its chain goes on within ten minutes: its last block."""
    found: list[bool] = []
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        then = int(uses[-1]) if len(uses) else NEVER
        is_soon = then != NEVER and trace.requests[then].at_ns - request.at_ns <= _HINT_NS
        found.append(is_soon)
    return found


def best_hits(trace: Trace, num_blocks: int) -> Sequence[int]:
    """Return for each request how many leading blocks the best choice in hindsight would have.

    It keeps what is used next the soonest, and takes in nothing that would have to go at once
    (Belady's rule with bypassing). A parent is used whenever its child is, so chains stay whole.
    """
    next_of: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits: list[int] = []
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        chain = request.blocks.tolist()
        num_hits = 0
        for block in chain:
            if block not in next_of:
                break
            num_hits += 1
        hits.append(num_hits)
        for depth, (block, use) in enumerate(zip(chain, uses.tolist(), strict=True)):
            if use == NEVER:
                next_of.pop(block, None)
            else:
                next_of[block] = use
                heappush(furthest, (-use, -depth, block))
        while len(next_of) > num_blocks:
            use, _, block = heappop(furthest)
            if next_of.get(block) == -use:
                del next_of[block]
    return hits
