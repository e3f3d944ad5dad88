"""Dialogues: writes below, probes, drops, and engines that go."""

import pytest
from dialogue import CPU, GPU, MS, REMOTE, SSD, drop, empty_cpu, engine_on, open_stage

from kvtier.core.residency import Residency
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.node_harness import NodeHarness

# Writes


def test_a_store_is_written_to_every_slower_tier():
    stage = open_stage(SSD, REMOTE)
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    assert [(work.tier, len(work.blocks)) for work in stage.waiting] == [(SSD, 3), (REMOTE, 3)]
    assert stage.node.num_pins == 6
    stage.settle()
    hashes = [block.header.block_hash for block in blocks]
    assert stage.tiers[SSD].contains(hashes, 1 << 62) == [True] * 3
    assert stage.tiers[REMOTE].contains(hashes, 1 << 62) == [True] * 3
    stage.check_idle()


def test_a_write_that_fails_leaves_the_block_absent_there():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    stage.fail(stage.waiting[0])
    assert engine.found(blocks) == (CPU,) * 3
    assert not stage.holds(blocks[0].header, SSD)
    empty_cpu(stage)
    assert len(stage.node.cache.index) == 0


def test_a_block_damaged_in_the_arena_is_not_spread():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    stage.arena[engine.store(blocks).offsets[1]] ^= 1
    stage.settle()
    assert engine.found(blocks) == (CPU,)
    assert [stage.holds(block.header, SSD) for block in blocks] == [True, False, True]
    stage.check_idle()


def test_a_block_condemned_while_it_waits_to_be_written_is_not_written():
    stage = open_stage(SSD, workers=1)
    engine = engine_on(stage)
    first, blocks = engine.chain([9]), engine.chain(range(2))
    engine.store(first)
    stage.arena[engine.store(blocks).offsets[0]] ^= 1  # waits behind the first
    load = engine.load(blocks)
    load.take()
    load.release()
    stage.settle()
    assert not stage.holds(blocks[0].header, SSD)
    assert not stage.holds(blocks[0].header, CPU)
    stage.check_idle()


@pytest.mark.parametrize("end", ["fault", "down"])
def test_a_condemned_block_whose_write_comes_to_nothing_is_forgotten(end):
    stage = open_stage(SSD, workers=1)
    engine = engine_on(stage)
    engine.store(engine.chain([9]))
    blocks = engine.chain([1])
    stage.arena[engine.store(blocks).offsets[0]] ^= 1
    load = engine.load(blocks)
    load.take()
    load.release()
    if end == "down":
        stage.post(ev.TierUp(SSD, is_up=False))
    while stage.waiting:
        stage.fail(stage.waiting[0])
    assert not stage.holds(blocks[0].header, CPU)
    stage.check_idle()


def test_what_the_queue_cannot_hold_is_not_written():
    stage = open_stage(SSD, slots=16)
    engine = engine_on(stage)
    for number in range(6):
        engine.store(engine.chain([number]))
    assert stage.node.transfers.lanes[SSD].queued_bytes == 4 * 4096
    assert stage.node.num_pins == 4


def test_what_a_tier_evicts_is_no_longer_found_there():
    stage = open_stage(SSD, slots=64)
    stage.tiers[SSD]._capacity_bytes = 2 * 3128
    engine = engine_on(stage)
    for number in range(3):
        engine.store(engine.chain([number]))
        stage.settle()
    empty_cpu(stage)
    assert [engine.found(engine.chain([n])) for n in range(3)] == [(), (SSD,), (SSD,)]


def test_a_node_started_anew_serves_what_the_ssd_kept():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    stage.settle()
    again = NodeHarness(stage.tiers, stage.settings, boot="second")
    again.recover(stage.tiers)
    engine.attach(again)
    assert engine.found(blocks) == (SSD,) * 3
    load = engine.load(blocks)
    again.settle()
    assert load.take() == [SSD] * 3


# Probes


