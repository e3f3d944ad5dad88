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
    open_stage,
    rows_of,
)

from kvtier.core.identity import NO_TENANT, Selection, unpack_headers
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.tiers.base import MissReason

TENANT = b"tenant number 1."
OURS = Selection(tenant=TENANT)


def tenants_of(stage, tier):
    return {header.tenant for header in unpack_headers(stage.tiers[tier].headers())}


def test_a_drop_takes_exactly_a_tenants_blocks_out_of_every_tier():
    stage = open_stage(SSD, REMOTE, slots=64)
    engine = engine_on(stage)
    ours, others = engine.chain(range(4), TENANT), engine.chain(range(4))
    engine.store(ours)
    engine.store(others)
    stage.settle()
    call = drop(stage, CPU, SSD, REMOTE, selection=OURS)
    stage.settle()
    assert [(d.num_blocks, d.num_bytes, d.kept_blocks) for d in stage.answers[call]] == [
        (4, 12_000, 0)
    ] * 3
    assert tenants_of(stage, SSD) == tenants_of(stage, REMOTE) == {NO_TENANT}
    assert engine.found(others) == (CPU,) * 4
    assert [rows_of(stage, tier, OURS) for tier in (CPU, SSD, REMOTE)] == [0, 0, 0]


def test_a_drop_of_a_key_space_spares_the_others():
    stage = open_stage(SSD, slots=64)
    one, two = engine_on(stage, "one"), engine_on(stage, "two", payload_bytes=4000)
    for engine in (one, two):
        engine.store(engine.chain(range(3)))
    stage.settle()
    call = drop(stage, CPU, SSD, selection=Selection(key_space=one.key_space))
    stage.settle()
    assert [d.num_blocks for d in stage.answers[call]] == [3, 3]
    assert two.found(two.chain(range(3))) == (CPU,) * 3
    empty_cpu(stage)
    assert two.found(two.chain(range(3))) == (SSD,) * 3


def test_a_store_prepared_before_a_drop_and_completed_after_it_is_not_published():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3), TENANT)
    granted = engine.prepare(blocks)
    checksums = [checksum for checksum in engine.copy(granted, blocks) if checksum]
    call = drop(stage, CPU, SSD, selection=OURS, within_ns=500 * MS)
    stage.settle()
    stage.advance(500 * MS)
    cpu, ssd = stage.answers[call]
    assert (cpu.num_blocks, cpu.kept_blocks) == (0, 3)  # still in memory, and nobody's to serve
    assert not ssd.error
    assert engine.complete(granted, checksums) == 0
    stage.settle()
    assert rows_of(stage, CPU) == rows_of(stage, SSD) == 0
    assert len(engine.store(blocks).indexes) == 3
    stage.settle()
    stage.check_idle()


def test_a_drop_answers_as_soon_as_the_store_under_way_has_ended():
    stage = open_stage()
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = engine.chain(range(3), TENANT)
    granted = engine.prepare(blocks)
    waiting = other.load(blocks)
    call = drop(stage, CPU, selection=OURS)
    assert call not in stage.answers
    engine.complete(granted, [c for c in engine.copy(granted, blocks) if c])
    assert stage.answers[call][0].kept_blocks == 0
    assert waiting.take() == []
    assert waiting.end == "failed"
    waiting.release()
    assert rows_of(stage, CPU) == 0
    stage.check_idle()


def test_a_block_being_read_up_does_not_outlive_the_drop():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    load = engine.load(blocks)
    (read,) = stage.waiting
    call = drop(stage, CPU, SSD, selection=OURS)
    stage.settle()
    assert read not in stage.waiting
    assert [d.kept_blocks for d in stage.answers[call]] == [0, 0]
    assert load.take() == []
    assert load.end == "failed"
    assert rows_of(stage, CPU) == rows_of(stage, SSD) == 0
    load.release()
    stage.check_idle()


def test_nothing_is_read_up_from_a_tier_that_is_yet_to_be_purged():
    stage = open_stage(SSD, REMOTE)
    engine = engine_on(stage)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    call = drop(stage, CPU, SSD, REMOTE, selection=OURS)
    purges = list(stage.waiting)
    assert [work.tier for work in purges] == [SSD, REMOTE]
    assert engine.found(blocks) == ()
    load = engine.load(blocks)
    load.take()
    assert load.end == "absent"
    load.release()
    assert engine.prepare(blocks).reason == "dropping"
    stage.settle()
    assert len(stage.answers[call]) == 3
    assert rows_of(stage, CPU) == 0
    assert len(engine.store(blocks).indexes) == 3


def test_a_write_under_way_is_waited_for_and_one_that_waits_is_not_begun():
    stage = open_stage(SSD, slots=64, workers=1)
    engine = engine_on(stage)
    blocks = engine.chain(range(12), TENANT)
    engine.store(blocks)
    (write,) = stage.waiting  # eight of them; four still wait
    call = drop(stage, SSD, selection=OURS)
    assert stage.waiting == [write]
    stage.carry_out(write)
    (purge,) = stage.waiting
    assert isinstance(purge, ac.Purge)
    stage.carry_out(purge)
    assert stage.answers[call][0].num_blocks == 8
    stage.settle()
    assert tenants_of(stage, SSD) == set()
    assert engine.found(blocks) == (CPU,) * 12
    stage.check_idle()


