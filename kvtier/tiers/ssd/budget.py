"""How much more may be written to the drive: a token bucket of bytes.

The bucket holds one day's budget and is refilled without pause, so that an idle night pays for a
busy morning. All that is written counts, blocks or not; what must be written to stay right
(footers, marks) is written even where nothing is left, and that debt is paid before the next block.

Weakness: the bucket itself is not on the disk. At a start what was written within the last day is
taken off as far as the blocks that are still there tell it; those evicted since do not.
"""

import threading
from collections.abc import Callable

__all__ = ["DAY_S", "WriteBudget"]

DAY_S = 86_400
"""What a budget is for, in seconds."""


class WriteBudget:
    """What is left of ``day_bytes`` a day; 0: there is no limit.

    ``written_bytes`` tells all that was written since the start, and ``now_s`` the time of day:
    where that is set back nothing is refilled for the while, and where it leaps ahead one day's
    budget comes at once, and no more. May be asked from any thread.
    """

    def __init__(
        self, day_bytes: int, written_bytes: Callable[[], int], now_s: Callable[[], int]
    ) -> None:
        self.day_bytes = day_bytes
        self._written_bytes = written_bytes
        self._now_s = now_s
        self._left_bytes = float(day_bytes)
        self._seen_bytes = written_bytes()
        self._seen_s = now_s()
        self._refused_bytes = 0
        """Of the write that was refused last, where none was allowed since."""
        self._lock = threading.Lock()

    @property
    def is_limited(self) -> bool:
        """Tell whether there is a budget at all."""
        return self.day_bytes > 0

    @property
    def is_used_up(self) -> bool:
        """Tell whether a write was refused that would be refused now too."""
        return self._refused_bytes > 0 and self.available_bytes() < self._refused_bytes

    def available_bytes(self) -> int:
        """Return what may be written now; 0 while there is a debt."""
        now_s, written_bytes = self._now_s(), self._written_bytes()
        with self._lock:
            gained = max(0, now_s - self._seen_s) * self.day_bytes / DAY_S
            self._take(written_bytes - self._seen_bytes)
            self._left_bytes = min(self.day_bytes, self._left_bytes + gained)
            self._seen_s, self._seen_bytes = now_s, written_bytes
            return max(0, int(self._left_bytes))

    def allows(self, num_bytes: int) -> bool:
        """Tell whether so much may be written now."""
        is_allowed = not self.is_limited or num_bytes <= self.available_bytes()
        self._refused_bytes = 0 if is_allowed else num_bytes
        return is_allowed

    def change(self, day_bytes: int) -> None:
        """Have another budget from now on: the difference is given, or taken, at once."""
        self.available_bytes()  # until now the old one counts
        with self._lock:
            self._left_bytes += day_bytes - self.day_bytes
            self.day_bytes = day_bytes
            self._take(0)

    def day_ago_s(self) -> int:
        """Return since when what was written counts."""
        return self._now_s() - DAY_S

    def recall(self, num_bytes: int) -> None:
        """Take off what an earlier process has written within the last day."""
        with self._lock:
            self._take(num_bytes)

    def _take(self, num_bytes: int) -> None:
        # A debt of more than a day's budget would outlast the day that it is for.
        self._left_bytes = max(self._left_bytes - num_bytes, -self.day_bytes)
