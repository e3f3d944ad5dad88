"""Tracks a split: computing from the front while blocks are loaded from the back.

Theory
------
::

    block   first                                            first + num_blocks
            |--- claimed for computing --->|    gap    |<--- in place, loaded ---|

The engine only computes what it has claimed, and the port only writes to unclaimed blocks; each
claim is a chunk. Large chunks compute faster, but small ones adapt better: claimed blocks could
have been loaded meanwhile. Both ends have worked for the same time, so the number of blocks each
has done predicts how they will share the gap, without a clock. A claim is half of the engine's
share, so chunks shrink towards the end (guided self-scheduling: Polychronopoulos and Kuck, 1987).
It is also at most what was computed before, so a request that finds a fast tier loses at most one
block.
"""

from dataclasses import dataclass

__all__ = ["SplitProgress"]


@dataclass(slots=True)
class SplitProgress:
    """The two ends of one split load, in blocks counted from its first one."""

    num_blocks: int
    num_claimed: int = 0
    num_loaded: int = 0

    @property
    def gap(self) -> int:
        """Return the number of blocks that are neither claimed nor known to be in place."""
        return self.num_blocks - self.num_claimed - self.num_loaded

    def next_claim(self) -> int:
        """Return how many leading blocks to claim in total; unchanged if there is no gap."""
        if not self.gap:
            return self.num_claimed
        computed, loaded = self.num_claimed + 1, self.num_loaded + 1
        share = self.gap * computed // (2 * (computed + loaded))
        return self.num_claimed + max(1, min(share, self.num_claimed))
