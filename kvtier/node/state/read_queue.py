"""Queues reads of a tier: each row once, with loads taking turns.

First come, first served would let one long load delay fifty short ones. So each load has its own
line, and a transfer takes the next rows of one line; then it is the next load's turn. A row that
many loads wait for is in all their lines, and is read when the first of them gets to it. A
load that wants smaller transfers gets several of them in one turn.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

__all__ = ["BACKGROUND", "ReadQueue"]

BACKGROUND = 0
"""Takes the place of a load's number in prefetch reads, which run only when no load is waiting."""


class ReadQueue:
    """Rows to read from one tier. Iterates over the rows in no particular order."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._queued: dict[int, tuple[int, int]] = {}
        """By row, the time when it was first queued, and its size."""
        self._lines: OrderedDict[int, deque[int]] = OrderedDict()
        """Rows by load, in the order of turns; some may have been read or cancelled."""

        self._limits: dict[int, int] = {}
        """By load that wants smaller transfers, the maximum number of rows per transfer."""
        self._turn = (BACKGROUND, 0)
        """The load whose turn it is, and how many rows it has taken in this turn."""

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queued)

    def __contains__(self, row: int) -> bool:
        return row in self._queued

    def add(self, row: int, load: int, num_bytes: int, now_ns: int) -> None:
        """Queue a row for a load, at the end of its line; other loads may have queued it too."""
        if row not in self._queued:
            self._queued[row] = (now_ns, num_bytes)
            self.num_bytes += num_bytes
        self._lines.setdefault(load, deque()).append(row)

    def limit(self, load: int, count: int) -> None:
        """Limit a load to ``count`` rows at once, until it is forgotten."""
        assert count > 0, "a turn has at least one row"
        self._limits[load] = count

    def discard(self, row: int) -> bool:
        """Remove a row for all loads; False if it is not queued."""
        return self._pop(row) is not None

    def forget(self, load: int) -> None:
        """Drop a load's line; rows that no other load wants were discarded before."""
        self._lines.pop(load, None)
        self._limits.pop(load, None)

    def clear(self) -> None:
        """Remove everything."""
        self.num_bytes = 0
        self._queued.clear()
        self._lines.clear()

    def take(self, count: int) -> list[tuple[int, int]]:
        """Remove up to ``count`` rows of the load whose turn it is.

        Returns the rows and when each was queued. A turn is ``count`` rows.
        """
        while self._queued:
            load = self._next_load()
            most = min(count, self._limits.get(load, count))
            taken = self._take_from(self._lines[load], most)
            whose, num_had = self._turn
            num_had = len(taken) + (num_had if whose == load else 0)
            self._turn = (load, num_had % count)
            if not self._lines[load]:
                del self._lines[load]
            elif num_had >= count:
                self._lines.move_to_end(load)
            if taken:
                return taken
        self._lines.clear()
        return []

    def check(self) -> None:
        """Raise AssertionError unless each queued row is in some line."""
        wanted = {row for line in self._lines.values() for row in line}
        assert wanted >= self._queued.keys(), "a row in no line is never read"

    def _next_load(self) -> int:
        turns = iter(self._lines)
        load = next(turns)
        return next(turns, BACKGROUND) if load == BACKGROUND else load

    def _take_from(self, line: deque[int], count: int) -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        while line and len(taken) < count:
            row = line.popleft()
            queued_ns = self._pop(row)
            if queued_ns is not None:
                taken.append((row, queued_ns))
        return taken

    def _pop(self, row: int) -> int | None:
        queued_ns, num_bytes = self._queued.pop(row, (None, 0))
        self.num_bytes -= num_bytes
        return queued_ns
