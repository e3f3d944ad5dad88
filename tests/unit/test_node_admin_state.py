"""Dialogues: a tier is drained, taken off and put on, and what is under way for it at that time."""

from dataclasses import replace

import numpy as np
import pytest
from dialogue import CPU, MS, REMOTE, SSD, drop, empty_cpu, engine_on, metric, open_harness

from kvtier.core.index import WAS_DEMOTED
from kvtier.core.residency import Residency
from kvtier.core.slow_tier import AdminState
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev

FAR_NS = 1 << 62


def set_admin_state(harness, tier, admin_state):
    harness.post(ev.SetAdminState(tier, admin_state))


def leave(harness, tier):
    """Take a tier off, and have what it held forgotten."""
    set_admin_state(harness, tier, AdminState.DETACHED)
    index = harness.node.cache.index
    for first in range(0, index.extent, 2):
        harness.post(ev.ForgetRows(tier, first, first + 2))
    assert not index.num_in(tier, Residency.READY)


def come(harness, tier):
    """Put a tier on, with what it holds now."""
    settings = harness.node.transfers.lanes[tier].tier
    harness.post(ev.ConfigureTier(replace(settings, num_workers=1)))
    harness.recover({tier: harness.tiers[tier]})
    set_admin_state(harness, tier, AdminState.ACTIVE)


def stored(harness, engine, *numbers, below=True):
    blocks = engine.chain(numbers)
    engine.store(blocks)
    if below:
        harness.settle()
    return blocks


def test_a_drained_tier_ends_what_is_queued_and_takes_nothing_new():
    harness = open_harness(SSD, workers=1)
    engine = engine_on(harness)
    first = stored(harness, engine, 1, 2, below=False)
    set_admin_state(harness, SSD, AdminState.READ_ONLY)
    second = stored(harness, engine, 8, 9)
    assert [harness.holds(each.header, SSD) for each in [*first, *second]] == [True] * 2 + [
        False
    ] * 2
    empty_cpu(harness)
    load = engine.load(first)
    harness.settle()
    assert load.take() == [SSD] * 2
    set_admin_state(harness, SSD, AdminState.ACTIVE)
    third = stored(harness, engine, 5)
    assert harness.holds(third[0].header, SSD)


def test_a_tier_on_its_last_duty_ends_reads_and_offers_nothing():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = stored(harness, engine, *range(4))
    empty_cpu(harness)
    load = engine.load(blocks)
    set_admin_state(harness, SSD, AdminState.DETACHING)
    assert engine.found(stored(harness, engine, 50)) == (CPU,)
    assert engine.found(engine.chain([0])) == (CPU,), "it is on its way"
    harness.settle()
    assert load.take() == [SSD] * 4
    load.release()
    empty_cpu(harness)
    assert engine.found(blocks) == ()
    harness.check_idle()


def test_reads_under_way_are_given_up_and_keep_their_slots():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = stored(harness, engine, 1, 2, 3)
    empty_cpu(harness)
    load = engine.load(blocks)
    (read,) = harness.waiting
    leave(harness, SSD)
    assert (load.take(), load.end) == ([], "late")
    load.release()
    assert harness.node.cache.slots.held_bytes == 3 * 4096, "the thread may still write there"
    come(harness, SSD)
    assert engine.found(blocks) == (), "a slot that is written to cannot be read into"
    harness.carry_out(read)
    assert harness.node.cache.slots.held_bytes == 0
    again = engine.load(blocks)
    harness.settle()
    assert again.take() == [SSD] * 3
    again.release()
    assert metric(harness, "kvtier_missed_blocks_total", fate="detached") == 3
    harness.check_idle()


def test_reads_that_wait_try_the_next_tier():
    harness = open_harness(SSD, REMOTE, workers=1)
    engine = engine_on(harness)
    others, blocks = stored(harness, engine, 7), stored(harness, engine, 1, 2)
    empty_cpu(harness)
    engine.load(others)  # the only worker of the SSD is busy with it
    load = engine.load(blocks)
    leave(harness, SSD)
    harness.settle()
    assert load.take() == [REMOTE] * 2


@pytest.mark.parametrize("ends", ["well", "in a fault"])
def test_a_write_of_a_tier_that_left_says_nothing_of_the_one_that_came(ends):
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = stored(harness, engine, 1, 2, below=False)
    (write,) = harness.waiting
    leave(harness, SSD)
    assert harness.node.num_pins == 2, "the thread may still read there"
    harness.tiers[SSD].write(blocks[:1], FAR_NS)  # by whoever had the disk
    come(harness, SSD)
    assert [harness.holds(each.header, SSD) for each in blocks] == [True, False]
    if ends == "well":
        harness.waiting.remove(write)
        harness.post(ev.WriteDone(write.transfer, ("stored", "stored"), b"", 0.1))
    else:
        harness.fail(write)
    assert [harness.holds(each.header, SSD) for each in blocks] == [True, False]
    harness.check_idle()


def test_what_a_tier_has_when_it_comes_is_what_counts():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = stored(harness, engine, *range(5))
    leave(harness, SSD)
    hashes = [each.header.block_hash for each in blocks]
    harness.tiers[SSD].remove(hashes[3:], FAR_NS)
    come(harness, SSD)
    assert [harness.holds(each.header, SSD) for each in blocks] == [True] * 3 + [False] * 2
    empty_cpu(harness)
    assert engine.found(blocks) == (SSD,) * 3


