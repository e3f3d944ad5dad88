"""What transfers teach the cost model: no failure looks fast, and what hangs is slow at once."""

import pytest
from dialogue import MS, SSD, empty_cpu, engine_on

from kvtier.core.plan import PlannerSettings
from kvtier.core.planner import Planner
from kvtier.core.reuse.history import History
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.base import MissReason
from kvtier.tiers.memory import MemoryTier

NUM_BYTES = 4 * 4096


def open_harness():
    settings = HarnessSettings(num_slabs=1, slab_bytes=16 * 4096)
    planner = Planner(PlannerSettings(mode="always"))
    tiers = {SSD: MemoryTier(1 << 20, name=SSD)}
    return NodeHarness(tiers, settings, history=History(), planner=planner)


def expected_s(harness):
    return harness.node.planner.restore_s(SSD, NUM_BYTES)


def a_read(harness, engine):
    """Have a read begin; returns it."""
    blocks = engine.chain(range(4))
    if harness.tiers[SSD].usage().num_blocks == 0:
        engine.store(blocks)
        harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks)
    (read,) = harness.waiting
    assert isinstance(read, ac.Read)
    harness.waiting.clear()
    return load, read


def end(harness, read, seconds, fault="", results=None):
    """Tell that a read ended, however it went."""
    if results is None:
        results = harness.completion(read).results if not fault else ()
    harness.post(ev.ReadDone(read.transfer, results, seconds, fault))


def read_again_and_again(harness, engine, seconds, times=30):
    for _ in range(times):
        load, read = a_read(harness, engine)
        end(harness, read, seconds)
        load.release()
        harness.advance(100 * MS)


@pytest.mark.parametrize("seconds", [0.0005, 0.02])
def test_what_transfers_take_is_learned(seconds):
    harness = open_harness()
    engine = engine_on(harness)
    read_again_and_again(harness, engine, seconds)
    assert seconds / 2 < expected_s(harness) < 2 * seconds  # of as many bytes in one piece


def test_a_tier_that_refuses_at_once_is_not_fast():
    harness = open_harness()
    engine = engine_on(harness)
    read_again_and_again(harness, engine, 0.02)
    before_s = expected_s(harness)
    for _ in range(30):
        load, read = a_read(harness, engine)
        end(harness, read, 0.0, "a fault was injected")
        load.release()
        harness.advance(10 * MS)
    assert expected_s(harness) == pytest.approx(before_s, rel=0.3)


def test_blocks_that_are_not_there_say_nothing():
    harness = open_harness()
    engine = engine_on(harness)
    read_again_and_again(harness, engine, 0.02)
    before_s = expected_s(harness)
    load, read = a_read(harness, engine)
    end(harness, read, 0.000001, results=(MissReason.ABSENT,) * 4)
    load.release()
    assert expected_s(harness) == pytest.approx(before_s, rel=0.05)


def test_a_tier_that_hangs_is_slow_before_it_ever_answers():
    harness = open_harness()
    engine = engine_on(harness)
    read_again_and_again(harness, engine, 0.0005)
    for _ in range(8):
        load, read = a_read(harness, engine)
        harness.advance(harness.settings.transfer_deadline_ns + 10 * MS)  # it is overdue
        slow_s = expected_s(harness)
        end(harness, read, 0.0001)  # a lie, or a clock that went back: what was late stays late
        load.release()
    assert slow_s > 0.01
    assert expected_s(harness) >= slow_s


def test_a_failure_that_took_long_took_at_least_that():
    harness = open_harness()
    engine = engine_on(harness)
    read_again_and_again(harness, engine, 0.0005)
    for _ in range(8):
        load, read = a_read(harness, engine)
        harness.advance(50 * MS)
        end(harness, read, 0.0, "a fault was injected")
        load.release()
    assert expected_s(harness) > 0.01


def written_s(harness):
    """What a write of one block is expected to take, as the sum of its parts."""
    rates = harness.node.planner.document()["restore"]["ssd_write"]["rates"]
    return rates[0] + rates[1] + 4096 * rates[2]


def a_write(harness, engine, number):
    """Have a write of one block begin; returns it."""
    engine.store(engine.chain([number]))
    (write,) = harness.waiting
    assert isinstance(write, ac.Write)
    harness.waiting.clear()
    return write


def test_a_write_that_fails_is_compared_with_writes():
    harness = open_harness()
    engine = engine_on(harness)
    read_again_and_again(harness, engine, 0.0005)  # reading is far faster than
    for number in range(100, 130):
        write = a_write(harness, engine, number)
        results = harness.completion(write).results
        harness.post(ev.WriteDone(write.transfer, results, (), 0.05, ""))
        empty_cpu(harness)
    before_s = written_s(harness)
    assert before_s == pytest.approx(0.05, rel=0.2)
    for number in range(200, 230):
        write = a_write(harness, engine, number)
        harness.advance(5 * MS)
        harness.post(ev.WriteDone(write.transfer, (), (), 0.0, "a fault was injected"))
        harness.advance(100 * MS)
        empty_cpu(harness)
    assert written_s(harness) == pytest.approx(before_s, rel=0.1), "no write is as fast as that"
