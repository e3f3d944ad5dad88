"""Records which chains were used when, and predicts their future use.

Theory
------
Every request *touches* its chain. For its remembered blocks, that is an event in the
statistics of the runs they were in, and all its blocks begin new runs of age 0. Blocks that no tier
holds stay as *ghosts*, so that learning depends on the traffic, not on the available room. The
group and age of a run determine the probability that its blocks are requested again, and so their
worth for eviction.

Rules
-----
* One writer. Another thread may call ``p_reuse``, ``fates`` and the ``scores`` of ``queues``: they
  read single entries, and at worst use values that have just changed.
* What is remembered is closed under parents: a block is forgotten after all its children.
* Each call does a bounded amount of work for the time that has passed; after a pause, the following
  calls catch up.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.fate import Fate
from kvtier.core.identity import BlockHash
from kvtier.core.limits import AGED_RUNS_MAX, GHOST_BLOCKS_MAX, GHOST_NS
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.reuse.block import FATES, NO_ROW, ORPHAN, BlockRows, RememberedBlocks, pieces
from kvtier.core.reuse.eviction_queue import COLUMN, EvictionQueues
from kvtier.core.reuse.hazard import AGE_EDGES_S, NUM_BINS, Group, Hazards
from kvtier.core.reuse.run import NONE, Ghosts, Runs
from kvtier.core.reuse.use import LENGTH_TOKENS, SavedSeconds, TenantHints, TouchResult, Use
from kvtier.core.slots import slot_bytes

__all__ = ["History", "TouchResult", "Use"]

_EDGES_NS: Sequence[int] = tuple(edge * 1_000_000_000 for edge in AGE_EDGES_S)

_AGING_NS = 100_000_000
"""The narrowest age bin is 20 times as wide; checking for each message would cost a tenth more."""

_SHARED_FORKS = 3
"""A block behind which this many chains diverged ends a shared prompt."""

_USES_STEPS = np.array([0, 0, 1, 2, 2, 3], np.uint8)
"""Class by number of uses: once, twice, up to four times, more often."""


class History:
    """Records which chains were used when; see the module."""

    def __init__(
        self,
        saved_s: SavedSeconds | None = None,
        by_tokens: Collection[TierName] = (),
    ) -> None:
        """Start with an empty history.

        Without ``saved_s``, and in the tiers ``by_tokens``, all tokens have equal value.
        """
        self._saved_s = saved_s
        self.blocks = RememberedBlocks()
        self.runs = Runs()
        """Public for the eviction queues and for checks."""
        self._hazards = Hazards()
        self._tenants = TenantHints()
        self._now_ns = 1
        self._due_ns = 0
        """When runs may have reached another age bin."""
        self._ages: list[deque[int]] = [deque() for _ in range(NUM_BINS - 1)]
        """By age bin that can be left, the tickets of its runs, oldest first."""
        self._ghosts = Ghosts(self.blocks, self.runs)
        self.queues = EvictionQueues(self.blocks, self.runs, self._hazards, by_tokens)
        """The order in which blocks leave each tier."""

    @property
    def num_remembered(self) -> int:
        """Return the number of remembered blocks."""
        return len(self.blocks)

    @property
    def num_resident(self) -> int:
        """Return the number of blocks in at least one tier."""
        return self.blocks.num_resident

    # Events

    def advance(self, now_ns: int) -> None:
        """Advance the time, which never goes back."""
        self._now_ns = max(now_ns, self._now_ns)
        if self._now_ns >= self._due_ns or len(self._ghosts) > GHOST_BLOCKS_MAX:
            is_behind = self._age_runs(self._now_ns)
            self._due_ns = self._now_ns + (0 if is_behind else _AGING_NS)
            self._ghosts.forget(self._now_ns)

    def _age_runs(self, now_ns: int) -> bool:
        """Move runs into the age bins they have reached; returns whether more may be due."""
        runs, num_left = self.runs, AGED_RUNS_MAX
        for age, queue in enumerate(self._ages):
            youngest_ns = now_ns - _EDGES_NS[age + 1]
            while queue and num_left:
                run = runs.find(queue[0])
                if run != NONE and runs.touched_ns[run] > youngest_ns:
                    break
                ticket = queue.popleft()
                if run != NONE:
                    num_left -= 1
                    self._age(run, age + 1)
                    if age + 2 < NUM_BINS:
                        self._ages[age + 1].append(ticket)
                    if runs.touched_ns[run] < now_ns - GHOST_NS:
                        self._ghosts.trim(run, now_ns)
        return not num_left

    def touch(self, use: Use, now_ns: int, num_stored: int = 0) -> TouchResult:
        """Note one use of a chain, all of whose blocks are remembered from now on.

        The first ``num_stored`` blocks are known to have been stored before, though they may not be
        remembered, for example after a restart.
        """
        self.advance(now_ns)
        self._hazards.advance()
        self._tenants.note(use)
        blocks = self.blocks
        rows, num_known = self._rows_of(use)
        if not len(rows):
            return TouchResult(0, 0, 0)
        num_old = max(num_known, min(num_stored, len(rows)))
        last = int(rows[num_known - 1]) if num_known else NO_ROW
        times_seen = int(blocks.uses[last]) if num_known else int(num_old > 0)
        is_fork = 0 < num_known < len(rows) and blocks.forks[last] >= _SHARED_FORKS
        turn = 0
        if num_old and not is_fork:
            turn = 1 + (self.runs.turn[blocks.run[last]] if num_known else 0)
        self._take_over(rows[:num_known])
        if 0 < num_known < len(rows):
            blocks.forks[last] = min(int(blocks.forks[last]) + 1, 255)
        blocks.uses[rows[:num_known]] += blocks.uses[rows[:num_known]] < 255
        blocks.uses[rows[num_known:]] += 1
        blocks.uses[rows[num_known:num_old]] = 2
        self._begin_runs(use, rows, num_old, turn, num_known if is_fork else 0)
        return TouchResult(num_known, turn, times_seen)

    def extend(self, use: Use, now_ns: int) -> int:
        """Remember the unknown blocks of a chain; known ones do not count as used.

        Returns how many were known.
        """
        self.advance(now_ns)
        blocks, hazards = self.blocks, self._hazards
        rows, num_known = self._rows_of(use)
        if num_known == len(rows):
            return num_known
        np.maximum.at(blocks.uses, rows[num_known:], 1)
        turn, length, tenant = 0, use.length(len(rows)), self._tenants.alone(use)
        if num_known:
            before = int(blocks.run[rows[num_known - 1]])
            turn = self.runs.turn[before]
            length = hazards.groups[self.runs.group[before]].length
        num_prompt = len(rows) if use.num_prompt_blocks < 0 else use.num_prompt_blocks
        middle = min(max(num_known, num_prompt), len(rows))
        for first, end in ((num_known, middle), (middle, len(rows))):
            if first < end:
                is_generated = first >= num_prompt
                group = Group(min(turn, 2), length, 0, False, is_generated, use.hint, tenant)
                self._begin_run(use, rows[first:end], hazards.number(group), turn)
        return num_known

    def needs_adoption(self, keys: Sequence[BlockHash]) -> npt.NDArray[np.bool_]:
        """Return which blocks have to be adopted: unknown ones and orphans."""
        rows = self.blocks.find(keys)
        is_linked: npt.NDArray[np.bool_] = (rows != NO_ROW) & (self.blocks.parent[rows] != ORPHAN)
        return ~is_linked

    def adopt(
        self,
        keys: Sequence[BlockHash],
        parents: Sequence[BlockHash],
        places: npt.NDArray[np.integer[Any]],
        payload_bytes: int,
    ) -> None:
        """Remember distinct blocks that were not requested yet, as used once.

        ``parents`` is ignored for a block at place 0 of its chain. Each block becomes a run of its
        own, because it is not known which of them were used together.
        """
        blocks = self.blocks
        use = Use(keys, payload_bytes, LENGTH_TOKENS)
        group = self._hazards.number(Group(0, 1, 0, is_shared=False))
        fresh = blocks.adopt(keys, parents, places.astype(np.int32))
        blocks.uses[fresh] = 1
        for place in range(len(fresh)):
            self._begin_run(use, fresh[place : place + 1], group, 0)

    def enter(
        self, tier: TierName, keys: Sequence[BlockHash], numbers: Sequence[int] | None = None
    ) -> None:
        """Note that a tier now holds these remembered blocks.

        ``numbers`` are their rows in the index.
        """
        blocks, runs, column = self.blocks, self.runs, COLUMN[tier]
        rows = blocks.find(keys)
        assert (rows != NO_ROW).all(), "a block must be adopted before it enters a tier"
        if numbers is not None:
            blocks.index_row[rows] = numbers
        if len(set(keys)) < len(keys):
            rows = np.unique(rows)
        rows = rows[blocks.tiers[rows] & (1 << column) == 0]
        self.blocks.num_resident += int((blocks.tiers[rows] == 0).sum())
        blocks.tiers[rows] |= 1 << column
        parents = blocks.parent[rows]
        np.add.at(blocks.tier_children[:, column], parents[parents >= 0], 1)
        for run, first, end in pieces(blocks.run[rows]):
            deepest = int(rows[first + blocks.position[rows[first:end]].argmax()])
            last = runs.last[column][run]
            if last == NONE or blocks.position[deepest] > blocks.position[last]:
                runs.last[column][run] = deepest
            runs.count[column][run] += end - first
            runs.ghost_ns[run] = 0
            self.queues.queue(column, runs.size[run]).put(run)
            self._rank_above(run, column)

    def leave(self, tier: TierName, keys: Sequence[BlockHash], fate: Fate) -> None:
        """Note that a tier no longer holds these blocks, and why."""
        blocks, column = self.blocks, COLUMN[tier]
        rows = blocks.find(keys) if len(keys) > 1 else np.array([blocks.row(k) for k in keys], int)
        rows = rows[rows != NO_ROW]
        blocks.fate[rows] = FATES.index(fate)
        rows = rows[blocks.tiers[rows] & (1 << column) != 0]
        if len(rows) > 1 and len(set(rows.tolist())) < len(rows):
            rows = np.array(list(dict.fromkeys(rows.tolist())))
        self._leave(rows, column)

    def note_fate(self, keys: Sequence[BlockHash], fate: Fate) -> None:
        """Note why remembered blocks are not available."""
        rows = self.blocks.find(keys)
        self.blocks.fate[rows[rows != NO_ROW]] = FATES.index(fate)

    # Queries

    def fates(self, keys: Sequence[BlockHash]) -> list[Fate]:
        """Return why each block is not available, as last noted."""
        rows = self.blocks.find(keys)
        numbers = self.blocks.fate[rows].tolist()
        return [
            Fate.NEVER_STORED if row == NO_ROW else FATES[number]
            for row, number in zip(rows.tolist(), numbers, strict=True)
        ]

    def times_seen(self, key: BlockHash) -> int:
        """Return how many requests there were for a block, as far as is remembered."""
        row = self.blocks.row(key)
        return 0 if row == NO_ROW else int(self.blocks.uses[row])

    def uses_and_children(self, tier: TierName, key: BlockHash) -> tuple[int, int]:
        """Return how often a block was requested, and how many of its children are in a tier."""
        row = self.blocks.row(key)
        if row == NO_ROW:
            return 0, 0
        return int(self.blocks.uses[row]), int(self.blocks.tier_children[row, COLUMN[tier]])

    def p_reuse(self, keys: Sequence[BlockHash], within_s: float = 1800.0) -> list[float]:
        """Return the probability that each block is requested within a time; 0.0 if unknown."""
        blocks, runs, hazards, now_ns = self.blocks, self.runs, self._hazards, self._now_ns
        known: dict[int, float] = {}
        chances = []
        for row in blocks.find(keys).tolist():
            run = int(blocks.run[row]) if row != NO_ROW else NONE
            if run != NONE and run not in known:
                age_s = (now_ns - runs.touched_ns[run]) / 1e9
                known[run] = hazards.p_reuse(runs.group[run], age_s, within_s)
            chances.append(known.get(run, 0.0))
        return chances

    def document(self) -> Mapping[str, Any]:
        """Return the learned state of traffic classes, without blocks and tenants."""
        return self._hazards.document()

    def recall(self, document: Mapping[str, Any]) -> str:
        """Restore an earlier run's learned state, all or nothing; returns the problem or ``""``."""
        try:
            self._hazards.recall(document)
        except ValueError as fault:
            return str(fault)
        return ""

    # Runs

    def _rows_of(self, use: Use) -> tuple[BlockRows, int]:
        """Return the rows of a chain, adding missing ones, and how many were known."""
        rows, num_known, adopted = self.blocks.chain(use.keys)
        for row in adopted:
            self.runs.free(int(self.blocks.run[row]))
        return rows, num_known

    def _take_over(self, rows: BlockRows) -> None:
        """Take the front of a chain, which was requested again, out of its runs."""
        blocks, runs = self.blocks, self.runs
        for run, first, end in pieces(blocks.run[rows]):
            weight = runs.weight[run] * (end - first)
            self._hazards.note_event(runs.group[run], runs.bin[run], weight)
            if end - first == runs.length(run):
                runs.free(run)
                continue
            runs.first[run] += end - first
            where = blocks.tiers[rows[first:end]]
            for column, count in enumerate(runs.count):
                if count[run]:
                    count[run] -= int(np.count_nonzero(where & (1 << column)))
                    if not count[run]:
                        self._end_in(run, column)

    def _begin_runs(
        self, use: Use, rows: BlockRows, num_old: int, turn: int, num_shared: int
    ) -> None:
        """Begin the runs of a use: one for each piece of the chain with equal properties."""
        uses = _USES_STEPS[np.minimum(self.blocks.uses[rows], 5)]
        sorts = uses * 2
        sorts[:num_shared] += 1
        length, hint = use.length(len(rows) - num_old), use.hint
        tenant = self._tenants.alone(use)
        for sort, first, end in pieces(sorts):
            group = Group(min(turn, 2), length, sort // 2, bool(sort & 1), False, hint, tenant)
            self._begin_run(use, rows[first:end], self._hazards.number(group), turn)

    def _begin_run(self, use: Use, rows: BlockRows, group: int, turn: int) -> None:
        blocks, runs = self.blocks, self.runs
        run = runs.allocate(slot_bytes(use.payload_bytes))
        blocks.run[rows] = run
        runs.tail[run] = rows[-1]
        runs.first[run] = blocks.position[rows[0]]
        runs.end[run] = runs.first[run] + len(rows)
        runs.touched_ns[run] = self._now_ns
        runs.weight[run] = len(rows) ** -0.5
        runs.group[run], runs.turn[run], runs.bin[run] = group, turn, 0
        runs.is_repeat[run] = int(blocks.uses[rows[-1]] > 1)
        runs.plain_value[run] = use.hit_value(1, self._saved_s)
        runs.value[run] = use.hit_value(runs.end[run], self._saved_s)
        self._ages[0].append(runs.ticket[run])
        self._hazards.expose(group, 0, runs.weight[run] * len(rows))
        where = blocks.tiers[rows]
        if not where.any():
            self._ghosts.note(run, self._now_ns)
            return
        for column in range(len(LOWER_TIERS)):
            here = np.flatnonzero(where & (1 << column))
            if len(here):
                runs.count[column][run] = len(here)
                runs.last[column][run] = rows[here[-1]]
        for column, count in enumerate(runs.count):
            if count[run]:
                self.queues.queue(column, runs.size[run]).put(run)

    def _age(self, run: int, age_bin: int) -> None:
        runs = self.runs
        runs.bin[run] = age_bin
        self._hazards.expose(runs.group[run], age_bin, runs.weight[run] * runs.length(run))
        for column, bucket in enumerate(runs.bucket):
            if bucket[run] != NONE:
                self.queues.queue(column, runs.size[run]).put(run)

    def _leave(self, rows: BlockRows, column: int) -> None:
        blocks, runs = self.blocks, self.runs
        blocks.tiers[rows] &= ~np.uint8(1 << column)
        blocks.num_resident -= int((blocks.tiers[rows] == 0).sum())
        parents = blocks.parent[rows]
        parents = parents[parents >= 0]
        np.subtract.at(blocks.tier_children[:, column], parents, 1)
        # Sort, to handle each run once: between two pieces of it, its count would include blocks
        # that left.
        for run, first, end in pieces(np.sort(blocks.run[rows])):
            runs.count[column][run] -= end - first
            if not runs.count[column][run]:
                self._end_in(run, column)
                continue
            row = runs.last[column][run]
            while not blocks.tiers[row] & (1 << column):
                row = int(blocks.parent[row])
            runs.last[column][run] = row
        childless = parents[blocks.tier_children[parents, column] == 0]
        for above in set(blocks.run[childless].tolist()):
            if runs.count[column][above]:
                self.queues.queue(column, runs.size[above]).put(above)  # it may have been blocked

    def _rank_above(self, run: int, column: int) -> None:
        """Update a run's place in faster tiers: it may depend on whether slower tiers hold it."""
        for above in range(column):
            if self.runs.bucket[above][run] != NONE:
                self.queues.queue(above, self.runs.size[run]).put(run)

    def _end_in(self, run: int, column: int) -> None:
        """Note that the last block of a run has left a tier."""
        self.runs.last[column][run] = self.runs.bucket[column][run] = NONE
        self._rank_above(run, column)
        if not any(count[run] for count in self.runs.count):
            self._ghosts.note(run, self._now_ns)
