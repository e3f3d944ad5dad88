"""What is to come in a replay, ordered by time, and by the order of saying for the same time."""

import heapq
from collections.abc import Callable

__all__ = ["Agenda", "Pipe"]


class Agenda:
    """Things to do, each at its time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._num_entries = 0

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time, or now where that has passed."""
        self._num_entries += 1
        heapq.heappush(self._entries, (max(at_ns, self.now_ns), self._num_entries, action))

    def step(self) -> bool:
        """Do the next thing; False: there is none."""
        if not self._entries:
            return False
        self.now_ns, _, action = heapq.heappop(self._entries)
        action()
        return True


class Pipe:
    """A way that carries one thing after the other, in order."""

    def __init__(self, latency_s: float) -> None:
        self._latency_ns = round(latency_s * 1e9)
        self._free_ns = 0

    def carry_ns(self, now_ns: int, seconds: float) -> int:
        """Return when what is sent now, and takes so long, has arrived."""
        self._free_ns = max(now_ns, self._free_ns) + round(seconds * 1e9)
        return self._free_ns + self._latency_ns
