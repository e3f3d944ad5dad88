"""Dialogues: leading blocks, from wherever they are, each as soon as it is there."""

import pytest
from dialogue import CPU, MS, REMOTE, SSD, empty_cpu, engine_on, metric, open_stage

from kvtier.core.identity import EVERYTHING
from kvtier.core.residency import Residency
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.tiers.base import BlockWrite, MissReason


def on_slower_tiers(stage, engine, numbers):
    """Store a prompt, bit by bit, and let it leave the CPU tier once it is on the others."""
    blocks = engine.chain(numbers)
    for first in range(0, len(blocks), 16):
        engine.store(blocks[: first + 16], first)
        stage.settle()
    empty_cpu(stage)
    return blocks


def test_a_block_below_comes_back():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(4))
    assert engine.found(blocks) == (SSD,) * 4
    load = engine.load(blocks)
    assert load.take() == []
    stage.settle()
    assert load.take() == [SSD] * 4
    assert load.end == "complete"
    assert load.release()
    assert engine.found(blocks) == (CPU,) * 4
    stage.check_idle()


def test_leading_blocks_are_handed_out_while_others_are_still_read():
    stage = open_stage(SSD, slots=64)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(14))
    load = engine.load(blocks)
    assert [len(read.blocks) for read in stage.waiting] == [8, 6]
    stage.carry_out(stage.waiting[1])
    assert load.take() == []  # those behind a gap are no use yet
    stage.carry_out(stage.waiting[0])
    assert load.take() == [SSD] * 14


def test_a_load_from_the_back_begins_with_the_last_block():
    stage = open_stage(SSD, slots=64)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(14))
    load = engine.load(blocks, 2, from_back=True)
    (last, before) = stage.waiting
    assert [block.header.position for block in last.blocks] == list(range(13, 5, -1))
    stage.carry_out(before)
    assert load.take() == []  # those before a gap are no use yet
    stage.carry_out(last)
    assert load.take() == [SSD] * 12
    assert load.end == "complete"


def test_a_load_from_the_back_of_a_shorter_run_says_where_it_begins():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(8))
    engine.store(blocks[:4])
    load = engine.load(blocks, 1, from_back=True)
    assert load.take() == [CPU] * 3  # each of them is checked against what it should be
    assert load.end == "absent"


def test_a_load_from_the_back_leaves_the_front_where_there_is_no_room():
    stage = open_stage(SSD, slots=6)
    engine = engine_on(stage)
    blocks = engine.chain(range(6))
    for length in range(1, 7):  # one block at a time is this engine's share
        engine.store(blocks[:length])
        stage.settle()
    empty_cpu(stage)
    load = engine.load(blocks, from_back=True)
    stage.settle()
    assert load.take() == [SSD] * 4  # an engine's share, of the last ones
    assert load.end == "no_room"


def test_what_was_computed_meanwhile_is_not_read():
    stage = open_stage(SSD, slots=64)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(40))
    load = engine.load(blocks, from_back=True)
    assert sum(len(read.blocks) for read in stage.waiting) == 16
    stage.carry_out(stage.waiting[0])
    assert load.take() == [SSD] * 8
    assert load.release()  # engine and load have met
    stage.settle()
    assert stage.node.cache.index.num_in(CPU, Residency.READY) == 24
    stage.check_idle()


def test_a_block_that_does_not_come_ends_a_load_from_the_back():
    stage = open_stage(SSD, slots=64)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(14))
    load = engine.load(blocks, from_back=True)
    stage.carry_out(stage.waiting[0])
    stage.fail(stage.waiting[0])
    assert load.take() == [SSD] * 8
    assert load.end == "failed"
    load.release()
    stage.check_idle()


def test_what_is_read_does_not_wait_for_what_was_to_be_written_before():
    stage = open_stage(SSD, slots=64, workers=1)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(4))
    for number in (100, 200):
        engine.store(engine.chain([number]))
    load = engine.load(blocks)
    (first,) = stage.waiting
    assert isinstance(first, ac.Write), "the second write, and the load, wait for it"
    stage.carry_out(first)
    assert [type(work) for work in stage.waiting] == [ac.Read]
    stage.settle()
    assert load.take() == [SSD] * 4


def test_fifty_short_loads_do_not_wait_for_a_long_one():
    stage = open_stage(SSD, slots=256, workers=1)
    engine = engine_on(stage)
    long = on_slower_tiers(stage, engine, range(100))
    short = [on_slower_tiers(stage, engine, [1000 + n]) for n in range(50)]
    slow = engine.load(long)
    fast = [engine.load(blocks) for blocks in short]
    for _ in range(2 + len(fast)):
        stage.carry_out(stage.waiting[0])
    assert [load.take() for load in fast] == [[SSD]] * 50
    assert len(slow.take()) == 16  # two turns, of thirteen


