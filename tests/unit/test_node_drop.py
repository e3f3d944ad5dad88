"""Dialogues: what was dropped does not come back, and nothing else goes."""

import pytest
from dialogue import (
    CPU,
    GPU,
    MS,
    REMOTE,
    SSD,
    drop,
    empty_cpu,
    engine_on,
    metric,
    open_harness,
    rows_of,
)

from kvtier.core.identity import NO_TENANT, Selection, unpack_headers
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.tiers.base import MissReason

TENANT = b"tenant number 1."
OURS = Selection(tenant=TENANT)


def tenants_of(harness, tier):
    return {header.tenant for header in unpack_headers(harness.tiers[tier].headers())}


def test_a_drop_takes_exactly_a_tenants_blocks_out_of_every_tier():
    harness = open_harness(SSD, REMOTE, slots=64)
    engine = engine_on(harness)
    ours, others = engine.chain(range(4), TENANT), engine.chain(range(4))
    engine.store(ours)
    engine.store(others)
    harness.settle()
    call = drop(harness, CPU, SSD, REMOTE, selection=OURS)
    harness.settle()
    assert [(d.num_blocks, d.num_bytes, d.kept_blocks) for d in harness.answers[call]] == [
        (4, 12_000, 0)
    ] * 3
    assert tenants_of(harness, SSD) == tenants_of(harness, REMOTE) == {NO_TENANT}
    assert engine.found(others) == (CPU,) * 4
    assert [rows_of(harness, tier, OURS) for tier in (CPU, SSD, REMOTE)] == [0, 0, 0]


def test_a_drop_of_a_key_space_spares_the_others():
    harness = open_harness(SSD, slots=64)
    one, two = engine_on(harness, "one"), engine_on(harness, "two", payload_bytes=4000)
    for engine in (one, two):
        engine.store(engine.chain(range(3)))
    harness.settle()
    call = drop(harness, CPU, SSD, selection=Selection(key_space=one.key_space))
    harness.settle()
    assert [d.num_blocks for d in harness.answers[call]] == [3, 3]
    assert two.found(two.chain(range(3))) == (CPU,) * 3
    empty_cpu(harness)
    assert two.found(two.chain(range(3))) == (SSD,) * 3


def test_a_store_prepared_before_a_drop_and_completed_after_it_is_not_published():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3), TENANT)
    granted = engine.prepare(blocks)
    checksums = [checksum for checksum in engine.copy(granted, blocks) if checksum]
    call = drop(harness, CPU, SSD, selection=OURS, within_ns=500 * MS)
    harness.settle()
    harness.advance(500 * MS)
    cpu, ssd = harness.answers[call]
    assert (cpu.num_blocks, cpu.kept_blocks) == (0, 3)  # still in memory, and nobody's to serve
    assert not ssd.error
    assert engine.complete(granted, checksums) == 0
    harness.settle()
    assert rows_of(harness, CPU) == rows_of(harness, SSD) == 0
    assert len(engine.store(blocks).indexes) == 3
    harness.settle()
    harness.check_idle()


def test_a_drop_answers_as_soon_as_the_store_under_way_has_ended():
    harness = open_harness()
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = engine.chain(range(3), TENANT)
    granted = engine.prepare(blocks)
    waiting = other.load(blocks)
    call = drop(harness, CPU, selection=OURS)
    assert call not in harness.answers
    engine.complete(granted, [c for c in engine.copy(granted, blocks) if c])
    assert harness.answers[call][0].kept_blocks == 0
    assert waiting.take() == []
    assert waiting.end == "failed"
    waiting.release()
    assert rows_of(harness, CPU) == 0
    harness.check_idle()


def test_a_block_being_read_up_does_not_outlive_the_drop():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks)
    (read,) = harness.waiting
    call = drop(harness, CPU, SSD, selection=OURS)
    harness.settle()
    assert read not in harness.waiting
    assert [d.kept_blocks for d in harness.answers[call]] == [0, 0]
    assert load.take() == []
    assert load.end == "failed"
    assert rows_of(harness, CPU) == rows_of(harness, SSD) == 0
    load.release()
    harness.check_idle()


def test_nothing_is_read_up_from_a_tier_that_is_yet_to_be_purged():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    call = drop(harness, CPU, SSD, REMOTE, selection=OURS)
    purges = list(harness.waiting)
    assert [work.tier for work in purges] == [SSD, REMOTE]
    assert engine.found(blocks) == ()
    load = engine.load(blocks)
    load.take()
    assert load.end == "absent"
    load.release()
    assert engine.prepare(blocks).reason == "dropping"
    harness.settle()
    assert len(harness.answers[call]) == 3
    assert rows_of(harness, CPU) == 0
    assert len(engine.store(blocks).indexes) == 3


def test_a_write_under_way_is_waited_for_and_one_that_waits_is_not_begun():
    harness = open_harness(SSD, slots=64, workers=1)
    engine = engine_on(harness)
    blocks = engine.chain(range(12), TENANT)
    engine.store(blocks)
    (write,) = harness.waiting  # eight of them; four still wait
    call = drop(harness, SSD, selection=OURS)
    assert harness.waiting == [write]
    harness.carry_out(write)
    (purge,) = harness.waiting
    assert isinstance(purge, ac.Purge)
    harness.carry_out(purge)
    assert harness.answers[call][0].num_blocks == 8
    harness.settle()
    assert tenants_of(harness, SSD) == set()
    assert engine.found(blocks) == (CPU,) * 12
    harness.check_idle()


