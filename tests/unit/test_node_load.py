"""Dialogues: leading blocks, from wherever they are, each as soon as it is there."""

import pytest
from dialogue import CPU, MS, REMOTE, SSD, empty_cpu, engine_on, metric, open_harness

from kvtier.core.identity import EVERYTHING
from kvtier.core.residency import Residency
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.tiers.base import BlockWrite, MissReason


def on_slower_tiers(harness, engine, numbers):
    """Store a prompt, bit by bit, and let it leave the CPU tier once it is on the others."""
    blocks = engine.chain(numbers)
    for first in range(0, len(blocks), 16):
        engine.store(blocks[: first + 16], first)
        harness.settle()
    empty_cpu(harness)
    return blocks


def test_a_block_below_comes_back():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(4))
    assert engine.found(blocks) == (SSD,) * 4
    load = engine.load(blocks)
    assert load.take() == []
    harness.settle()
    assert load.take() == [SSD] * 4
    assert load.end == "complete"
    assert load.release()
    assert engine.found(blocks) == (CPU,) * 4
    harness.check_idle()


def test_leading_blocks_are_handed_out_while_others_are_still_read():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(14))
    load = engine.load(blocks)
    assert [len(read.blocks) for read in harness.waiting] == [8, 6]
    harness.carry_out(harness.waiting[1])
    assert load.take() == []  # those behind a gap are no use yet
    harness.carry_out(harness.waiting[0])
    assert load.take() == [SSD] * 14


def test_a_load_from_the_back_begins_with_the_last_block():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(14))
    load = engine.load(blocks, 2, from_back=True)
    (last, before) = harness.waiting
    assert [block.header.position for block in last.blocks] == list(range(13, 5, -1))
    harness.carry_out(before)
    assert load.take() == []  # those before a gap are no use yet
    harness.carry_out(last)
    assert load.take() == [SSD] * 12
    assert load.end == "complete"


def test_a_load_from_the_back_of_a_shorter_run_says_where_it_begins():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(8))
    engine.store(blocks[:4])
    load = engine.load(blocks, 1, from_back=True)
    assert load.take() == [CPU] * 3  # each of them is checked against what it should be
    assert load.end == "absent"


def test_a_load_from_the_back_leaves_the_front_where_there_is_no_room():
    harness = open_harness(SSD, slots=6)
    engine = engine_on(harness)
    blocks = engine.chain(range(6))
    for length in range(1, 7):  # one block at a time is this engine's share
        engine.store(blocks[:length])
        harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks, from_back=True)
    harness.settle()
    assert load.take() == [SSD] * 4  # an engine's share, of the last ones
    assert load.end == "no_room"


def test_what_was_computed_meanwhile_is_not_read():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(40))
    load = engine.load(blocks, from_back=True)
    assert sum(len(read.blocks) for read in harness.waiting) == 16
    harness.carry_out(harness.waiting[0])
    assert load.take() == [SSD] * 8
    assert load.release()  # engine and load have met
    harness.settle()
    assert harness.node.cache.index.num_in(CPU, Residency.READY) == 24
    harness.check_idle()


def test_a_block_that_does_not_come_ends_a_load_from_the_back():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(14))
    load = engine.load(blocks, from_back=True)
    harness.carry_out(harness.waiting[0])
    harness.fail(harness.waiting[0])
    assert load.take() == [SSD] * 8
    assert load.end == "failed"
    load.release()
    harness.check_idle()


def test_what_is_read_does_not_wait_for_what_was_to_be_written_before():
    harness = open_harness(SSD, slots=64, workers=1)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(4))
    for number in (100, 200):
        engine.store(engine.chain([number]))
    load = engine.load(blocks)
    (first,) = harness.waiting
    assert isinstance(first, ac.Write), "the second write, and the load, wait for it"
    harness.carry_out(first)
    assert [type(work) for work in harness.waiting] == [ac.Read]
    harness.settle()
    assert load.take() == [SSD] * 4


def test_fifty_short_loads_do_not_wait_for_a_long_one():
    harness = open_harness(SSD, slots=256, workers=1)
    engine = engine_on(harness)
    long = on_slower_tiers(harness, engine, range(100))
    short = [on_slower_tiers(harness, engine, [1000 + n]) for n in range(50)]
    slow = engine.load(long)
    fast = [engine.load(blocks) for blocks in short]
    for _ in range(2 + len(fast)):
        harness.carry_out(harness.waiting[0])
    assert [load.take() for load in fast] == [[SSD]] * 50
    assert len(slow.take()) == 16  # two turns, of thirteen


