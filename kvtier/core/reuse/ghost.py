"""Ghosts: blocks that no tier has, remembered for a time, in a bounded number."""

from collections import deque

from kvtier.core.limits import AGED_RUNS_MAX, GHOST_BLOCKS_MAX, GHOST_NS
from kvtier.core.reuse.block import RememberedBlocks
from kvtier.core.reuse.run import NONE, Runs

__all__ = ["Ghosts"]


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
