"""The theorem, by seeds: whatever happens, a block that is served is the one that was asked for."""

import numpy as np
import pytest

from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import SlabAllocator
from kvtier.node.cache import Cache
from kvtier.node.load import Loads
from kvtier.node.node import Node
from kvtier.node.store import Stores
from kvtier.node.transfer import Transfers
from kvtier.sim.simulation import Simulation

EVENTS = 400


def run(seed: int, num_events: int = EVENTS):
    """One seed, which pytest names when it fails: python -m kvtier.sim --first SEED --seeds 1."""
    return Simulation(seed).run(num_events)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_seed(seed):
    assert run(seed).num_events >= EVENTS


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_200, 20))
def test_many_seeds(first):
    for seed in range(first, first + 20):
        run(seed, 800)


@pytest.mark.slow
def test_a_seed_repeats_exactly():
    assert run(3) == run(3)


@pytest.mark.slow
def test_runs_get_somewhere():
    """Blocks come from every tier, loads end in every way, and nodes crash."""
    reports = [run(seed) for seed in range(100, 116)]
    served = {tier for report in reports for tier in report.tally.served}
    assert served == {TierName.CPU, TierName.SSD, TierName.REMOTE}
    ends = {end for report in reports for end in report.tally.ends}
    assert ends >= {"complete", "absent", "failed", "late", "no_room", "corrupt"}
    assert sum(report.num_crashes for report in reports) >= 3


# What would be the worth of a simulation that finds nothing? Each of these bugs was put in on
# purpose, and must be found within a few seeds.


def evict_pinned_blocks(patch):
    def evict(self, row):
        self.index.pins[row] = 0
        self._vacate(row)

    def is_evictable(index, row, stamp):
        return index.stamp[row] == stamp and index.cell(row, TierName.CPU) == Residency.READY

    patch.setattr(Cache, "evict", evict)
    patch.setattr("kvtier.core.eviction.leaf_lru.LeafLru._is_evictable", staticmethod(is_evictable))


def free_slots_of_reads_that_are_given_up(patch):
    cut = Loads._cut

    def cut_and_abandon(self, lease, length):
        rows = lease.rows[length:]
        cut(self, lease, length)
        for row in rows:
            if self._is_claimed(row) and row not in self._waiting:
                self._cache.abandon(row)

    patch.setattr(
        Loads,
        "_is_claimed",
        lambda self, row: self._cache.state(row, TierName.CPU) == Residency.WRITING,
        raising=False,
    )
    patch.setattr(Loads, "_cut", cut_and_abandon)


def forget_to_unpin_writes(patch):
    patch.setattr(
        Transfers,
        "_unqueue",
        lambda self, lane, row: setattr(lane, "queued_bytes", lane.queued_bytes - self._size(row)),
    )


def hand_out_a_slot_twice(patch):
    take = SlabAllocator.take

    def take_twice(self, size):
        offset = take(self, size)
        if offset is not None and offset % 5 == 0:
            self._slabs[offset // self.slab_bytes].free[offset] = None
        return offset

    patch.setattr(SlabAllocator, "take", take_twice)


def answer_a_call_twice(patch):
    release = Node._release
    patch.setattr(Node, "_release", lambda *args: 2 * release(*args))


def ignore_deadlines(patch):
    patch.setattr(Loads, "expire", lambda self, sessions, now_ns: [])


def leave_children_without_parents(patch):
    def touch(self, index, rows):
        mark = self._clock
        self._clock += len(rows) + 1
        index.stamp[rows] = np.arange(mark + 1, self._clock)
        return mark

    patch.setattr("kvtier.core.eviction.leaf_lru.LeafLru.touch", touch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        evict_pinned_blocks,
        free_slots_of_reads_that_are_given_up,
        forget_to_unpin_writes,
        hand_out_a_slot_twice,
        answer_a_call_twice,
        ignore_deadlines,
        leave_children_without_parents,
    ],
)
def test_a_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(20)


def run_seeds(num_seeds):
    for seed in range(num_seeds):
        run(seed)


# A node that lies about the bytes, on the other hand, is seen through by the engines: whatever it
# says, they accept no wrong block.


def publish_what_was_not_copied(patch):
    complete = Stores.complete

    def complete_all(self, session, event, now_ns):
        lease = session.stores.get(event.lease)
        if lease is not None and event.checksums:
            missing = len(lease.rows) - len(event.checksums)
            checksums = event.checksums + event.checksums[-1:] * missing
            event = event.__class__(event.call, event.session, event.lease, checksums)
        return complete(self, session, event, now_ns)

    patch.setattr(Stores, "complete", complete_all)


def believe_a_tier_that_missed(patch):
    def publish_anyway(self, row, now_ns):
        self._cache.publish(row, b"\1" * 16)
        return self.block_ready(row)

    patch.setattr(Loads, "block_missed", publish_anyway)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [publish_what_was_not_copied, believe_a_tier_that_missed])
def test_a_node_that_lies_is_seen_through(plant, monkeypatch):
    plant(monkeypatch)
    # What is in the arena is wrong, then; what matters is that nobody takes it.
    monkeypatch.setattr(Simulation, "_check_arena", lambda self: None)
    run_seeds(4)
