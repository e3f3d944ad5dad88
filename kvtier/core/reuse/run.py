"""Runs: what one request touched last, as columns.

Theory
------
A run is a piece of one chain: contiguous blocks that the same request touched last, and whose
future is expected to be the same. It is named by its last block, from which parents lead back to
its first. The next request of the chain takes its front, or all of it, over into a run of its own.

The collector of cyclic garbage would walk objects; columns of numbers it does not.
"""

from array import array

from kvtier.core.residency import LOWER_TIERS

__all__ = ["NONE", "Runs"]

NONE = -1
"""No run, no bucket, no row."""

_NUMBERS = 1 << 24
"""More runs than blocks that are remembered there cannot be."""


class Runs:
    """One number a run, one column a fact; numbers are used again."""

    def __init__(self) -> None:
        self.ticket = array("q")
        """Names the run for ever: the later it was begun, the larger. 0: the number is free."""
        self.touched_ns = array("q")
        self.ghost_ns = array("q")
        """Since when no tier has a block of it; 0: one has."""
        self.first = array("i")
        """The place of its first block in the chain."""
        self.end = array("i")
        """The place behind its last block."""
        self.tail = array("i")
        """The row of its last block."""
        self.weight = array("d")
        """Of each of its blocks in the statistics."""
        self.group = array("i")
        self.bin = array("b")
        """Of its age, as it was last accounted for."""
        self.turn = array("i")
        """Of its chain, when it was touched: 0 for the first."""
        self.is_repeat = array("b")
        """Whether its blocks had been seen before."""
        self.size = array("q")
        """Of the slots its blocks take."""
        self.value = array("h")
        """Of a hit on its end, in half octaves."""
        self.plain_value = array("h")
        """The same where all tokens are worth the same."""
        self.count = tuple(array("i") for _ in LOWER_TIERS)
        """By tier, how many of its blocks are there."""
        self.last = tuple(array("i") for _ in LOWER_TIERS)
        """By tier, a row of it behind which none is there."""
        self.bucket = tuple(array("q") for _ in LOWER_TIERS)
        """By tier, the bucket of the tier's order it waits in; ``NONE``: in none."""
        self._columns: tuple[array[int] | array[float], ...] = (
            self.ticket, self.touched_ns, self.ghost_ns, self.first, self.end, self.tail,
            self.weight, self.group, self.bin, self.turn, self.is_repeat, self.size, self.value,
            self.plain_value, *self.count, *self.last, *self.bucket,
        )  # fmt: skip
        self._free: list[int] = []
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self.ticket) - len(self._free)

    def take(self, size: int) -> int:
        """Return a number for a new run."""
        self._num_taken += 1
        if self._free:
            run = self._free.pop()
        else:
            run = len(self.ticket)
            for column in self._columns:
                column.append(0)
        for column in self.count:
            column[run] = 0
        for column in (*self.last, *self.bucket):
            column[run] = NONE
        self.ticket[run] = self._num_taken * _NUMBERS + run
        self.ghost_ns[run] = 0
        self.size[run] = size
        return run

    def give(self, run: int) -> None:
        """Take a number back."""
        self.ticket[run] = 0
        for column in self.bucket:
            column[run] = NONE
        self._free.append(run)

    def of(self, ticket: int) -> int:
        """Return the number of the run that a ticket names, ``NONE`` if there is none any more."""
        run = ticket % _NUMBERS
        return run if self.ticket[run] == ticket else NONE

    def length(self, run: int) -> int:
        """Return how many blocks a run has."""
        return self.end[run] - self.first[run]
