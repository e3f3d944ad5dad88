"""How computing from the front and loading from the back approach each other.

Theory
------
::

    block   first                                            first + num_blocks
            |--- claimed for computing --->|    gap    |<--- in place, loaded ---|

The engine computes only what it has claimed, and the port writes only to what is not claimed; each
claim is a chunk. Large chunks compute faster, and small ones adapt: what is claimed in vain could
have been loaded meanwhile. Both ends have worked for the same time, so the blocks each has done
say how the gap will be shared, without a clock. A claim is half of the engine's share, so that
chunks shrink towards the meeting (guided self-scheduling: Polychronopoulos and Kuck, 1987); and no
more than was computed before, so that one that finds a fast tier has lost no more than a block.
"""

from dataclasses import dataclass

__all__ = ["SplitProgress"]


@dataclass(slots=True)
class SplitProgress:
    """The two ends of one load, in blocks counted from its first one."""

    num_blocks: int
    num_claimed: int = 0
    num_loaded: int = 0

    @property
    def gap(self) -> int:
        """Return the blocks that are neither claimed nor known to be in place."""
        return self.num_blocks - self.num_claimed - self.num_loaded

    def next_claim(self) -> int:
        """Return how many leading blocks to claim in all; as many as now where there is no gap."""
        if not self.gap:
            return self.num_claimed
        computed, loaded = self.num_claimed + 1, self.num_loaded + 1
        share = self.gap * computed // (2 * (computed + loaded))
        return self.num_claimed + max(1, min(share, self.num_claimed))