def test_a_lookup_asks_the_remote_tier_for_what_is_not_known():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    blocks = engine.chain(range(4))
    stage.tiers[REMOTE].write(blocks[:3], 1 << 62)
    call = engine.lookup(blocks)
    (probe,) = stage.waiting
    assert len(probe.hashes) == 4
    stage.carry_out(probe)
    assert engine.answer(call) == ac.LookupResult(((REMOTE, 3),), "absent")
    load = engine.load(blocks)
    stage.settle()
    assert load.take() == [REMOTE] * 3
    load.release()
    stage.check_idle()


def test_a_late_probe_answers_with_what_is_known():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    blocks = engine.chain(range(4))
    engine.store(blocks[:2])
    stage.settle()
    call = engine.lookup(blocks, within_ns=100 * MS)
    (probe,) = stage.waiting
    stage.advance(100 * MS)
    assert engine.answer(call) == ac.LookupResult(((CPU, 2),), "absent")
    stage.carry_out(probe)  # changes nothing any more
    stage.check_idle()


def test_a_probe_without_time_is_not_made():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    call = engine.lookup(engine.chain(range(4)), within_ns=10 * MS)
    assert engine.answer(call) == ac.LookupResult((), "absent")
    assert not stage.waiting


def test_a_probe_that_fails_is_a_miss():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    call = engine.lookup(engine.chain(range(4)))
    stage.fail(stage.waiting[0])
    assert engine.answer(call) == ac.LookupResult((), "absent")


def test_a_lookup_tells_where_there_is_nothing_of_the_model_at_all():
    stage = open_stage(SSD)
    engine, other = engine_on(stage), engine_on(stage, "other", payload_bytes=4000)
    blocks = engine.chain(range(4))
    nothing = engine.chain(range(10, 14))

    def is_empty(asking: FakeEngine) -> bool:
        answer = asking.answer(asking.lookup(nothing, within_ns=10 * MS))
        assert isinstance(answer, ac.LookupResult)
        return answer.is_empty

    assert is_empty(engine)
    engine.store(blocks)
    assert not is_empty(engine)
    assert is_empty(other), "another model"
    stage.settle()
    empty_cpu(stage)
    assert not is_empty(engine), "the SSD has it"
    remote = open_stage(REMOTE)
    assert not is_empty(engine_on(remote)), "nobody knows what a shared tier has"


# Drops


def test_a_drop_says_what_it_removed():
    stage = open_stage(SSD, REMOTE)
    engine = engine_on(stage)
    engine.store(engine.chain(range(3)))
    stage.settle()
    call = drop(stage, CPU, SSD)
    stage.settle()
    cpu, ssd = stage.answers[call]
    assert (cpu.tier, cpu.num_blocks, cpu.kept_blocks) == (CPU, 3, 0)
    assert (ssd.tier, ssd.num_blocks, ssd.num_bytes) == (SSD, 3, 9000)
    assert engine.found(engine.chain(range(3))) == (REMOTE,) * 3
    stage.check_idle()


def test_a_drop_of_the_cpu_tier_waits_for_writes():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    call = drop(stage, CPU)
    assert call not in stage.answers
    stage.settle()
    assert stage.answers[call][0].num_blocks == 3
    assert engine.found(blocks) == (SSD,) * 3


def test_a_drop_keeps_what_is_in_use_at_its_deadline():
    stage = open_stage()
    engine = engine_on(stage)
    held, free = engine.chain([1]), engine.chain([2, 3])
    engine.store(held)
    engine.store(free)
    load = engine.load(held)
    call = drop(stage, CPU, within_ns=400 * MS)
    stage.advance(400 * MS)
    (cpu,) = stage.answers[call]
    assert (cpu.num_blocks, cpu.kept_blocks) == (2, 1)
    assert load.take() == [CPU]


