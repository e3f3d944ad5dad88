"""Runs of blocks that one request touched last, and the ghosts among them.

Theory
------
A run is a piece of one chain: contiguous blocks that the same request touched last, and whose
future is expected to be the same. It is identified by its last block, from which parents lead back
to its first. The next request of the chain takes its front, or all of it, into a new run.

Runs are columns of numbers, because the garbage collector would traverse objects.

Ghosts are blocks that no tier holds. They are remembered for a limited time, in a bounded number.
"""

from array import array
from collections import deque

from kvtier.core.limits import AGED_RUNS_MAX, GHOST_BLOCKS_MAX, GHOST_NS
from kvtier.core.residency import LOWER_TIERS
from kvtier.core.reuse.block import RememberedBlocks

__all__ = ["NONE", "Ghosts", "Runs"]

NONE = -1
"""No run, bucket or row."""

_NUMBERS = 1 << 24
"""More than the number of remembered blocks, and therefore of runs."""


class Runs:
    """The attributes of runs, one column each, indexed by run number; numbers are reused."""

    def __init__(self) -> None:
        self.ticket = array("q")
        """Unique name of the run, increasing with time; 0 if the number is free."""
        self.touched_ns = array("q")
        self.ghost_ns = array("q")
        """Time since which no tier has held a block of the run; 0 if one does."""
        self.first = array("i")
        """Position of its first block in the chain."""
        self.end = array("i")
        """Position after its last block."""
        self.tail = array("i")
        """Row of its last block."""
        self.weight = array("d")
        """Weight of each of its blocks in the statistics."""
        self.group = array("i")
        self.bin = array("b")
        """Age bin that was last accounted for."""
        self.turn = array("i")
        """Turn of its chain when it was touched; 0 for the first."""
        self.is_repeat = array("b")
        """Whether its blocks had been seen before."""
        self.size = array("q")
        """Slot size of its blocks."""
        self.value = array("h")
        """Value of a hit on its end, in half octaves."""
        self.plain_value = array("h")
        """The same if all tokens have equal value."""
        self.count = tuple(array("i") for _ in LOWER_TIERS)
        """By tier, the number of its blocks there."""
        self.last = tuple(array("i") for _ in LOWER_TIERS)
        """By tier, the row of its last block there."""
        self.bucket = tuple(array("q") for _ in LOWER_TIERS)
        """By tier, its bucket in the tier's eviction queue, or ``NONE``."""
        self._columns: tuple[array[int] | array[float], ...] = (
            self.ticket, self.touched_ns, self.ghost_ns, self.first, self.end, self.tail,
            self.weight, self.group, self.bin, self.turn, self.is_repeat, self.size, self.value,
            self.plain_value, *self.count, *self.last, *self.bucket,
        )  # fmt: skip
        self._free: list[int] = []
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self.ticket) - len(self._free)

    def allocate(self, size: int) -> int:
        """Return a free number for a new run."""
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

    def free(self, run: int) -> None:
        """Free a number."""
        self.ticket[run] = 0
        for column in self.bucket:
            column[run] = NONE
        self._free.append(run)

    def find(self, ticket: int) -> int:
        """Return the number of the run with this ticket, ``NONE`` if it is gone."""
        run = ticket % _NUMBERS
        return run if self.ticket[run] == ticket else NONE

    def length(self, run: int) -> int:
        """Return how many blocks a run has."""
        return self.end[run] - self.first[run]


class Ghosts:
    """Forgets blocks that no tier has held for long, children before their parents."""

    def __init__(self, blocks: RememberedBlocks, runs: Runs) -> None:
        self._blocks = blocks
        self._runs = runs
        self._waiting: deque[int] = deque()
        """Tickets of runs that were entirely ghosts when added, oldest first."""
        self._forgotten: list[int] = []
        """Rows to remove at the end: one by one takes twenty times as long."""

    def __len__(self) -> int:
        """Return the number of remembered blocks that no tier holds."""
        return len(self._blocks) - len(self._forgotten) - self._blocks.num_resident

    @property
    def num_waiting(self) -> int:
        """Return the number of tickets, including stale ones."""
        return len(self._waiting)

    def note(self, run: int, now_ns: int) -> None:
        """Note that no tier holds a block of a run any more."""
        self._runs.ghost_ns[run] = now_ns
        self._waiting.append(self._runs.ticket[run])

    def forget(self, now_ns: int) -> None:
        """Forget ghosts that are too old or too many, a bounded number of runs per call.

        A run that was resident in between is queued twice, and is examined later.
        """
        runs, num_left = self._runs, AGED_RUNS_MAX
        while self._waiting and num_left:
            run = runs.find(self._waiting[0])
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
        """Forget the last blocks of a run that are ghosts without children, and so on upwards."""
        blocks, runs = self._blocks, self._runs
        while True:
            row = runs.tail[run]
            while runs.length(run) and not blocks.tiers[row] and not blocks.children[row]:
                parent = int(blocks.parent[row])
                self._forgotten.append(row)
                runs.end[run] -= 1
                row = parent
                if parent >= 0:
                    blocks.children[parent] -= 1
            runs.tail[run] = row
            if runs.length(run):
                return
            runs.free(run)
            if row < 0 or blocks.children[row]:
                return
            run = int(blocks.run[row])
            if not 0 < runs.ghost_ns[run] <= now_ns - GHOST_NS:
                return

    def _trim_all(self, now_ns: int) -> None:
        """Forget ghosts behind resident blocks, those of the oldest runs first, down to 3/4.

        Rarely needed: such tails are usually forgotten by age.
        """
        for ticket in sorted(filter(None, self._runs.ticket)):
            if len(self) <= GHOST_BLOCKS_MAX * 3 // 4:
                return
            if (run := self._runs.find(ticket)) != NONE:
                self.trim(run, now_ns)
