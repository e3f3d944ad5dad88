"""Dialogues: a tier is drained, taken off and put on, and what is under way for it at that time."""

from dataclasses import replace

import numpy as np
import pytest
from dialogue import CPU, MS, REMOTE, SSD, drop, empty_cpu, engine_on, metric, open_stage

from kvtier.core.index import WAS_DEMOTED
from kvtier.core.residency import Residency
from kvtier.core.slow_tier import AdminState
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev

FAR_NS = 1 << 62


def set_admin_state(stage, tier, admin_state):
    stage.post(ev.SetAdminState(tier, admin_state))


def leave(stage, tier):
    """Take a tier off, and have what it held forgotten."""
    set_admin_state(stage, tier, AdminState.DETACHED)
    index = stage.node.cache.index
    for first in range(0, index.extent, 2):
        stage.post(ev.ForgetRows(tier, first, first + 2))
    assert not index.num_in(tier, Residency.READY)


def come(stage, tier):
    """Put a tier on, with what it holds now."""
    settings = stage.node.transfers.lanes[tier].tier
    stage.post(ev.ConfigureTier(replace(settings, num_workers=1)))
    stage.recover({tier: stage.tiers[tier]})
    set_admin_state(stage, tier, AdminState.ACTIVE)


def stored(stage, engine, *numbers, below=True):
    blocks = engine.chain(numbers)
    engine.store(blocks)
    if below:
        stage.settle()
    return blocks


def test_a_drained_tier_ends_what_is_queued_and_takes_nothing_new():
    stage = open_stage(SSD, workers=1)
    engine = engine_on(stage)
    first = stored(stage, engine, 1, 2, below=False)
    set_admin_state(stage, SSD, AdminState.READ_ONLY)
    second = stored(stage, engine, 8, 9)
    assert [stage.holds(each.header, SSD) for each in [*first, *second]] == [True] * 2 + [False] * 2
    empty_cpu(stage)
    load = engine.load(first)
    stage.settle()
    assert load.take() == [SSD] * 2
    set_admin_state(stage, SSD, AdminState.ACTIVE)
    third = stored(stage, engine, 5)
    assert stage.holds(third[0].header, SSD)


def test_a_tier_on_its_last_duty_ends_reads_and_offers_nothing():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = stored(stage, engine, *range(4))
    empty_cpu(stage)
    load = engine.load(blocks)
    set_admin_state(stage, SSD, AdminState.DETACHING)
    assert engine.found(stored(stage, engine, 50)) == (CPU,)
    assert engine.found(engine.chain([0])) == (CPU,), "it is on its way"
    stage.settle()
    assert load.take() == [SSD] * 4
    load.release()
    empty_cpu(stage)
    assert engine.found(blocks) == ()
    stage.check_idle()


def test_reads_under_way_are_given_up_and_keep_their_slots():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = stored(stage, engine, 1, 2, 3)
    empty_cpu(stage)
    load = engine.load(blocks)
    (read,) = stage.waiting
    leave(stage, SSD)
    assert (load.take(), load.end) == ([], "late")
    load.release()
    assert stage.node.cache.slots.held_bytes == 3 * 4096, "the thread may still write there"
    come(stage, SSD)
    assert engine.found(blocks) == (), "a slot that is written to cannot be read into"
    stage.carry_out(read)
    assert stage.node.cache.slots.held_bytes == 0
    again = engine.load(blocks)
    stage.settle()
    assert again.take() == [SSD] * 3
    again.release()
    assert metric(stage, "kvtier_missed_blocks_total", fate="detached") == 3
    stage.check_idle()


def test_reads_that_wait_try_the_next_tier():
    stage = open_stage(SSD, REMOTE, workers=1)
    engine = engine_on(stage)
    others, blocks = stored(stage, engine, 7), stored(stage, engine, 1, 2)
    empty_cpu(stage)
    engine.load(others)  # the only worker of the SSD is busy with it
    load = engine.load(blocks)
    leave(stage, SSD)
    stage.settle()
    assert load.take() == [REMOTE] * 2


@pytest.mark.parametrize("ends", ["well", "in a fault"])
def test_a_write_of_a_tier_that_left_says_nothing_of_the_one_that_came(ends):
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = stored(stage, engine, 1, 2, below=False)
    (write,) = stage.waiting
    leave(stage, SSD)
    assert stage.node.num_pins == 2, "the thread may still read there"
    stage.tiers[SSD].write(blocks[:1], FAR_NS)  # by whoever had the disk
    come(stage, SSD)
    assert [stage.holds(each.header, SSD) for each in blocks] == [True, False]
    if ends == "well":
        stage.waiting.remove(write)
        stage.post(ev.WriteDone(write.transfer, ("stored", "stored"), b"", 0.1))
    else:
        stage.fail(write)
    assert [stage.holds(each.header, SSD) for each in blocks] == [True, False]
    stage.check_idle()


def test_what_a_tier_has_when_it_comes_is_what_counts():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = stored(stage, engine, *range(5))
    leave(stage, SSD)
    hashes = [each.header.block_hash for each in blocks]
    stage.tiers[SSD].remove(hashes[3:], FAR_NS)
    come(stage, SSD)
    assert [stage.holds(each.header, SSD) for each in blocks] == [True] * 3 + [False] * 2
    empty_cpu(stage)
    assert engine.found(blocks) == (SSD,) * 3


def test_a_block_that_goes_by_the_name_of_another_is_not_learned():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    (block,) = stored(stage, engine, 1)
    leave(stage, SSD)
    (headers,) = stage.tiers[SSD].headers()
    foreign = headers.copy()
    foreign["position"] += 1
    stage.post(ev.ConfigureTier(stage.node.transfers.lanes[SSD].tier))
    stage.post(ev.BlocksRecovered(SSD, foreign))
    assert not stage.holds(block.header, SSD)