def test_nothing_is_written_to_a_tier_while_it_is_emptied():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    engine.store(engine.chain([1]))
    stage.settle()
    call = drop(stage, SSD)
    (clear,) = stage.waiting
    blocks = engine.chain([2])
    engine.store(blocks)
    assert stage.waiting == [clear]
    stage.carry_out(clear)
    assert stage.answers[call][0].num_blocks == 1
    stage.settle()
    assert not stage.holds(blocks[0].header, SSD)
    assert engine.found(blocks) == (CPU,)
    later = engine.chain([3])
    engine.store(later)
    stage.settle()
    assert stage.holds(later[0].header, SSD)


def test_a_drop_does_not_wait_for_reads():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain([1, 2])
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    load = engine.load(blocks)
    (read,) = stage.waiting
    call = drop(stage, SSD)
    stage.carry_out(stage.waiting[1])
    assert stage.answers[call][0].num_blocks == 2
    stage.carry_out(read)
    load.take()
    assert load.end == "failed"
    load.release()
    stage.check_idle()


def test_two_drops_count_each_block_once():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    engine.store(engine.chain(range(3)))
    stage.settle()
    calls = [drop(stage, SSD), drop(stage, SSD)]
    stage.settle()
    assert [stage.answers[call][0].num_blocks for call in calls] == [3, 0]


def test_a_drop_that_fails_says_why():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain([1])
    engine.store(blocks)
    stage.settle()
    call = drop(stage, SSD, REMOTE)
    stage.fail(stage.waiting[0])
    ssd, remote = stage.answers[call]
    assert ssd.error
    assert remote.error == "there is no such tier here"
    assert stage.holds(blocks[0].header, SSD)


def test_a_drop_of_the_gpu_tier_sums_what_engines_report():
    stage = open_stage()
    first, second, third = (engine_on(stage, name) for name in ("first", "second", "third"))
    call = drop(stage, GPU)
    orders = {order.session: order.order for order in stage.waiting}
    first.report(orders[first.session], 5)
    second.report(orders[second.session], 2)
    assert call not in stage.answers
    third.die()
    assert stage.answers[call][0].num_blocks == 7


def test_a_drop_of_the_gpu_tier_does_not_wait_for_ever():
    stage = open_stage()
    engine_on(stage)
    call = drop(stage, GPU, within_ns=500 * MS)
    stage.advance(500 * MS)
    assert "1 engine(s)" in stage.answers[call][0].error


# Engines that go


def test_the_end_of_a_session_frees_everything_at_once():
    stage = open_stage(SSD)
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks, torn = engine.chain(range(2)), engine.chain(range(2, 4))
    engine.store(blocks)
    stage.settle()
    engine.load(blocks)
    granted = engine.prepare(torn)
    next(engine.copy(granted, torn))
    waiting = other.load(torn)
    engine.die()
    waiting.take()
    assert waiting.end == "failed"
    waiting.release()
    assert stage.node.cache.slots.used_bytes() == 2 * 4096
    stage.check_idle()
    assert other.found(blocks) == (CPU, CPU)


def test_a_load_of_a_dead_engine_is_answered():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    engine.load(blocks)
    engine.die()
    assert not stage.open_calls
    stage.settle()
    stage.check_idle()


def test_a_hung_store_keeps_its_slots_while_its_engine_lives():
    stage = open_stage()
    engine = engine_on(stage)
    granted = engine.prepare(engine.chain(range(2)))
    stage.advance(10_000 * MS)
    assert stage.node.cache.slots.used_bytes() == 2 * 4096
    state = stage.node.cache.index.in_state(CPU, Residency.WRITING)
    assert len(state) == len(granted.indexes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_space": b"short"}, "key_space"),
        ({"payload_bytes": 1 << 20}, "cpu.slab"),
        ({"payload_bytes": 5 * 4096}, "cpu.capacity to at least 81920 bytes"),
    ],
)
def test_what_cannot_be_served_is_refused_at_registration(change, says):
    stage = open_stage()
    with pytest.raises(AssertionError, match=says):
        FakeEngine("odd", **change).attach(stage)
