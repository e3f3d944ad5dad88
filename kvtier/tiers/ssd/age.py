"""How old a block may be: the clock of the store, in seconds since 1970, and the limit."""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["AgeLimit", "Clock", "wall_clock_s"]

Clock = Callable[[], int]
"""Seconds since 1970: what is written by it must mean something after a restart."""

_LATEST_S = (1 << 32) - 1
"""What an entry can say, in the year 2106."""


def wall_clock_s() -> int:
    """Return the time of day."""
    return int(time.time())


@dataclass(slots=True)
class AgeLimit:
    """Blocks written more than ``max_age_s`` ago are not served; 0: no limit. May be changed.

    A clock that was set back lets blocks live longer, one that was set forward hides them while it
    is wrong. Neither makes a wrong block.
    """

    max_age_s: int = 0
    now_s: Clock = wall_clock_s

    def stamp_s(self) -> int:
        """Return the time to write down: later than that of no record, and within an entry."""
        return min(max(1, self.now_s()), _LATEST_S)

    def oldest_s(self) -> int:
        """Return when the oldest blocks that may be served were written."""
        max_age_s = self.max_age_s
        return max(0, self.now_s() - max_age_s) if max_age_s else 0
