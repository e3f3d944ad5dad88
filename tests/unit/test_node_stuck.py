"""Dialogues: a read that hangs costs its deadline once, however many ask for its blocks."""

from dialogue import CPU, MS, SSD, empty_cpu, engine_on, open_harness

from kvtier.core.residency import TierName
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.node_harness import NodeHarness
from kvtier.tiers.base import BlockWrite


def hung(harness: NodeHarness, engine: FakeEngine) -> list[BlockWrite]:
    """Have a prompt of three blocks whose read does not end, and is overdue."""
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    engine.load(blocks, within_ns=1)
    harness.advance(overdue_ns(harness))
    return blocks


def overdue_ns(harness: NodeHarness) -> int:
    return harness.node.transfers.lanes[TierName.SSD].tier.deadline_ns + 100 * MS


def test_who_waits_is_told_when_the_read_is_overdue() -> None:
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks, within_ns=100 * overdue_ns(harness))
    harness.advance(overdue_ns(harness))
    assert load.take() == []
    assert load.end == "late"
    load.release()
    (reading,) = harness.waiting
    harness.carry_out(reading)
    harness.check_idle()


def test_nobody_begins_to_wait_for_it() -> None:
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = hung(harness, engine)
    assert engine.found(blocks) == ()
    load = engine.load(blocks)
    assert load.take() == []
    assert load.end == "absent"
    other = engine.chain(range(50, 52))
    engine.store(other)
    assert engine.found(other) == (CPU,) * 2, "others are served"


def test_its_blocks_are_served_once_it_ends_after_all() -> None:
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = hung(harness, engine)
    (reading,) = harness.waiting
    harness.carry_out(reading)
    assert engine.found(blocks) == (CPU,) * 3
    load = engine.load(blocks)
    assert load.take() == [CPU] * 3
