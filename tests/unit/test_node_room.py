"""Dialogues: nobody takes the whole arena, whatever hangs, and blocks of several sizes share it."""

import doctest
import random
from itertools import count

import pytest
from dialogue import CPU, MS, REMOTE, SSD, empty_cpu, engine_on, metric, open_harness

from kvtier.core import slots
from kvtier.core.limits import SIZE_KEPT_NS
from kvtier.core.slots import donors
from kvtier.node.invariants import check
from kvtier.node.messages import actions as ac
from kvtier.testing.node_harness import HarnessSettings, NodeHarness

PAGE = 4096
PAGES = {"small": 1, "medium": 37, "huge": 64}


def on_ssd(harness, engine, numbers):
    """Store a prompt a block at a time, and let it leave the CPU tier."""
    blocks = engine.chain(numbers)
    for length in range(1, len(blocks) + 1):
        engine.store(blocks[:length])
        harness.settle()
    empty_cpu(harness)
    return blocks


# Room for loads


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [4, 8, 33])
def test_a_load_succeeds_while_everything_else_is_stuck(num_slots):
    """Hung writes in both lower tiers, and engines that never complete their stores."""
    harness = open_harness(SSD, REMOTE, slots=num_slots)
    engines = [engine_on(harness, f"engine {number}") for number in range(6)]
    wanted = on_ssd(harness, engines[0], range(2))
    for number in range(2 * num_slots):  # never settled: no write ends
        engines[0].store(engines[0].chain([100 + number]))
    for number, engine in enumerate(engines):
        for first in range(3):
            engine.prepare(engine.chain(range(1000 * number + 100 * first, 1000 * number + 5000)))
    assert engines[0].prepare(engines[0].chain([7777])).lease == 0
    slots = harness.node.cache.slots
    assert slots.held_bytes <= slots.reserved_bytes * 7 // 8
    load = engines[1].load(wanted[:1])
    reads = [work for work in harness.waiting if isinstance(work, ac.Read)]
    harness.carry_out(reads[0])
    assert load.take() == [SSD]
    load.release()


def test_one_engine_cannot_lease_what_others_need():
    harness = open_harness(SSD, slots=24)
    greedy, other = engine_on(harness, "greedy"), engine_on(harness, "other")
    blocks, more = on_ssd(harness, greedy, range(24)), on_ssd(harness, other, range(100, 124))
    loads = [greedy.load(blocks), greedy.load(blocks[:20], 5)]
    harness.settle()
    loads[0].take()
    assert len(loads[0].accepted) == 16  # two thirds of it
    assert loads[0].end == "no_room"
    assert harness.node.cache.slots.held_bytes == 16 * PAGE
    late = other.load(more)
    harness.settle()
    late.take()
    assert len(late.accepted) == 5
    assert late.end == "no_room"
    for load in (*loads, late):
        load.release()
    harness.check_idle()


def test_a_block_that_many_requests_share_counts_once():
    harness = open_harness(slots=16)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    loads = [engine.load(blocks) for _ in range(50)]
    assert all(load.take() == [CPU] * 4 for load in loads)
    assert harness.node.cache.slots.held_bytes == 4 * PAGE


def test_each_engine_that_hangs_leaves_a_third_to_the_next():
    harness = open_harness(SSD, slots=720)
    granted = []
    for number in range(4):
        engine = engine_on(harness, f"engine {number}")
        blocks = engine.chain(range(1000 * number, 1000 * number + 300))
        granted.append(len(engine.prepare(blocks).indexes))
    assert granted == [180, 60, 20, 6]


def test_a_read_that_nobody_waits_for_any_more_is_not_begun():
    """Else an engine that asks and gives up could fill the arena with blocks on their way."""
    harness = open_harness(SSD, slots=64, workers=1)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = on_ssd(harness, engine, range(20))
    load, waiting = engine.load(blocks), other.load(blocks[:10])
    (read,) = harness.waiting
    load.release()
    assert harness.node.cache.slots.held_bytes == 10 * PAGE
    harness.settle()
    assert len(waiting.take()) == 10
    again = engine.load(blocks)
    harness.settle()
    assert len(again.take()) == 20
    for each in (waiting, again):
        each.release()
    harness.check_idle()
    assert read.blocks


# Block sizes


