"""Runs: what one request touched last, as columns.

Theory
------
A run is a piece of one chain: contiguous blocks that the same request touched last, and whose
future is expected to be the same. It is named by its last block, from which parents lead back to
its first. The next request of the chain takes its front, or all of it, over into a run of its own.

The collector of cyclic garbage would walk objects; columns of numbers it does not.
"""

from array import array
from collections import deque

from kvtier.core.limits import AGED_RUNS_MAX, GHOST_BLOCKS_MAX, GHOST_NS
from kvtier.core.residency import LOWER_TIERS
from kvtier.core.reuse.block import RememberedBlocks

__all__ = ["NONE", "Ghosts", "Runs"]

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


class Ghosts:
    """Forgets what has been nowhere for long, children before their parents."""

    def __init__(self, blocks: RememberedBlocks, runs: Runs) -> None:
        self._blocks = blocks
        self._runs = runs
        self._waiting: deque[int] = deque()
        """Tickets of runs that were wholly ghosts when they came in here, the oldest first."""
        self._forgotten: list[int] = []
        """Rows that leave when all is done: one by one costs twenty times as much."""

    def __len__(self) -> int:
        """Return how many blocks are remembered that no tier has."""
        return len(self._blocks) - len(self._forgotten) - self._blocks.num_resident

    @property
    def num_waiting(self) -> int:
        """Return how many tickets are kept, those that mean nothing any more included."""
        return len(self._waiting)

    def note(self, run: int, now_ns: int) -> None:
        """Note that no tier has a block of a run now."""
        self._runs.ghost_ns[run] = now_ns
        self._waiting.append(self._runs.ticket[run])

    def forget(self, now_ns: int) -> None:
        """Forget what has been a ghost for too long, or is too much; a bounded number of runs.

        A run that was somewhere meanwhile is in the queue twice, and has its turn later.
        """
        runs, num_left = self._runs, AGED_RUNS_MAX
        while self._waiting and num_left:
            run = runs.of(self._waiting[0])
            is_ghost = run != NONE and runs.ghost_ns[run] > 0
            is_young = is_ghost and runs.ghost_ns[run] > now_ns - GHOST_NS
            if is_young and len(self) <= GHOST_BLOCKS_MAX:
                break
            self._waiting.popleft()
            if is_ghost:
                num_left -= 1
                self.trim(run, now_ns)
        if len(self) > GHOST_BLOCKS_MAX and num_left:
            self._trim_all(now_ns)
        self._blocks.remove(self._forgotten)
        self._forgotten.clear()

    def trim(self, run: int, now_ns: int) -> None:
        """Forget the last blocks of a run that are nowhere and have no child, and so on upwards."""
        blocks, runs = self._blocks, self._runs
        while True:
            row = runs.tail[run]
            while runs.length(run) and not blocks.where[row] and not blocks.children[row]:
                parent = int(blocks.parent[row])
                self._forgotten.append(row)
                runs.end[run] -= 1
                row = parent
                if parent >= 0:
                    blocks.children[parent] -= 1
            runs.tail[run] = row
            if runs.length(run):
                return
            runs.give(run)
            if row < 0 or blocks.children[row]:
                return
            run = int(blocks.run[row])
            if not 0 < runs.ghost_ns[run] <= now_ns - GHOST_NS:
                return

    def _trim_all(self, now_ns: int) -> None:
        """Forget ghosts behind what is resident, of the oldest runs first, to have room for long.

        Rarely needed: such tails are forgotten with their age otherwise.
        """
        for ticket in sorted(filter(None, self._runs.ticket)):
            if len(self) <= GHOST_BLOCKS_MAX * 3 // 4:
                return
            if (run := self._runs.of(ticket)) != NONE:
                self.trim(run, now_ns)
