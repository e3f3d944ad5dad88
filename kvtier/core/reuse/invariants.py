"""Checks a history's invariants, which hold between any two calls.

Changes nothing, and raises AssertionError for the first violation. It examines every block, so it
is meant for tests and idle times.
"""

from collections import Counter
from collections.abc import Iterator

from kvtier.core.identity import BlockHash
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.reuse.block import NO_ROW
from kvtier.core.reuse.history import History
from kvtier.core.reuse.run import NONE

__all__ = ["check_history", "residents"]


def check_history(history: History) -> None:
    """Raise AssertionError if the parts of a history are inconsistent."""
    rows = dict(history.blocks.items())
    assert history.blocks.find(list(rows)).tolist() == list(rows.values())
    _check_blocks(history, list(rows.values()))
    runs = {int(history.blocks.run[row]) for row in rows.values()}
    for run in runs:
        _check_run(history, run)
    assert len(runs) == len(history.runs), "a run has no block"
    assert sum(history.runs.length(run) for run in runs) == len(rows), "a block is in two runs"


def residents(history: History, tier: TierName) -> set[BlockHash]:
    """Return the blocks that are in a tier according to a history."""
    bit = 1 << LOWER_TIERS.index(tier)
    return {key for key, row in history.blocks.items() if history.blocks.tiers[row] & bit}


def _check_blocks(history: History, rows: list[int]) -> None:
    """Check the counts of children, and that no block outlives its parent."""
    blocks, known = history.blocks, set(rows)
    children, kids = Counter[int](), Counter[tuple[int, int]]()
    for row in rows:
        parent = int(blocks.parent[row])
        if parent >= 0:
            assert parent in known, "a block was forgotten before its child"
            assert blocks.position[row] == blocks.position[parent] + 1
            children[parent] += 1
            kids.update((parent, tier) for tier in _tiers_of(history, row))
    for row in rows:
        assert blocks.children[row] == children[row], "wrong number of children"
        for tier in range(len(LOWER_TIERS)):
            assert blocks.tier_children[row, tier] == kids[row, tier], (
                "wrong number of children in a tier"
            )
    num_resident = sum(bool(blocks.tiers[row]) for row in rows)
    assert history.num_resident == num_resident, "wrong number of residents"


def _check_run(history: History, run: int) -> None:
    """Check contiguous blocks, counts by tier, and places in the eviction queues."""
    blocks, runs = history.blocks, history.runs
    rows = list(_rows_of(history, run))
    assert len(rows) == runs.length(run) > 0
    assert all(blocks.run[row] == run for row in rows), "a run lacks a block"
    by_tier = Counter(tier for row in rows for tier in _tiers_of(history, row))
    assert bool(by_tier) == (runs.ghost_ns[run] == 0), "ghost_ns contradicts the tiers"
    for tier in range(len(LOWER_TIERS)):
        assert runs.count[tier][run] == by_tier[tier], "wrong number of blocks in a tier"
        there = (row for row in rows if tier in _tiers_of(history, row))
        assert runs.last[tier][run] == next(there, NONE), "not the last block of a run in a tier"
        if by_tier[tier]:
            is_blocked = blocks.tier_children[runs.last[tier][run], tier] > 0
            is_waiting = history.queues.queue(tier, runs.size[run]).is_waiting(run)
            assert is_waiting or is_blocked, "an evictable run is in no bucket"
        else:
            assert runs.bucket[tier][run] == NONE, (
                "a run is in the queue of a tier without its blocks"
            )


def _rows_of(history: History, run: int) -> Iterator[int]:
    """Yield the rows of a run, starting at its tail."""
    row = history.runs.tail[run]
    for _ in range(history.runs.length(run)):
        assert row != NO_ROW
        yield row
        row = int(history.blocks.parent[row])


def _tiers_of(history: History, row: int) -> list[int]:
    where = int(history.blocks.tiers[row])
    return [tier for tier in range(len(LOWER_TIERS)) if where & 1 << tier]