def test_a_shared_prefix_is_read_when_the_first_load_gets_to_it():
    """A long load reads it last, from the back; the short one does not wait for that."""
    stage = open_stage(SSD, slots=256, workers=1)
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = on_slower_tiers(stage, engine, range(100))
    long, short = engine.load(blocks, from_back=True), other.load(blocks[:4])
    for _ in range(3):
        stage.carry_out(stage.waiting[0])
    assert short.take() == [SSD] * 4
    assert short.end == "complete"
    stage.settle()
    assert long.take() == [SSD] * 100
    reads = metric(stage, "kvtier_transfer_bytes_total", route="ssd_to_cpu", outcome="complete")
    assert reads == 100 * 3000  # each block once


def test_fifty_loads_of_one_prefix_read_it_once_and_each_goes_on_by_itself():
    stage = open_stage(SSD, slots=256, workers=1)
    engine = engine_on(stage)
    prefix = list(range(16))
    tails = [on_slower_tiers(stage, engine, [*prefix, 1000 + n]) for n in range(50)]
    loads = [engine.load(blocks) for blocks in tails]
    for _ in range(2):
        stage.carry_out(stage.waiting[0])
    assert {len(load.take()) for load in loads} == {16}
    stage.settle()
    assert all(load.take() == [SSD] * 17 for load in loads)
    reads = metric(stage, "kvtier_transfer_bytes_total", route="ssd_to_cpu", outcome="complete")
    assert reads == (16 + 50) * 3000


def test_waiters_share_one_read():
    stage = open_stage(SSD)
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = on_slower_tiers(stage, engine, range(4))
    loads = [engine.load(blocks), other.load(blocks), other.load(blocks[:2])]
    assert len(stage.waiting) == 1
    stage.settle()
    assert [len(load.take()) for load in loads] == [4, 4, 2]


def test_a_load_that_is_given_up_leaves_its_read_to_the_others():
    stage = open_stage(SSD)
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = on_slower_tiers(stage, engine, range(4))
    load, waiting = engine.load(blocks), other.load(blocks)
    assert load.release()
    stage.settle()
    assert len(waiting.take()) == 4


def test_a_load_that_is_given_up_gets_its_last_message():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    load = engine.load(on_slower_tiers(stage, engine, range(2)))
    load.release()
    load.take()
    assert load.end == "released"
    assert not stage.open_calls


def test_a_late_load_ends_at_its_deadline_with_what_is_there():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(4))
    engine.store(blocks[:2])  # nothing: the SSD has them
    first = engine.load(blocks[:2])
    stage.settle()
    assert first.take() == [SSD, SSD]
    load = engine.load(blocks, within_ns=50 * MS)
    assert load.take() == [CPU, CPU]
    stage.advance(50 * MS)
    load.take()
    assert load.end == "late"
    stage.settle()  # the read goes on, as a promotion
    assert engine.found(blocks) == (CPU,) * 4
    load.release()
    first.release()
    stage.check_idle()


def test_a_lease_expires():
    stage = open_stage()
    engine = engine_on(stage)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    load = engine.load(blocks, within_ns=100 * MS)
    load.take()
    stage.advance(100 * MS + stage.settings.lease_ns - 1)
    assert stage.node.num_pins == 2
    stage.advance(1)
    assert stage.node.num_pins == 0
    assert not load.release()
    stage.check_idle()


def test_a_client_that_copied_after_its_lease_throws_the_block_away():
    stage = open_stage()
    engine = engine_on(stage)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    load = engine.load(blocks)
    for _ in load.steps():
        stage.advance(stage.settings.lease_ns)
    assert load.accepted == []
    assert load.end == "lease"


def test_a_corrupt_block_is_served_no_more_and_leaves_when_nobody_holds_it():
    stage = open_stage()
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = engine.chain(range(3))
    offsets = engine.store(blocks).offsets
    held = other.load(blocks)
    stage.arena[offsets[1]] ^= 1
    load = engine.load(blocks)
    assert load.take() == [CPU]
    assert load.end == "corrupt"
    assert load.release()
    assert engine.found(blocks) == (CPU,)
    used = stage.node.cache.slots.used_bytes()
    held.release()
    assert stage.node.cache.slots.used_bytes() == used - 4096
    assert engine.store(blocks).indexes == (1,)
    assert engine.found(blocks) == (CPU,) * 3


def test_nobody_waits_for_a_corrupt_block():
    stage = open_stage(SSD)
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = engine.chain(range(3))
    offsets = engine.store(blocks).offsets
    stage.settle()
    other.load(blocks)
    stage.arena[offsets[1]] ^= 1
    load = engine.load(blocks)
    load.take()
    load.release()
    again = engine.load(blocks)
    assert again.take() == [CPU]
    assert again.end == "absent"


