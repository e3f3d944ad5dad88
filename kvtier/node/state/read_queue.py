"""Reads that wait for a tier: each row once, and loads take turns.

First come, first served would let one long load hold up fifty short ones. So each load has a line
of its own, and a transfer takes the next rows of one line; then it is the next load's turn. A row
that many loads wait for stands in all their lines, and is read as soon as the first gets to it.
A load that wants its rows in smaller transfers has several of them in a turn.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

__all__ = ["BACKGROUND", "ReadQueue"]

BACKGROUND = 0
"""In place of a load's number: nobody waits for it, so that every load goes first."""


class ReadQueue:
    """Rows to be read from one tier. Iterating gives the rows, in no order that matters."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._queued: dict[int, tuple[int, int]] = {}
        """By row, when it was queued first, and its size."""
        self._lines: OrderedDict[int, deque[int]] = OrderedDict()
        """By load, in the order of their turns, its rows; some may have been read or given up."""

        self._parts: dict[int, int] = {}
        """By load, the most rows that it takes at once, where it is to be fewer than usual."""
        self._turn = (BACKGROUND, 0)
        """Whose turn it is, and how many rows it has had of it."""

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queued)

    def __contains__(self, row: int) -> bool:
        return row in self._queued

    def add(self, row: int, load: int, num_bytes: int, now_ns: int) -> None:
        """Queue a row for a load, behind what it wants already; another may have queued it too."""
        if row not in self._queued:
            self._queued[row] = (now_ns, num_bytes)
            self.num_bytes += num_bytes
        self._lines.setdefault(load, deque()).append(row)

    def cut(self, load: int, count: int) -> None:
        """Give a load no more than ``count`` rows at once, until it is forgotten."""
        assert count > 0, "something is taken"
        self._parts[load] = count

    def discard(self, row: int) -> bool:
        """Take a row off the queue, whoever wants it; False where it is not there."""
        return self._pop(row) is not None

    def forget(self, load: int) -> None:
        """Drop a load's line; what others do not want was taken off before."""
        self._lines.pop(load, None)
        self._parts.pop(load, None)

    def clear(self) -> None:
        """Take everything off."""
        self.num_bytes = 0
        self._queued.clear()
        self._lines.clear()

    def take(self, count: int) -> list[tuple[int, int]]:
        """Take up to ``count`` rows off, all of the load whose turn it is, with when they came.

        So many are a turn, too.
        """
        while self._queued:
            load = self._next_load()
            most = min(count, self._parts.get(load, count))
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
        """Raise AssertionError unless each row that waits stands in some line."""
        wanted = {row for line in self._lines.values() for row in line}
        assert wanted >= self._queued.keys(), "a row that is in nobody's line is never read"

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
