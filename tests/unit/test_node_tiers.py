"""Dialogues: writes below, probes, drops, and engines that go."""

import pytest
from dialogue import CPU, GPU, MS, REMOTE, SSD, drop, empty_cpu, engine_on, open_harness

from kvtier.core.residency import Residency
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.node_harness import NodeHarness

# Writes


def test_a_store_is_written_to_every_slower_tier():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    assert [(work.tier, len(work.blocks)) for work in harness.waiting] == [(SSD, 3), (REMOTE, 3)]
    assert harness.node.num_pins == 6
    harness.settle()
    hashes = [block.header.block_hash for block in blocks]
    assert harness.tiers[SSD].contains(hashes, 1 << 62) == [True] * 3
    assert harness.tiers[REMOTE].contains(hashes, 1 << 62) == [True] * 3
    harness.check_idle()


def test_a_write_that_fails_leaves_the_block_absent_there():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.fail(harness.waiting[0])
    assert engine.found(blocks) == (CPU,) * 3
    assert not harness.holds(blocks[0].header, SSD)
    empty_cpu(harness)
    assert len(harness.node.cache.index) == 0


def test_a_block_damaged_in_the_arena_is_not_spread():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    harness.arena[engine.store(blocks).offsets[1]] ^= 1
    harness.settle()
    assert engine.found(blocks) == (CPU,)
    assert [harness.holds(block.header, SSD) for block in blocks] == [True, False, True]
    harness.check_idle()


def test_a_block_condemned_while_it_waits_to_be_written_is_not_written():
    harness = open_harness(SSD, workers=1)
    engine = engine_on(harness)
    first, blocks = engine.chain([9]), engine.chain(range(2))
    engine.store(first)
    harness.arena[engine.store(blocks).offsets[0]] ^= 1  # waits behind the first
    load = engine.load(blocks)
    load.take()
    load.release()
    harness.settle()
    assert not harness.holds(blocks[0].header, SSD)
    assert not harness.holds(blocks[0].header, CPU)
    harness.check_idle()


@pytest.mark.parametrize("end", ["fault", "down"])
def test_a_condemned_block_whose_write_comes_to_nothing_is_forgotten(end):
    harness = open_harness(SSD, workers=1)
    engine = engine_on(harness)
    engine.store(engine.chain([9]))
    blocks = engine.chain([1])
    harness.arena[engine.store(blocks).offsets[0]] ^= 1
    load = engine.load(blocks)
    load.take()
    load.release()
    if end == "down":
        harness.post(ev.TierUp(SSD, is_up=False))
    while harness.waiting:
        harness.fail(harness.waiting[0])
    assert not harness.holds(blocks[0].header, CPU)
    harness.check_idle()


def test_what_the_queue_cannot_hold_is_not_written():
    harness = open_harness(SSD, slots=16)
    engine = engine_on(harness)
    for number in range(6):
        engine.store(engine.chain([number]))
    assert harness.node.transfers.lanes[SSD].queued_bytes == 4 * 4096
    assert harness.node.num_pins == 4


def test_what_a_tier_evicts_is_no_longer_found_there():
    harness = open_harness(SSD, slots=64)
    harness.tiers[SSD]._capacity_bytes = 2 * 3128
    engine = engine_on(harness)
    for number in range(3):
        engine.store(engine.chain([number]))
        harness.settle()
    empty_cpu(harness)
    assert [engine.found(engine.chain([n])) for n in range(3)] == [(), (SSD,), (SSD,)]


def test_a_node_started_anew_serves_what_the_ssd_kept():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.settle()
    again = NodeHarness(harness.tiers, harness.settings, boot="second")
    again.recover(harness.tiers)
    engine.attach(again)
    assert engine.found(blocks) == (SSD,) * 3
    load = engine.load(blocks)
    again.settle()
    assert load.take() == [SSD] * 3


# Probes


def test_a_lookup_asks_the_remote_tier_for_what_is_not_known():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    harness.tiers[REMOTE].write(blocks[:3], 1 << 62)
    call = engine.lookup(blocks)
    (probe,) = harness.waiting
    assert len(probe.hashes) == 4
    harness.carry_out(probe)
    assert engine.answer(call) == ac.LookupResult(((REMOTE, 3),), "absent")
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [REMOTE] * 3
    load.release()
    harness.check_idle()


def test_a_late_probe_answers_with_what_is_known():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks[:2])
    harness.settle()
    call = engine.lookup(blocks, within_ns=100 * MS)
    (probe,) = harness.waiting
    harness.advance(100 * MS)
    assert engine.answer(call) == ac.LookupResult(((CPU, 2),), "absent")
    harness.carry_out(probe)  # changes nothing any more
    harness.check_idle()


def test_a_probe_without_time_is_not_made():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    call = engine.lookup(engine.chain(range(4)), within_ns=10 * MS)
    assert engine.answer(call) == ac.LookupResult((), "absent")
    assert not harness.waiting


def test_a_probe_that_fails_is_a_miss():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    call = engine.lookup(engine.chain(range(4)))
    harness.fail(harness.waiting[0])
    assert engine.answer(call) == ac.LookupResult((), "absent")


