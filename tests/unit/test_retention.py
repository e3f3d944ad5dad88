"""What is kept stays while others can go, within its budget, and never keeps a store out."""

import pytest
from dialogue import CPU, REMOTE, SSD, drop, empty_cpu, engine_on, metric
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.index import IS_KEPT
from kvtier.core.request import RequestTraits
from kvtier.core.residency import Residency
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.memory import MemoryTier

SECOND = 1_000_000_000
SLOTS = 16
BUDGET = 8


def open_harness(*tiers, slots=SLOTS, share=0.5, slabs=1):
    return NodeHarness(
        {name: MemoryTier(1 << 22, name=name) for name in tiers},
        HarnessSettings(num_slabs=slabs, slab_bytes=slots // slabs * 4096, pin_share=share),
    )


def pin(harness, engine, blocks, ttl_s=60.0):
    hashes = b"".join(block.header.block_hash for block in blocks)
    tenant = blocks[0].header.tenant
    return harness.ask(
        lambda call: ev.PinBlocks(call, engine.key_space, tenant, hashes, int(ttl_s * SECOND))
    )


def warm(harness, engine, blocks):
    hashes = b"".join(block.header.block_hash for block in blocks)
    tenant = blocks[0].header.tenant
    deadline_ns = harness.clock() + SECOND
    return harness.ask(lambda call: ev.Warm(call, engine.key_space, tenant, hashes, deadline_ns))


def fill(harness, engine, num_blocks=2 * SLOTS, first=1000):
    for number in range(first, first + num_blocks):
        assert engine.store(engine.chain([number])).lease
        harness.settle()


def store(engine, blocks):
    """Store a chain in as many pieces as it takes: one store may hold a quarter of the tier."""
    while engine.store(blocks).lease:
        pass


def here(harness, blocks):
    return sum(harness.holds(block.header, CPU) for block in blocks)


def retained_bytes(harness):
    return harness.node.retention.retained_bytes()


def test_a_pin_outlives_pressure_until_its_time_is_over():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    assert pin(harness, engine, blocks) == ac.PinResult(4)
    fill(harness, engine)
    assert here(harness, blocks) == 4
    assert retained_bytes(harness) == 4 * 4096
    harness.advance(61 * SECOND)
    fill(harness, engine, first=2000)
    assert here(harness, blocks) == 0
    assert retained_bytes(harness) == 0
    harness.check_idle()


def test_a_pin_is_taken_back_by_a_time_of_none():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    pin(harness, engine, blocks)
    assert pin(harness, engine, blocks, 0) == ac.PinResult(0)
    fill(harness, engine)
    assert here(harness, blocks) == 0


def test_a_pin_waits_for_blocks_that_come_later_and_survives_a_drop():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    assert pin(harness, engine, blocks) == ac.PinResult(4)
    assert retained_bytes(harness) == 0
    engine.store(blocks)
    drop(harness, CPU)
    assert here(harness, blocks) == 0
    engine.store(blocks)
    fill(harness, engine)
    assert here(harness, blocks) == 4


def test_over_the_budget_the_oldest_pin_is_given_up_from_its_tail():
    harness = open_harness()
    engine = engine_on(harness)
    first, second = engine.chain(range(6)), engine.chain(range(20, 26))
    for blocks in (first, second):
        store(engine, blocks)
        assert pin(harness, engine, blocks) == ac.PinResult(6)
    fill(harness, engine)
    assert [here(harness, [block]) for block in first] == [1, 1, 0, 0, 0, 0]
    assert here(harness, second) == 6


def test_a_pin_larger_than_the_budget_keeps_the_head():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(12))
    assert pin(harness, engine, blocks) == ac.PinResult(BUDGET, "budget")


def test_without_a_budget_nothing_is_kept():
    harness = open_harness(share=0.0)
    engine = engine_on(harness)
    assert pin(harness, engine, engine.chain(range(4))) == ac.PinResult(0, "budget")


def test_a_chain_of_an_unknown_model_cannot_be_pinned_or_warmed():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.key_space = b"?" * 16
    assert pin(harness, engine, blocks) == ac.PinResult(0, "unknown")
    assert warm(harness, engine, blocks) == ac.WarmResult(0, 0, "unknown")