def test_a_shared_prefix_is_read_when_the_first_load_gets_to_it():
    """A long load reads it last, from the back; the short one does not wait for that."""
    harness = open_harness(SSD, slots=256, workers=1)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = on_slower_tiers(harness, engine, range(100))
    long, short = engine.load(blocks, from_back=True), other.load(blocks[:4])
    for _ in range(3):
        harness.carry_out(harness.waiting[0])
    assert short.take() == [SSD] * 4
    assert short.end == "complete"
    harness.settle()
    assert long.take() == [SSD] * 100
    reads = metric(harness, "kvtier_transfer_bytes_total", route="ssd_to_cpu", outcome="complete")
    assert reads == 100 * 3000  # each block once


def test_fifty_loads_of_one_prefix_read_it_once_and_each_goes_on_by_itself():
    harness = open_harness(SSD, slots=256, workers=1)
    engine = engine_on(harness)
    prefix = list(range(16))
    tails = [on_slower_tiers(harness, engine, [*prefix, 1000 + n]) for n in range(50)]
    loads = [engine.load(blocks) for blocks in tails]
    for _ in range(2):
        harness.carry_out(harness.waiting[0])
    assert {len(load.take()) for load in loads} == {16}
    harness.settle()
    assert all(load.take() == [SSD] * 17 for load in loads)
    reads = metric(harness, "kvtier_transfer_bytes_total", route="ssd_to_cpu", outcome="complete")
    assert reads == (16 + 50) * 3000


def test_waiters_share_one_read():
    harness = open_harness(SSD)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = on_slower_tiers(harness, engine, range(4))
    loads = [engine.load(blocks), other.load(blocks), other.load(blocks[:2])]
    assert len(harness.waiting) == 1
    harness.settle()
    assert [len(load.take()) for load in loads] == [4, 4, 2]


def test_a_load_that_is_given_up_leaves_its_read_to_the_others():
    harness = open_harness(SSD)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = on_slower_tiers(harness, engine, range(4))
    load, waiting = engine.load(blocks), other.load(blocks)
    assert load.release()
    harness.settle()
    assert len(waiting.take()) == 4


def test_a_load_that_is_given_up_gets_its_last_message():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    load = engine.load(on_slower_tiers(harness, engine, range(2)))
    load.release()
    load.take()
    assert load.end == "released"
    assert not harness.open_calls


def test_a_late_load_ends_at_its_deadline_with_what_is_there():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(4))
    engine.store(blocks[:2])  # nothing: the SSD has them
    first = engine.load(blocks[:2])
    harness.settle()
    assert first.take() == [SSD, SSD]
    load = engine.load(blocks, within_ns=50 * MS)
    assert load.take() == [CPU, CPU]
    harness.advance(50 * MS)
    load.take()
    assert load.end == "late"
    harness.settle()  # the read goes on, as a promotion
    assert engine.found(blocks) == (CPU,) * 4
    load.release()
    first.release()
    harness.check_idle()


def test_a_lease_expires():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    load = engine.load(blocks, within_ns=100 * MS)
    load.take()
    harness.advance(100 * MS + harness.settings.lease_ns - 1)
    assert harness.node.num_pins == 2
    harness.advance(1)
    assert harness.node.num_pins == 0
    assert not load.release()
    harness.check_idle()


def test_a_client_that_copied_after_its_lease_throws_the_block_away():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    load = engine.load(blocks)
    for _ in load.steps():
        harness.advance(harness.settings.lease_ns)
    assert load.accepted == []
    assert load.end == "lease"


def test_a_corrupt_block_is_served_no_more_and_leaves_when_nobody_holds_it():
    harness = open_harness()
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = engine.chain(range(3))
    offsets = engine.store(blocks).offsets
    held = other.load(blocks)
    harness.arena[offsets[1]] ^= 1
    load = engine.load(blocks)
    assert load.take() == [CPU]
    assert load.end == "corrupt"
    assert load.release()
    assert engine.found(blocks) == (CPU,)
    used = harness.node.cache.slots.used_bytes()
    held.release()
    assert harness.node.cache.slots.used_bytes() == used - 4096
    assert engine.store(blocks).indexes == (1,)
    assert engine.found(blocks) == (CPU,) * 3


def test_nobody_waits_for_a_corrupt_block():
    harness = open_harness(SSD)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = engine.chain(range(3))
    offsets = engine.store(blocks).offsets
    harness.settle()
    other.load(blocks)
    harness.arena[offsets[1]] ^= 1
    load = engine.load(blocks)
    load.take()
    load.release()
    again = engine.load(blocks)
    assert again.take() == [CPU]
    assert again.end == "absent"