def test_a_lookup_tells_where_there_is_nothing_of_the_model_at_all():
    harness = open_harness(SSD)
    engine, other = engine_on(harness), engine_on(harness, "other", payload_bytes=4000)
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
    harness.settle()
    empty_cpu(harness)
    assert not is_empty(engine), "the SSD has it"
    remote = open_harness(REMOTE)
    assert not is_empty(engine_on(remote)), "nobody knows what a shared tier has"


# Drops


def test_a_drop_says_what_it_removed():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    engine.store(engine.chain(range(3)))
    harness.settle()
    call = drop(harness, CPU, SSD)
    harness.settle()
    cpu, ssd = harness.answers[call]
    assert (cpu.tier, cpu.num_blocks, cpu.kept_blocks) == (CPU, 3, 0)
    assert (ssd.tier, ssd.num_blocks, ssd.num_bytes) == (SSD, 3, 9000)
    assert engine.found(engine.chain(range(3))) == (REMOTE,) * 3
    harness.check_idle()


def test_a_drop_of_the_cpu_tier_waits_for_writes():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    call = drop(harness, CPU)
    assert call not in harness.answers
    harness.settle()
    assert harness.answers[call][0].num_blocks == 3
    assert engine.found(blocks) == (SSD,) * 3


def test_a_drop_keeps_what_is_in_use_at_its_deadline():
    harness = open_harness()
    engine = engine_on(harness)
    held, free = engine.chain([1]), engine.chain([2, 3])
    engine.store(held)
    engine.store(free)
    load = engine.load(held)
    call = drop(harness, CPU, within_ns=400 * MS)
    harness.advance(400 * MS)
    (cpu,) = harness.answers[call]
    assert (cpu.num_blocks, cpu.kept_blocks) == (2, 1)
    assert load.take() == [CPU]


def test_nothing_is_written_to_a_tier_while_it_is_emptied():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    engine.store(engine.chain([1]))
    harness.settle()
    call = drop(harness, SSD)
    (clear,) = harness.waiting
    blocks = engine.chain([2])
    engine.store(blocks)
    assert harness.waiting == [clear]
    harness.carry_out(clear)
    assert harness.answers[call][0].num_blocks == 1
    harness.settle()
    assert not harness.holds(blocks[0].header, SSD)
    assert engine.found(blocks) == (CPU,)
    later = engine.chain([3])
    engine.store(later)
    harness.settle()
    assert harness.holds(later[0].header, SSD)


def test_a_drop_does_not_wait_for_reads():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain([1, 2])
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks)
    (read,) = harness.waiting
    call = drop(harness, SSD)
    harness.carry_out(harness.waiting[1])
    assert harness.answers[call][0].num_blocks == 2
    harness.carry_out(read)
    load.take()
    assert load.end == "failed"
    load.release()
    harness.check_idle()


def test_two_drops_count_each_block_once():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    engine.store(engine.chain(range(3)))
    harness.settle()
    calls = [drop(harness, SSD), drop(harness, SSD)]
    harness.settle()
    assert [harness.answers[call][0].num_blocks for call in calls] == [3, 0]


def test_a_drop_that_fails_says_why():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain([1])
    engine.store(blocks)
    harness.settle()
    call = drop(harness, SSD, REMOTE)
    harness.fail(harness.waiting[0])
    ssd, remote = harness.answers[call]
    assert ssd.error
    assert remote.error == "no such tier"
    assert harness.holds(blocks[0].header, SSD)


def test_a_drop_of_the_gpu_tier_sums_what_engines_report():
    harness = open_harness()
    first, second, third = (engine_on(harness, name) for name in ("first", "second", "third"))
    call = drop(harness, GPU)
    orders = {order.session: order.order for order in harness.waiting}
    first.report(orders[first.session], 5)
    second.report(orders[second.session], 2)
    assert call not in harness.answers
    third.die()
    assert harness.answers[call][0].num_blocks == 7


def test_a_drop_of_the_gpu_tier_does_not_wait_for_ever():
    harness = open_harness()
    engine_on(harness)
    call = drop(harness, GPU, within_ns=500 * MS)
    harness.advance(500 * MS)
    assert "1 engine(s)" in harness.answers[call][0].error


# Engines that go


def test_the_end_of_a_session_frees_everything_at_once():
    harness = open_harness(SSD)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks, torn = engine.chain(range(2)), engine.chain(range(2, 4))
    engine.store(blocks)
    harness.settle()
    engine.load(blocks)
    granted = engine.prepare(torn)
    next(engine.copy(granted, torn))
    waiting = other.load(torn)
    engine.die()
    waiting.take()
    assert waiting.end == "failed"
    waiting.release()
    assert harness.node.cache.slots.used_bytes() == 2 * 4096
    harness.check_idle()
    assert other.found(blocks) == (CPU, CPU)


def test_a_load_of_a_dead_engine_is_answered():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    engine.load(blocks)
    engine.die()
    assert not harness.open_calls
    harness.settle()
    harness.check_idle()


def test_a_hung_store_keeps_its_slots_while_its_engine_lives():
    harness = open_harness()
    engine = engine_on(harness)
    granted = engine.prepare(engine.chain(range(2)))
    harness.advance(10_000 * MS)
    assert harness.node.cache.slots.used_bytes() == 2 * 4096
    state = harness.node.cache.index.in_state(CPU, Residency.WRITING)
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
    harness = open_harness()
    with pytest.raises(AssertionError, match=says):
        FakeEngine("odd", **change).attach(harness)