@pytest.mark.parametrize("hashes", [b"short", bytes(16) * 20_000])
def test_a_chain_that_is_none_is_refused(hashes):
    harness = open_harness()
    for make in (
        lambda call: ev.PinBlocks(call, b"k" * 16, b"t" * 16, hashes, SECOND),
        lambda call: ev.Warm(call, b"k" * 16, b"t" * 16, hashes, 10 * SECOND),
    ):
        answer = harness.ask(make)
        assert isinstance(answer, ac.Refused)
        assert answer.kind == "chain"


@pytest.mark.slow
@pytest.mark.parametrize(
    "traits",
    [RequestTraits(priority=1), RequestTraits(ttl_s=30.0), RequestTraits(priority=2, ttl_s=30.0)],
)
def test_what_a_request_wishes_is_kept(traits):
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks, traits=traits)
    fill(harness, engine)
    assert here(harness, blocks) == 4
    harness.advance(700 * SECOND)
    fill(harness, engine, first=2000)
    assert here(harness, blocks) == 0


def test_a_priority_outranks_a_lower_one_and_a_pin_outranks_both():
    harness = open_harness()
    engine = engine_on(harness)
    low, high, pinned = (engine.chain(range(n, n + 4)) for n in (0, 20, 40))
    engine.store(pinned)
    pin(harness, engine, pinned)
    engine.store(high, traits=RequestTraits(priority=5))
    engine.store(low, traits=RequestTraits(priority=1))
    fill(harness, engine)
    assert [here(harness, each) for each in (low, high, pinned)] == [0, 4, 4]


@pytest.mark.parametrize("ttl_s", [float("inf"), 1e300])
def test_an_absurd_time_to_live_is_bounded(ttl_s):
    harness = open_harness()
    engine = engine_on(harness)
    engine.store(engine.chain(range(4)), traits=RequestTraits(ttl_s=ttl_s))
    harness.advance(31 * 86_400 * SECOND)
    fill(harness, engine)
    assert retained_bytes(harness) == 0


def test_an_announced_request_finds_its_blocks_when_its_turn_comes():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    engine.announce(blocks, RequestTraits(request_id="a"))
    harness.settle()
    assert here(harness, blocks) == 4
    assert metric(harness, "kvtier_prefetched_blocks_total", reason="announced") == 4
    fill(harness, engine)
    assert engine.found(blocks) == (CPU,) * 4
    harness.check_idle()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["looked up", "over", "late", "gone"])
def test_an_announced_request_is_waited_for_no_longer_than_that(how):
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    engine.announce(blocks, RequestTraits(request_id="a"))
    fill(harness, engine)
    assert here(harness, blocks) == 4
    if how == "looked up":
        engine.answer(engine.lookup(blocks, traits=RequestTraits(request_id="a")))
    elif how == "over":
        engine.announce(engine.chain([999]), RequestTraits(request_id="b"), over=["a"])
    elif how == "gone":
        harness.post(ev.SessionEnded(engine.ticket))
        engine = engine_on(harness)
    else:
        harness.advance(61 * SECOND)
    fill(harness, engine, 4 * SLOTS, first=2000)
    assert here(harness, blocks) == 0


def test_warming_brings_blocks_up_behind_real_loads():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    cold, wanted = engine.chain(range(8)), engine.chain(range(50, 58))
    for blocks in (cold, wanted):
        engine.store(blocks)
        harness.settle()
    empty_cpu(harness)
    fill_one = engine.chain([500])
    assert warm(harness, engine, cold) == ac.WarmResult(0, 8)
    assert warm(harness, engine, cold) == ac.WarmResult(0, 8)
    load = engine.load(wanted)
    engine.store(fill_one)
    harness.settle()
    assert load.take() == [SSD] * 8
    assert warm(harness, engine, cold) == ac.WarmResult(8, 0)
    assert metric(harness, "kvtier_prefetched_blocks_total", reason="warm") == 8
    load.release()
    harness.check_idle()