def sharing(num_slabs, slab_pages=64):
    harness = NodeHarness({}, HarnessSettings(num_slabs=num_slabs, slab_bytes=slab_pages * PAGE))
    harness.is_checked = False
    engines = {
        name: engine_on(harness, name, payload_bytes=pages * PAGE) for name, pages in PAGES.items()
    }
    return harness, engines


def num_here(harness, engine):
    size = engine.layout.block_bytes
    return len(harness.node.cache.slots.owners_of(size))


def test_donors_are_explained():
    assert doctest.testmod(slots) == (0, 3)


def test_a_size_below_its_share_takes_and_one_above_gives():
    assert donors(9, {1: 8, 2: 2}, {1, 2}, 10) == [1, 2]
    assert donors(2, {1: 8, 2: 2}, {1, 2}, 10) == [1, 2]
    assert donors(1, {1: 8, 2: 2}, {1, 2}, 10) == [1, 2]
    assert donors(2, {1: 5, 2: 5}, {1, 2}, 10) == [2, 1]
    assert donors(2, {1: 5, 2: 4, 3: 1}, {2, 3}, 10) == [1, 2, 3]
    assert donors(7, {1: 1, 2: 1}, {1, 2}, 2) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_slow_size_gets_its_share_under_constant_pressure(seed):
    draw = random.Random(seed)
    num_slabs = 12
    harness, engines = sharing(num_slabs)
    names = ["small"] * 40 + ["medium"] + ["huge"] * draw.choice([0, 1])
    numbers = count()
    for _ in range(2500):
        engine = engines[draw.choice(names)]
        granted = engine.prepare(engine.chain([next(numbers)]))
        assert granted.reason == "", f"{engine.name}: {granted.reason}"  # all of it could go
        engine.complete(granted, [bytes([1]) * 16])
    slots = harness.node.cache.slots
    fair = num_slabs // len(set(names))
    sizes = {name: PAGES[name] * PAGE for name in set(names)}
    assert all(slots.num_slabs_of(size) >= fair for size in sizes.values()), sizes
    check(harness.node)


def test_what_a_size_does_not_need_others_have():
    harness, engines = sharing(8)
    small, medium = engines["small"], engines["medium"]
    medium.store(medium.chain([1]))
    for number in range(600):
        small.store(small.chain([number]))
    assert num_here(harness, small) == 7 * 64
    assert num_here(harness, medium) == 1  # below its share, and left alone


def test_a_size_that_is_used_no_more_has_no_share():
    harness, engines = sharing(4)
    small, medium = engines["small"], engines["medium"]
    for number in range(4):
        medium.store(medium.chain([number]))
    harness.advance(SIZE_KEPT_NS)
    for number in range(256):
        small.store(small.chain([number]))
    assert num_here(harness, small) == 4 * 64
    assert num_here(harness, medium) == 0


def test_leases_of_one_size_do_not_keep_the_other_out_for_ever():
    """Each slab has a block that somebody always leases; the others come in all the same."""
    harness, engines = sharing(8)
    small, huge = engines["small"], engines["huge"]
    for number in range(512):
        small.store(small.chain([number]))
    loads = {number: small.load(small.chain([number])) for number in range(0, 512, 64)}
    blocks = huge.chain([1])
    refusals = 0
    while not huge.store(blocks).indexes:
        refusals += 1
        for number, load in list(loads.items()):  # the next request leases before the last ends
            again = small.load(small.chain([number]))
            load.release()
            loads[number] = again
        harness.advance(10 * MS)
    assert refusals == 1
    assert huge.found(blocks) == (CPU,)


def test_no_eviction_looks_at_the_whole_index(monkeypatch):
    """That takes milliseconds with a million rows, and an eviction is to take microseconds."""
    harness, engines = sharing(8)
    small, medium = engines["small"], engines["medium"]
    for number in range(7 * 64):
        small.store(small.chain([number]))
    monkeypatch.setattr(harness.node.cache.index, "rows", lambda: pytest.fail("it does"))
    for number in range(1000, 1100):
        small.store(small.chain([number]))
        medium.store(medium.chain([number]))
    evicted = {"tier": "cpu", "reason": "capacity"}
    assert metric(harness, "kvtier_evicted_blocks_total", **evicted) > 100