def test_a_load_ends_before_a_block_that_turns_out_corrupt_while_it_waits():
    stage = open_stage(SSD)
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = on_slower_tiers(stage, engine, range(3))
    tail = engine.load(blocks, 2)
    stage.settle()
    tail.take()
    tail.release()
    waiting = other.load(blocks)  # for blocks 0 and 1; block 2 is there
    tail = engine.load(blocks, 2)
    stage.arena[stage.progress[tail._call][0].offsets[0]] ^= 1
    tail.take()
    tail.release()
    stage.settle()
    assert waiting.take() == [SSD, SSD]
    assert waiting.end == "failed"


def test_a_miss_on_the_ssd_falls_to_the_remote_tier():
    stage = open_stage(SSD, REMOTE)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(3))
    stage.tiers[SSD].remove([blocks[1].header.block_hash], 1 << 62)
    load = engine.load(blocks)
    stage.settle()
    assert load.take() == [SSD, REMOTE, SSD]
    assert load.end == "complete"


def test_a_block_that_no_tier_has_any_more_ends_the_load_there():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(4))
    stage.tiers[SSD].remove([blocks[2].header.block_hash], 1 << 62)
    load = engine.load(blocks)
    stage.settle()
    assert load.take() == [SSD, SSD]
    assert load.end == "failed"
    assert engine.found(blocks) == (CPU, CPU)


def test_a_rotten_block_is_a_miss_and_is_forgotten():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(2))
    header = blocks[1].header
    ssd = stage.tiers[SSD]
    ssd.remove([header.block_hash], 1 << 62)
    ssd.write([BlockWrite(header, memoryview(bytes(header.payload_bytes)))], 1 << 62)
    load = engine.load(blocks)
    stage.settle()
    assert load.take() == [SSD]
    assert load.end == "failed"
    assert engine.found(blocks) == (CPU,)


def test_a_fault_of_the_tier_ends_the_load_and_keeps_the_blocks():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(3))
    load = engine.load(blocks)
    stage.fail(stage.waiting[0])
    assert load.take() == []
    assert load.end == "failed"
    assert engine.found(blocks) == (SSD,) * 3


def test_a_tier_that_is_down_is_not_asked():
    stage = open_stage(SSD, REMOTE)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(3))
    stage.post(ev.TierUp(SSD, is_up=False))
    assert engine.found(blocks) == (REMOTE,) * 3
    stage.post(ev.TierUp(REMOTE, is_up=False))
    assert engine.found(blocks) == ()
    stage.post(ev.TierUp(SSD, is_up=True))
    assert engine.found(blocks) == (SSD,) * 3


def test_what_waits_for_a_tier_that_goes_down_comes_from_the_next():
    stage = open_stage(SSD, REMOTE, slots=64, workers=1)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(12))
    load = engine.load(blocks)
    (reading,) = stage.waiting  # eight of them; four still wait
    stage.post(ev.TierUp(SSD, is_up=False))
    stage.fail(reading)
    stage.settle()
    assert load.take() == [REMOTE] * 12


def test_a_stuck_tier_keeps_its_slots_and_is_left_alone():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, range(3))
    load = engine.load(blocks, within_ns=300 * MS)
    (hung,) = stage.waiting
    stage.advance(300 * MS)
    load.take()
    assert load.end == "late"
    load.release()
    assert stage.node.cache.slots.used_bytes() == 3 * 4096
    granted = engine.prepare(engine.chain(range(100, 104)))
    assert not set(granted.offsets) & {block.offset for block in hung.blocks}
    stage.carry_out(hung)  # at last
    assert engine.found(blocks) == (CPU,) * 3


def test_a_load_takes_what_the_arena_has_room_for():
    stage = open_stage(SSD, slots=4)
    engine, others = engine_on(stage), [engine_on(stage, name) for name in ("b", "c", "d")]
    blocks = engine.chain([0, 1])
    for length in (1, 2):  # one block at a time is this engine's share
        engine.store(blocks[:length])
        stage.settle()
    empty_cpu(stage)
    for number, other in enumerate(others):
        held = other.chain([10 + number])
        other.store(held)
        stage.settle()
        other.load(held)
    load = engine.load(blocks)
    stage.settle()
    assert load.take() == [SSD]
    assert load.end == "no_room"


def test_a_session_has_a_bound_on_leases():
    stage = open_stage()
    engine = engine_on(stage)
    blocks = engine.chain([1])
    engine.store(blocks)
    for _ in range(256):
        engine.load(blocks)
    with pytest.raises(AssertionError, match="too_many"):
        engine.load(blocks)


def test_a_miss_reason_is_counted():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = on_slower_tiers(stage, engine, [1])
    stage.tiers[SSD].purge(EVERYTHING, 1 << 62)
    engine.load(blocks)
    stage.settle()
    labels = {"tier": "ssd", "reason": MissReason.ABSENT}
    assert stage.metrics.registry.get_sample_value("kvtier_miss_blocks_total", labels) == 1


def test_an_unknown_session_is_told_so():
    stage = open_stage()
    answer = stage.ask(lambda call: ev.Load(call, "nobody", bytes(16), b"", 0, stage.clock() + 1))
    assert isinstance(answer, ac.Refused)
    assert answer.kind == "session"