def test_what_is_being_warmed_can_be_loaded_and_given_up():
    harness = open_harness(SSD, slots=128)
    engine = engine_on(harness)
    chains = [engine.chain(range(n, n + 8)) for n in (0, 50)]
    for blocks in chains:
        engine.store(blocks)
        harness.settle()
    empty_cpu(harness)
    for blocks in chains:
        warm(harness, engine, blocks)
    engine.load(chains[1]).release()  # before any of it was read
    load = engine.load(chains[0])
    harness.settle()
    assert load.take() == [SSD] * 8
    load.release()
    harness.check_idle()


def test_warming_ends_where_the_tier_fails():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    assert warm(harness, engine, blocks) == ac.WarmResult(0, 2)
    (work,) = harness.waiting
    harness.fail(work)
    assert here(harness, blocks) == 0
    harness.check_idle()


def test_warming_pushes_nothing_out_that_may_be_worth_more():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    harness.settle()
    fill(harness, engine, SLOTS + 2)
    assert warm(harness, engine, blocks) == ac.WarmResult(0, 0, "worth")
    assert warm(harness, engine, engine.chain([7, 8])) == ac.WarmResult(0, 0, "absent")


def test_warming_fills_a_bounded_part_at_once():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = engine.chain(range(16))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    assert warm(harness, engine, blocks) == ac.WarmResult(0, 8, "busy")
    harness.settle()
    assert warm(harness, engine, blocks) == ac.WarmResult(8, 8)
    harness.settle()
    assert here(harness, blocks) == 16


def test_no_store_is_kept_out_by_pins_where_loads_and_writes_hold_the_rest():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    pinned = engine.chain(range(BUDGET))
    store(engine, pinned)
    assert pin(harness, engine, pinned) == ac.PinResult(BUDGET)
    harness.settle()
    held = engine.chain(range(50, 58))
    store(engine, held)
    harness.settle()
    load = engine.load(held)
    assert load.announced() == 8
    granted = engine.store(engine.chain([900]))
    assert granted.lease
    assert here(harness, pinned) == BUDGET - 1
    load.release()
    harness.settle()
    harness.check_idle()


def test_what_is_kept_and_not_there_is_given_up_before_what_is_if_it_is_older():
    """More of it than is looked at together; of the other just what is needed, from its tail."""
    harness = open_harness(SSD, slots=160, share=0.95)
    engine = engine_on(harness)
    elsewhere, kept, held = (engine.chain(range(n, n + 80)) for n in (0, 100, 200))
    assert pin(harness, engine, elsewhere[:70]) == ac.PinResult(70)
    for blocks in (kept, held):
        store(engine, blocks)
        harness.settle()
    assert pin(harness, engine, kept) == ac.PinResult(80)
    load = engine.load(held)
    assert load.announced() == 80
    retention = harness.node.retention
    assert engine.store(engine.chain([900])).lease
    assert here(harness, kept) == 79
    named = [retention.is_kept(block.header.block_hash) for block in elsewhere + kept]
    assert named == [False] * 80 + [True] * 79 + [False]
    load.release()
    harness.settle()
    harness.check_idle()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 3)), max_size=30))
def test_any_store_finds_room_whatever_is_kept(steps):
    """Everything is kept as far as the budget goes, by all means there are, in any order."""
    harness = open_harness(SSD)
    engine = engine_on(harness)
    retention = harness.node.retention
    for number, (where, length, how) in enumerate(steps):
        blocks = engine.chain(range(where * 10, where * 10 + length))
        if how == 0:
            pin(harness, engine, blocks, float(number))
        elif how == 1:
            engine.announce(blocks, RequestTraits(request_id=f"{where}", priority=number % 3))
        else:
            engine.store(blocks, traits=RequestTraits(priority=number % 4, ttl_s=float(length)))
        if how == 3:
            harness.advance(SECOND)
        harness.settle()
        assert engine.store(engine.chain([number + 1000])).lease, "a store was kept out"
        harness.settle()
        kept = harness.node.cache.index.flags & IS_KEPT != 0
        is_here = harness.node.cache.index.state[:, 0] != Residency.ABSENT
        assert retention.retained_bytes() <= BUDGET * 4096
        assert int((kept & is_here).sum()) * 4096 == retention.retained_bytes()
    harness.check_idle()
