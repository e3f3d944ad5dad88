"""What is true of a history between any two calls, whatever happened before.

``check`` changes nothing and raises AssertionError with the first thing that is wrong. It looks at
every block, so it is for tests and for idle times.
"""

from collections import Counter
from collections.abc import Iterator

from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.reuse.block import NO_ROW
from kvtier.core.reuse.history import History
from kvtier.core.reuse.run import NONE

__all__ = ["check_history", "residents"]


def check_history(history: History) -> None:
    """Raise AssertionError if a history's parts contradict each other."""
    rows = dict(history.blocks.items())
    assert history.blocks.find(list(rows)).tolist() == list(rows.values())
    _check_blocks(history, list(rows.values()))
    runs = {int(history.blocks.run[row]) for row in rows.values()}
    for run in runs:
        _check_run(history, run)
    assert len(runs) == len(history.runs), "a run without a block"
    assert sum(history.runs.length(run) for run in runs) == len(rows), "a block of two runs"


def residents(history: History, tier: TierName) -> set[bytes]:
    """Return the blocks that a history believes to be in a tier."""
    bit = 1 << LOWER_TIERS.index(tier)
    return {key for key, row in history.blocks.items() if history.blocks.where[row] & bit}


def _check_blocks(history: History, rows: list[int]) -> None:
    """Require true counts of children, and no block without those before it."""
    blocks, known = history.blocks, set(rows)
    children, kids = Counter[int](), Counter[tuple[int, int]]()
    for row in rows:
        parent = int(blocks.parent[row])
        if parent >= 0:
            assert parent in known, "a block was forgotten before its child"
            assert blocks.place[row] == blocks.place[parent] + 1
            children[parent] += 1
            kids.update((parent, tier) for tier in _tiers_of(history, row))
    for row in rows:
        assert blocks.children[row] == children[row], "a wrong number of children"
        for tier in range(len(LOWER_TIERS)):
            assert blocks.kids[row, tier] == kids[row, tier], "children elsewhere than counted"
    num_resident = sum(bool(blocks.where[row]) for row in rows)
    assert history.num_resident == num_resident, "a wrong number of residents"


def _check_run(history: History, run: int) -> None:
    """Require contiguous blocks, true counts by tier, and a place in each tier's order."""
    blocks, runs = history.blocks, history.runs
    rows = list(_rows_of(history, run))
    assert len(rows) == runs.length(run) > 0
    assert all(blocks.run[row] == run for row in rows), "a run lacks a block"
    by_tier = Counter(tier for row in rows for tier in _tiers_of(history, row))
    assert bool(by_tier) == (runs.ghost_ns[run] == 0), "a ghost is somewhere, or the opposite"
    for tier in range(len(LOWER_TIERS)):
        assert runs.count[tier][run] == by_tier[tier], "a wrong number of blocks in a tier"
        there = (row for row in rows if tier in _tiers_of(history, row))
        assert runs.last[tier][run] == next(there, NONE), "not the last of a run in a tier"
        if by_tier[tier]:
            is_blocked = blocks.kids[runs.last[tier][run], tier] > 0
            is_waiting = history.orders.of(tier, runs.size[run]).is_waiting(run)
            assert is_waiting or is_blocked, "a run that could go is in no bucket"
        else:
            assert runs.bucket[tier][run] == NONE, "a run is in the order of a tier without it"


def _rows_of(history: History, run: int) -> Iterator[int]:
    """Yield the rows of a run from its tail on."""
    row = history.runs.tail[run]
    for _ in range(history.runs.length(run)):
        assert row != NO_ROW
        yield row
        row = int(history.blocks.parent[row])


def _tiers_of(history: History, row: int) -> list[int]:
    where = int(history.blocks.where[row])
    return [tier for tier in range(len(LOWER_TIERS)) if where & 1 << tier]