def test_others_are_written_while_a_drop_waits():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    engine.store(engine.chain([1], TENANT))
    harness.settle()
    drop(harness, SSD, selection=OURS)
    (purge,) = harness.waiting
    others = engine.chain([2])
    engine.store(others)
    assert [type(work) for work in harness.waiting] == [ac.Purge, ac.Write]
    harness.carry_out(harness.waiting[1])
    assert harness.holds(others[0].header, SSD)
    harness.carry_out(purge)
    assert harness.holds(others[0].header, SSD)


def test_a_leased_block_is_served_to_nobody_else_and_leaves_with_its_lease():
    harness = open_harness()
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    load = engine.load(blocks)
    call = drop(harness, CPU, selection=OURS)
    assert other.found(blocks) == ()
    assert load.take() == [CPU] * 3  # it was told so before
    assert call not in harness.answers
    load.release()
    assert harness.answers[call][0].num_blocks == 3
    assert rows_of(harness, CPU) == 0
    assert metric(harness, "kvtier_dropped_blocks_total", tier="cpu") == 3


def test_a_lookup_that_waits_for_a_probe_hears_nothing_outdated():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(4), TENANT)
    harness.tiers[REMOTE].write(blocks, 1 << 62)
    lookup = engine.lookup(blocks)
    (probe,) = harness.waiting
    answer = harness.completion(probe)  # the tier said yes, and nobody heard it yet
    harness.waiting.remove(probe)
    drop(harness, REMOTE, selection=OURS)
    assert engine.answer(lookup) == ac.LookupResult((), "absent")
    harness.post(answer)
    harness.settle()
    assert rows_of(harness, REMOTE) == 0
    harness.check_idle()


def test_no_lookup_asks_a_tier_that_is_being_purged():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    drop(harness, REMOTE, selection=OURS)
    assert engine.answer(engine.lookup(engine.chain(range(4), TENANT))) == ac.LookupResult(
        (), "absent"
    )
    call = engine.lookup(engine.chain(range(4)))
    harness.settle()
    assert engine.answer(call) == ac.LookupResult((), "absent")
    outcome = {"outcome": "out"}
    assert metric(harness, "kvtier_probed_lookups_total", **outcome) == 1


def test_a_purge_that_comes_after_the_deadline_keeps_its_blocks_out_until_it_ends():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    call = drop(harness, SSD, selection=OURS, within_ns=400 * MS)
    harness.advance(400 * MS)
    (ssd,) = harness.answers[call]
    assert (ssd.kept_blocks, bool(ssd.error)) == (3, True)
    assert engine.found(blocks) == ()
    harness.settle()
    assert rows_of(harness, SSD) == 0
    assert len(engine.store(blocks).indexes) == 3
    harness.settle()
    assert tenants_of(harness, SSD) == {TENANT}


def test_a_drop_behind_a_hung_write_ends_at_its_deadline():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    (hung,) = harness.waiting
    call = drop(harness, CPU, SSD, selection=OURS, within_ns=400 * MS)
    harness.advance(400 * MS)
    cpu, ssd = harness.answers[call]
    assert (cpu.num_blocks, cpu.kept_blocks) == (0, 3)
    assert ssd.error
    assert engine.found(blocks) == ()
    harness.carry_out(hung)
    assert rows_of(harness, CPU) == 0
    harness.check_idle()


@pytest.mark.parametrize("tiers", [(CPU,), (SSD,), (CPU, SSD, GPU)])
def test_two_drops_at_once_close_each_until_it_is_done(tiers):
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    calls = [drop(harness, *tiers, selection=OURS), drop(harness, CPU, SSD)]
    harness.settle()
    for order in list(harness.waiting):
        engine.report(order.order, 1)
    assert all(call in harness.answers for call in calls)
    node = harness.node
    assert node.cache.closed == node.transfers.lanes[SSD].closed == []
    assert node.transfers.lanes[SSD].purging is None
    assert rows_of(harness, CPU) == rows_of(harness, SSD) == 0


def test_what_a_scrub_found_damaged_is_served_no_more():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    hashes = [block.header.block_hash for block in blocks]
    harness.post(ev.BlocksLost(SSD, hashes[1] + b"nobody knows it.", "corrupt"))
    assert engine.found(blocks) == (SSD,)
    harness.post(ev.BlocksLost(SSD, hashes[0], "expired"))
    assert engine.found(blocks) == ()
    assert len(engine.prepare(blocks).indexes) == 2
    assert metric(harness, "kvtier_quarantined_blocks_total", tier="ssd") == 2
    evicted = [
        metric(harness, "kvtier_evicted_blocks_total", tier="ssd", reason=reason)
        for reason in ("corrupt", "expired")
    ]
    assert evicted == [1, 1]


@pytest.mark.parametrize("reason", list(MissReason))
def test_damage_that_a_read_finds_is_counted(reason):
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain([1])
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks)
    (read,) = harness.waiting
    harness.post(ev.ReadDone(read.transfer, (reason,), 0.001))
    load.take()
    assert load.end == "failed"
    assert metric(harness, "kvtier_miss_blocks_total", tier="ssd", reason=reason) == 1
    is_damage = reason in {"checksum", "header", "length", "seal"}
    assert metric(harness, "kvtier_quarantined_blocks_total", tier="ssd") == is_damage
    assert metric(harness, "kvtier_refused_samples_total") == 0
