"""What transfers teach the cost model: no failure looks fast, and what hangs is slow at once."""

import pytest
from dialogue import MS, SSD, empty_cpu, engine_on

from kvtier.core.planner import Planner, PlannerSettings
from kvtier.core.reuse.history import History
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.base import MissReason
from kvtier.tiers.memory import MemoryTier

NUM_BYTES = 4 * 4096


def open_stage():
    settings = HarnessSettings(num_slabs=1, slab_bytes=16 * 4096)
    planner = Planner(PlannerSettings(mode="always"))
    tiers = {SSD: MemoryTier(1 << 20, name=SSD)}
    return NodeHarness(tiers, settings, history=History(), planner=planner)


def expected_s(stage):
    return stage.node.planner.restore_s(SSD, NUM_BYTES)


def a_read(stage, engine):
    """Have a read begin; returns it."""
    blocks = engine.chain(range(4))
    if stage.tiers[SSD].usage().num_blocks == 0:
        engine.store(blocks)
        stage.settle()
    empty_cpu(stage)
    load = engine.load(blocks)
    (read,) = stage.waiting
    assert isinstance(read, ac.Read)
    stage.waiting.clear()
    return load, read


def end(stage, read, seconds, fault="", results=None):
    """Tell that a read ended, however it went."""
    if results is None:
        results = stage.completion(read).results if not fault else ()
    stage.post(ev.ReadDone(read.transfer, results, seconds, fault))


def read_again_and_again(stage, engine, seconds, times=30):
    for _ in range(times):
        load, read = a_read(stage, engine)
        end(stage, read, seconds)
        load.release()
        stage.advance(100 * MS)


@pytest.mark.parametrize("seconds", [0.0005, 0.02])
def test_what_transfers_take_is_learned(seconds):
    stage = open_stage()
    engine = engine_on(stage)
    read_again_and_again(stage, engine, seconds)
    assert seconds / 2 < expected_s(stage) < 2 * seconds  # of as many bytes in one piece


def test_a_tier_that_refuses_at_once_is_not_fast():
    stage = open_stage()
    engine = engine_on(stage)
    read_again_and_again(stage, engine, 0.02)
    before_s = expected_s(stage)
    for _ in range(30):
        load, read = a_read(stage, engine)
        end(stage, read, 0.0, "a fault was injected")
        load.release()
        stage.advance(10 * MS)
    assert expected_s(stage) == pytest.approx(before_s, rel=0.3)


def test_blocks_that_are_not_there_say_nothing():
    stage = open_stage()
    engine = engine_on(stage)
    read_again_and_again(stage, engine, 0.02)
    before_s = expected_s(stage)
    load, read = a_read(stage, engine)
    end(stage, read, 0.000001, results=(MissReason.ABSENT,) * 4)
    load.release()
    assert expected_s(stage) == pytest.approx(before_s, rel=0.05)


def test_a_tier_that_hangs_is_slow_before_it_ever_answers():
    stage = open_stage()
    engine = engine_on(stage)
    read_again_and_again(stage, engine, 0.0005)
    for _ in range(8):
        load, read = a_read(stage, engine)
        stage.advance(stage.settings.transfer_deadline_ns + 10 * MS)  # it is overdue
        slow_s = expected_s(stage)
        end(stage, read, 0.0001)  # a lie, or a clock that went back: what was late stays late
        load.release()
    assert slow_s > 0.01
    assert expected_s(stage) >= slow_s


def test_a_failure_that_took_long_took_at_least_that():
    stage = open_stage()
    engine = engine_on(stage)
    read_again_and_again(stage, engine, 0.0005)
    for _ in range(8):
        load, read = a_read(stage, engine)
        stage.advance(50 * MS)
        end(stage, read, 0.0, "a fault was injected")
        load.release()
    assert expected_s(stage) > 0.01


def written_s(stage):
    """What a write of one block is expected to take, as the sum of its parts."""
    rates = stage.node.planner.document()["restore"]["ssd_write"]["rates"]
    return rates[0] + rates[1] + 4096 * rates[2]


def a_write(stage, engine, number):
    """Have a write of one block begin; returns it."""
    engine.store(engine.chain([number]))
    (write,) = stage.waiting
    assert isinstance(write, ac.Write)
    stage.waiting.clear()
    return write


def test_a_write_that_fails_is_compared_with_writes():
    stage = open_stage()
    engine = engine_on(stage)
    read_again_and_again(stage, engine, 0.0005)  # reading is far faster than
    for number in range(100, 130):
        write = a_write(stage, engine, number)
        results = stage.completion(write).results
        stage.post(ev.WriteDone(write.transfer, results, (), 0.05, ""))
        empty_cpu(stage)
    before_s = written_s(stage)
    assert before_s == pytest.approx(0.05, rel=0.2)
    for number in range(200, 230):
        write = a_write(stage, engine, number)
        stage.advance(5 * MS)
        stage.post(ev.WriteDone(write.transfer, (), (), 0.0, "a fault was injected"))
        stage.advance(100 * MS)
        empty_cpu(stage)
    assert written_s(stage) == pytest.approx(before_s, rel=0.1), "no write is as fast as that"