def test_others_are_written_while_a_drop_waits():
    stage = open_stage(SSD, slots=64)
    engine = engine_on(stage)
    engine.store(engine.chain([1], TENANT))
    stage.settle()
    drop(stage, SSD, selection=OURS)
    (purge,) = stage.waiting
    others = engine.chain([2])
    engine.store(others)
    assert [type(work) for work in stage.waiting] == [ac.Purge, ac.Write]
    stage.carry_out(stage.waiting[1])
    assert stage.holds(others[0].header, SSD)
    stage.carry_out(purge)
    assert stage.holds(others[0].header, SSD)


def test_a_leased_block_is_served_to_nobody_else_and_leaves_with_its_lease():
    stage = open_stage()
    engine, other = engine_on(stage), engine_on(stage, "other")
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    load = engine.load(blocks)
    call = drop(stage, CPU, selection=OURS)
    assert other.found(blocks) == ()
    assert load.take() == [CPU] * 3  # it was told so before
    assert call not in stage.answers
    load.release()
    assert stage.answers[call][0].num_blocks == 3
    assert rows_of(stage, CPU) == 0
    assert metric(stage, "kvtier_dropped_blocks_total", tier="cpu") == 3


def test_a_lookup_that_waits_for_a_probe_hears_nothing_outdated():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    blocks = engine.chain(range(4), TENANT)
    stage.tiers[REMOTE].write(blocks, 1 << 62)
    lookup = engine.lookup(blocks)
    (probe,) = stage.waiting
    answer = stage.completion(probe)  # the tier said yes, and nobody heard it yet
    stage.waiting.remove(probe)
    drop(stage, REMOTE, selection=OURS)
    assert engine.answer(lookup) == ac.LookupResult((), "absent")
    stage.post(answer)
    stage.settle()
    assert rows_of(stage, REMOTE) == 0
    stage.check_idle()


def test_no_lookup_asks_a_tier_that_is_being_purged():
    stage = open_stage(REMOTE)
    engine = engine_on(stage)
    drop(stage, REMOTE, selection=OURS)
    assert engine.answer(engine.lookup(engine.chain(range(4), TENANT))) == ac.LookupResult(
        (), "absent"
    )
    call = engine.lookup(engine.chain(range(4)))
    stage.settle()
    assert engine.answer(call) == ac.LookupResult((), "absent")
    outcome = {"outcome": "out"}
    assert metric(stage, "kvtier_probed_lookups_total", **outcome) == 1


def test_a_purge_that_comes_after_the_deadline_keeps_its_blocks_out_until_it_ends():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    call = drop(stage, SSD, selection=OURS, within_ns=400 * MS)
    stage.advance(400 * MS)
    (ssd,) = stage.answers[call]
    assert (ssd.kept_blocks, bool(ssd.error)) == (3, True)
    assert engine.found(blocks) == ()
    stage.settle()
    assert rows_of(stage, SSD) == 0
    assert len(engine.store(blocks).indexes) == 3
    stage.settle()
    assert tenants_of(stage, SSD) == {TENANT}


def test_a_drop_behind_a_hung_write_ends_at_its_deadline():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    (hung,) = stage.waiting
    call = drop(stage, CPU, SSD, selection=OURS, within_ns=400 * MS)
    stage.advance(400 * MS)
    cpu, ssd = stage.answers[call]
    assert (cpu.num_blocks, cpu.kept_blocks) == (0, 3)
    assert ssd.error
    assert engine.found(blocks) == ()
    stage.carry_out(hung)
    assert rows_of(stage, CPU) == 0
    stage.check_idle()


@pytest.mark.parametrize("tiers", [(CPU,), (SSD,), (CPU, SSD, GPU)])
def test_two_drops_at_once_close_each_until_it_is_done(tiers):
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3), TENANT)
    engine.store(blocks)
    calls = [drop(stage, *tiers, selection=OURS), drop(stage, CPU, SSD)]
    stage.settle()
    for order in list(stage.waiting):
        engine.report(order.order, 1)
    assert all(call in stage.answers for call in calls)
    node = stage.node
    assert node.cache.closed == node.transfers.lanes[SSD].closed == []
    assert node.transfers.lanes[SSD].purging is None
    assert rows_of(stage, CPU) == rows_of(stage, SSD) == 0


def test_what_a_scrub_found_damaged_is_served_no_more():
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    hashes = [block.header.block_hash for block in blocks]
    stage.post(ev.BlocksLost(SSD, hashes[1] + b"nobody knows it.", "corrupt"))
    assert engine.found(blocks) == (SSD,)
    stage.post(ev.BlocksLost(SSD, hashes[0], "expired"))
    assert engine.found(blocks) == ()
    assert len(engine.prepare(blocks).indexes) == 2
    assert metric(stage, "kvtier_quarantined_blocks_total", tier="ssd") == 2
    evicted = [
        metric(stage, "kvtier_evicted_blocks_total", tier="ssd", reason=reason)
        for reason in ("corrupt", "expired")
    ]
    assert evicted == [1, 1]


@pytest.mark.parametrize("reason", list(MissReason))
def test_damage_that_a_read_finds_is_counted(reason):
    stage = open_stage(SSD)
    engine = engine_on(stage)
    blocks = engine.chain([1])
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    load = engine.load(blocks)
    (read,) = stage.waiting
    stage.post(ev.ReadDone(read.transfer, (reason,), 0.001))
    load.take()
    assert load.end == "failed"
    assert metric(stage, "kvtier_miss_blocks_total", tier="ssd", reason=reason) == 1
    is_damage = reason in {"checksum", "header", "length", "seal"}
    assert metric(stage, "kvtier_quarantined_blocks_total", tier="ssd") == is_damage
    assert metric(stage, "kvtier_refused_samples_total") == 0