def test_a_lookup_that_asks_a_tier_that_leaves_is_answered():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    blocks = engine.chain(range(4))
    stage.tiers[REMOTE].write(blocks, FAR_NS)
    call = engine.lookup(blocks)
    (probe,) = stage.waiting
    leave(stage, REMOTE)
    assert engine.answer(call) == ac.LookupResult((), "absent", is_empty=True)
    stage.carry_out(probe)
    assert len(stage.node.cache.index) == 0
    assert engine.found(blocks) == (), "and nobody asks it any more"
    come(stage, REMOTE)
    call = engine.lookup(blocks)
    stage.settle()
    assert engine.answer(call).runs == ((REMOTE, 4),)


def test_a_drop_of_a_tier_that_leaves_says_so():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    stored(stage, engine, 1, 2)
    call = drop(stage, SSD, CPU)
    (purge,) = stage.waiting
    stage.waiting.remove(purge)  # it hangs, and is told to nobody
    leave(stage, SSD)
    (ssd, cpu) = stage.answers.pop(call)
    assert ssd.error == "detached; it keeps its blocks"
    assert (cpu.num_blocks, cpu.error) == (2, "")
    come(stage, SSD)
    (again,) = [drop(stage, SSD)]
    stage.settle()
    assert stage.answers[again][0].num_blocks == 2


@pytest.mark.parametrize("is_back", [False, True])
def test_a_drop_vouches_for_no_tier_that_left_after_it_was_emptied(is_back):
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = stored(stage, engine, 1, 2)
    load = engine.load(blocks)
    call = drop(stage, SSD, CPU)
    stage.settle()
    assert call not in stage.answers, "the CPU tier's blocks are being read"
    leave(stage, SSD)
    stage.tiers[SSD].write(blocks, FAR_NS)  # by whoever had the disk
    if is_back:
        come(stage, SSD)
        assert all(stage.holds(each.header, SSD) for each in blocks)
        assert engine.found(blocks) == (), "none is served before the answer"
    load.release()
    ssd, cpu = stage.answers.pop(call)
    assert ssd.num_blocks == 2
    assert ssd.error.startswith("emptied, but detached")
    assert (cpu.num_blocks, cpu.error) == (2, "")


def test_a_fault_of_a_drop_is_told_though_the_tier_leaves():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    load = engine.load(stored(stage, engine, 1))
    call = drop(stage, SSD, CPU)
    stage.fail(stage.waiting[0])
    leave(stage, SSD)
    load.release()
    assert stage.answers.pop(call)[0].error == "a fault was injected"


def test_a_drop_ends_though_a_tier_came_meanwhile():
    stage = open_stage(SSD)
    settings = stage.node.transfers.lanes.pop(SSD).tier
    engine = engine_on(stage)
    load = engine.load(stored(stage, engine, 1))
    call = drop(stage, SSD, CPU)
    stage.post(ev.ConfigureTier(settings))
    set_admin_state(stage, SSD, AdminState.ACTIVE)
    load.release()
    ssd, cpu = stage.answers.pop(call)
    assert (ssd.error, cpu.num_blocks) == ("no such tier", 1)
    assert not stage.node.transfers.lanes[SSD].closed


def test_a_tier_that_comes_is_offered_what_others_were_offered_meanwhile():
    stage = open_stage(SSD, REMOTE)
    engine = engine_on(stage)
    stored(stage, engine, 1, 2)
    leave(stage, SSD)
    stored(stage, engine, 3)
    index = stage.node.cache.index
    rows = np.arange(index.extent)
    index.flags[rows] |= WAS_DEMOTED
    come(stage, SSD)
    is_below = index.residency(rows, SSD) == Residency.READY
    assert is_below.sum() == 2
    assert ((index.flags[rows] & WAS_DEMOTED != 0) == is_below).all()


def test_a_tier_without_a_lane_comes():
    stage = open_stage(SSD)
    settings = stage.node.transfers.lanes.pop(SSD).tier
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    stage.tiers[SSD].write(blocks, FAR_NS)
    stage.post(ev.ConfigureTier(settings))
    stage.recover({SSD: stage.tiers[SSD]})
    assert engine.found(blocks) == (), "not before all is known"
    set_admin_state(stage, SSD, AdminState.ACTIVE)
    load = engine.load(blocks)
    stage.settle()
    assert load.take() == [SSD] * 3


def test_who_watches_is_told_all_again_only_where_it_is_offered_otherwise():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    stored(stage, engine, 1, 2)
    (session,) = stage.node.sessions.values()
    feed = stage.node.feeds.open(session.key_space, lambda: None)

    def told():
        while feed.has_news:
            yield from ((each.tier, len(each.keys)) for each in feed.take())

    everything = list(told())
    assert everything[-2:] == [(CPU, 2), (SSD, 2)]
    set_admin_state(stage, SSD, AdminState.READ_ONLY)
    set_admin_state(stage, SSD, AdminState.ACTIVE)
    assert list(told()) == []
    set_admin_state(stage, SSD, AdminState.DETACHING)
    assert list(told()) == everything[:-1]
    set_admin_state(stage, SSD, AdminState.READ_ONLY)
    assert list(told()) == everything


def test_what_lingers_is_not_due_while_a_tier_is_drained():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    stored(stage, engine, 1)
    set_admin_state(stage, SSD, AdminState.READ_ONLY)
    stage.advance(1000 * MS)
    assert stage.node.next_deadline_ns() is None