def test_a_block_that_goes_by_the_name_of_another_is_not_learned():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    (block,) = stored(harness, engine, 1)
    leave(harness, SSD)
    (headers,) = harness.tiers[SSD].headers()
    foreign = headers.copy()
    foreign["position"] += 1
    harness.post(ev.ConfigureTier(harness.node.transfers.lanes[SSD].tier))
    harness.post(ev.BlocksRecovered(SSD, foreign))
    assert not harness.holds(block.header, SSD)


def test_a_lookup_that_asks_a_tier_that_leaves_is_answered():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    harness.tiers[REMOTE].write(blocks, FAR_NS)
    call = engine.lookup(blocks)
    (probe,) = harness.waiting
    leave(harness, REMOTE)
    assert engine.answer(call) == ac.LookupResult((), "absent", is_empty=True)
    harness.carry_out(probe)
    assert len(harness.node.cache.index) == 0
    assert engine.found(blocks) == (), "and nobody asks it any more"
    come(harness, REMOTE)
    call = engine.lookup(blocks)
    harness.settle()
    assert engine.answer(call).runs == ((REMOTE, 4),)


def test_a_drop_of_a_tier_that_leaves_says_so():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    stored(harness, engine, 1, 2)
    call = drop(harness, SSD, CPU)
    (purge,) = harness.waiting
    harness.waiting.remove(purge)  # it hangs, and is told to nobody
    leave(harness, SSD)
    (ssd, cpu) = harness.answers.pop(call)
    assert ssd.error == "detached; it keeps its blocks"
    assert (cpu.num_blocks, cpu.error) == (2, "")
    come(harness, SSD)
    (again,) = [drop(harness, SSD)]
    harness.settle()
    assert harness.answers[again][0].num_blocks == 2


@pytest.mark.parametrize("is_back", [False, True])
def test_a_drop_vouches_for_no_tier_that_left_after_it_was_emptied(is_back):
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = stored(harness, engine, 1, 2)
    load = engine.load(blocks)
    call = drop(harness, SSD, CPU)
    harness.settle()
    assert call not in harness.answers, "the CPU tier's blocks are being read"
    leave(harness, SSD)
    harness.tiers[SSD].write(blocks, FAR_NS)  # by whoever had the disk
    if is_back:
        come(harness, SSD)
        assert all(harness.holds(each.header, SSD) for each in blocks)
        assert engine.found(blocks) == (), "none is served before the answer"
    load.release()
    ssd, cpu = harness.answers.pop(call)
    assert ssd.num_blocks == 2
    assert ssd.error.startswith("emptied, but detached")
    assert (cpu.num_blocks, cpu.error) == (2, "")


def test_a_fault_of_a_drop_is_told_though_the_tier_leaves():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    load = engine.load(stored(harness, engine, 1))
    call = drop(harness, SSD, CPU)
    harness.fail(harness.waiting[0])
    leave(harness, SSD)
    load.release()
    assert harness.answers.pop(call)[0].error == "a fault was injected"


def test_a_drop_ends_though_a_tier_came_meanwhile():
    harness = open_harness(SSD)
    settings = harness.node.transfers.lanes.pop(SSD).tier
    engine = engine_on(harness)
    load = engine.load(stored(harness, engine, 1))
    call = drop(harness, SSD, CPU)
    harness.post(ev.ConfigureTier(settings))
    set_admin_state(harness, SSD, AdminState.ACTIVE)
    load.release()
    ssd, cpu = harness.answers.pop(call)
    assert (ssd.error, cpu.num_blocks) == ("no such tier", 1)
    assert not harness.node.transfers.lanes[SSD].closed


def test_a_tier_that_comes_is_offered_what_others_were_offered_meanwhile():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    stored(harness, engine, 1, 2)
    leave(harness, SSD)
    stored(harness, engine, 3)
    index = harness.node.cache.index
    rows = np.arange(index.extent)
    index.flags[rows] |= WAS_DEMOTED
    come(harness, SSD)
    is_below = index.residency(rows, SSD) == Residency.READY
    assert is_below.sum() == 2
    assert ((index.flags[rows] & WAS_DEMOTED != 0) == is_below).all()


def test_a_tier_without_a_lane_comes():
    harness = open_harness(SSD)
    settings = harness.node.transfers.lanes.pop(SSD).tier
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    harness.tiers[SSD].write(blocks, FAR_NS)
    harness.post(ev.ConfigureTier(settings))
    harness.recover({SSD: harness.tiers[SSD]})
    assert engine.found(blocks) == (), "not before all is known"
    set_admin_state(harness, SSD, AdminState.ACTIVE)
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [SSD] * 3


def test_who_watches_is_told_all_again_only_where_it_is_offered_otherwise():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    stored(harness, engine, 1, 2)
    (session,) = harness.node.sessions.values()
    feed = harness.node.feeds.open(session.key_space, lambda: None)

    def told():
        while feed.has_news:
            yield from ((each.tier, len(each.keys)) for each in feed.take())

    everything = list(told())
    assert everything[-2:] == [(CPU, 2), (SSD, 2)]
    set_admin_state(harness, SSD, AdminState.READ_ONLY)
    set_admin_state(harness, SSD, AdminState.ACTIVE)
    assert list(told()) == []
    set_admin_state(harness, SSD, AdminState.DETACHING)
    assert list(told()) == everything[:-1]
    set_admin_state(harness, SSD, AdminState.READ_ONLY)
    assert list(told()) == everything


def test_what_lingers_is_not_due_while_a_tier_is_drained():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    stored(harness, engine, 1)
    set_admin_state(harness, SSD, AdminState.READ_ONLY)
    harness.advance(1000 * MS)
    assert harness.node.next_deadline_ns() is None