def test_a_load_ends_before_a_block_that_turns_out_corrupt_while_it_waits():
    harness = open_harness(SSD)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = on_slower_tiers(harness, engine, range(3))
    tail = engine.load(blocks, 2)
    harness.settle()
    tail.take()
    tail.release()
    waiting = other.load(blocks)  # for blocks 0 and 1; block 2 is there
    tail = engine.load(blocks, 2)
    harness.arena[harness.progress[tail._call][0].offsets[0]] ^= 1
    tail.take()
    tail.release()
    harness.settle()
    assert waiting.take() == [SSD, SSD]
    assert waiting.end == "failed"


def test_a_miss_on_the_ssd_falls_to_the_remote_tier():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(3))
    harness.tiers[SSD].remove([blocks[1].header.block_hash], 1 << 62)
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [SSD, REMOTE, SSD]
    assert load.end == "complete"


def test_a_block_that_no_tier_has_any_more_ends_the_load_there():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(4))
    harness.tiers[SSD].remove([blocks[2].header.block_hash], 1 << 62)
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [SSD, SSD]
    assert load.end == "failed"
    assert engine.found(blocks) == (CPU, CPU)


def test_a_rotten_block_is_a_miss_and_is_forgotten():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(2))
    header = blocks[1].header
    ssd = harness.tiers[SSD]
    ssd.remove([header.block_hash], 1 << 62)
    ssd.write([BlockWrite(header, memoryview(bytes(header.payload_bytes)))], 1 << 62)
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [SSD]
    assert load.end == "failed"
    assert engine.found(blocks) == (CPU,)


def test_a_fault_of_the_tier_ends_the_load_and_keeps_the_blocks():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(3))
    load = engine.load(blocks)
    harness.fail(harness.waiting[0])
    assert load.take() == []
    assert load.end == "failed"
    assert engine.found(blocks) == (SSD,) * 3


def test_a_tier_that_is_down_is_not_asked():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(3))
    harness.post(ev.TierUp(SSD, is_up=False))
    assert engine.found(blocks) == (REMOTE,) * 3
    harness.post(ev.TierUp(REMOTE, is_up=False))
    assert engine.found(blocks) == ()
    harness.post(ev.TierUp(SSD, is_up=True))
    assert engine.found(blocks) == (SSD,) * 3


def test_what_waits_for_a_tier_that_goes_down_comes_from_the_next():
    harness = open_harness(SSD, REMOTE, slots=64, workers=1)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(12))
    load = engine.load(blocks)
    (reading,) = harness.waiting  # eight of them; four still wait
    harness.post(ev.TierUp(SSD, is_up=False))
    harness.fail(reading)
    harness.settle()
    assert load.take() == [REMOTE] * 12


def test_a_stuck_tier_keeps_its_slots_and_is_left_alone():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, range(3))
    load = engine.load(blocks, within_ns=300 * MS)
    (hung,) = harness.waiting
    harness.advance(300 * MS)
    load.take()
    assert load.end == "late"
    load.release()
    assert harness.node.cache.slots.used_bytes() == 3 * 4096
    granted = engine.prepare(engine.chain(range(100, 104)))
    assert not set(granted.offsets) & {block.offset for block in hung.blocks}
    harness.carry_out(hung)  # at last
    assert engine.found(blocks) == (CPU,) * 3


def test_a_load_takes_what_the_arena_has_room_for():
    harness = open_harness(SSD, slots=4)
    engine, others = engine_on(harness), [engine_on(harness, name) for name in ("b", "c", "d")]
    blocks = engine.chain([0, 1])
    for length in (1, 2):  # one block at a time is this engine's share
        engine.store(blocks[:length])
        harness.settle()
    empty_cpu(harness)
    for number, other in enumerate(others):
        held = other.chain([10 + number])
        other.store(held)
        harness.settle()
        other.load(held)
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [SSD]
    assert load.end == "no_room"


def test_a_session_has_a_bound_on_leases():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain([1])
    engine.store(blocks)
    for _ in range(256):
        engine.load(blocks)
    with pytest.raises(AssertionError, match="too_many"):
        engine.load(blocks)


def test_a_miss_reason_is_counted():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = on_slower_tiers(harness, engine, [1])
    harness.tiers[SSD].purge(EVERYTHING, 1 << 62)
    engine.load(blocks)
    harness.settle()
    labels = {"tier": "ssd", "reason": MissReason.ABSENT}
    assert harness.metrics.registry.get_sample_value("kvtier_miss_blocks_total", labels) == 1


def test_an_unknown_session_is_told_so():
    harness = open_harness()
    answer = harness.ask(
        lambda call: ev.Load(call, "nobody", bytes(16), b"", 0, harness.clock() + 1)
    )
    assert isinstance(answer, ac.Refused)
    assert answer.kind == "session"
