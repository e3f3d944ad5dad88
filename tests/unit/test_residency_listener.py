"""The index and the history agree on parents and residency, however a block arrives."""

from itertools import islice

import numpy as np
import pytest
from dialogue import CPU, REMOTE, SSD, empty_cpu, engine_on

from kvtier.config import Config
from kvtier.config.model import PolicyConfig
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.core.request import RequestTraits
from kvtier.core.slow_tier import AdminState
from kvtier.daemon.policies import policies
from kvtier.node.invariants import check_memory
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.checked_eviction import CheckedEviction
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.memory import MemoryTier

SLOTS = 64
EVICTIONS = list(EVICTION_POLICIES)


def open_harness(tiers, eviction="rd-sec", *, num_slabs=1):
    """Return a daemon that has just started: only the index knows what its tiers hold."""
    chosen = policies(Config(policy=PolicyConfig(eviction=eviction)))
    harness = NodeHarness(
        tiers,
        HarnessSettings(num_slabs=num_slabs, slab_bytes=SLOTS // num_slabs * 4096),
        eviction=CheckedEviction(chosen.eviction),
        history=chosen.history,
    )
    harness.recover({name: tier for name, tier in tiers.items() if name is SSD})
    return harness


def holding(name, *chains):
    """Return a tier with these chains, which an earlier run or another node has stored."""
    tier = MemoryTier(1 << 20, name=name)
    harness = NodeHarness({name: tier}, HarnessSettings(num_slabs=2, slab_bytes=1 << 20))
    engine = engine_on(harness)
    for numbers in chains:
        while engine.store(engine.chain(numbers)).lease:
            harness.settle()
    return tier


def warm(harness, engine, blocks):
    hashes = b"".join(block.header.block_hash for block in blocks)
    harness.ask(
        lambda call: ev.Warm(
            call, engine.key_space, blocks[0].header.tenant, hashes, harness.clock() + 10**9
        )
    )


def warm_the_end_of_what_was_loaded(harness, engine, blocks):
    """A request names only the first blocks of the chain, and the others are warmed."""
    load = engine.load(blocks[:3])
    settle_newest_first(harness)
    load.take()
    load.release()
    warm(harness, engine, blocks)


def warm_two_branches(harness, engine, blocks):
    warm(harness, engine, engine.chain([0, 1, 2, 80, 81]))
    settle_newest_first(harness)
    warm(harness, engine, blocks)


def settle_newest_first(harness):
    """Carry out waiting actions newest first, so that children arrive before their parents."""
    while harness.waiting:
        harness.carry_out(harness.waiting[-1])


def evict_next(harness):
    """Evict the first block that the policy proposes, if there is one."""
    cache = harness.node.cache
    victims = cache.eviction.victims(cache.index, cache.slots, 4096)
    rows = np.array([*islice(victims, 1)], np.int64)
    cache.evict(rows)
    victims.close()
    return len(rows)


def chain_is_whole(harness, blocks):
    """Tell whether the chain's blocks in the CPU tier have no gap."""
    here = [harness.holds(block.header, CPU) for block in blocks]
    return here == sorted(here, reverse=True)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize(
    "come_in",
    [warm, warm_the_end_of_what_was_loaded, warm_two_branches],
)
def test_a_chain_leaves_tail_first_whichever_way_it_came_in(come_in, eviction):
    tier = holding(SSD, range(8), [0, 1, 2, 80, 81])
    harness = open_harness({SSD: tier}, eviction)
    engine = engine_on(harness)
    blocks = engine.chain(range(8))
    come_in(harness, engine, blocks)
    settle_newest_first(harness)
    assert all(harness.holds(block.header, CPU) for block in blocks)
    check_memory(harness.node)
    while evict_next(harness):
        assert chain_is_whole(harness, blocks)
    assert not harness.holds(blocks[0].header, CPU)
    check_memory(harness.node)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_blocks_of_another_size_take_the_tail_of_a_warmed_chain(eviction):
    harness = open_harness({SSD: holding(SSD, range(48))}, eviction, num_slabs=8)
    engine, other = engine_on(harness), engine_on(harness, "other", 7000)
    blocks = engine.chain(range(48))
    for _ in range(6):
        warm(harness, engine, blocks)
        harness.settle()
    assert all(harness.holds(block.header, CPU) for block in blocks)
    for number in range(16):
        other.store(other.chain([number]))
        harness.settle()
        assert chain_is_whole(harness, blocks)
    assert not harness.holds(blocks[-1].header, CPU)


def test_remote_blocks_of_another_node_are_told_with_their_parents():
    harness = open_harness({REMOTE: holding(REMOTE, range(6))})
    engine = engine_on(harness)
    blocks = engine.chain(range(6))
    engine.lookup(blocks)
    (probe,) = (work for work in harness.waiting if isinstance(work, ac.ExistsQuery))
    harness.node.cache.residency_listener.report_arrivals()
    harness.carry_out(probe)
    harness.node.cache.residency_listener.report_arrivals()  # before the request itself is counted
    check_memory(harness.node)


def test_an_attached_disk_may_hold_what_the_history_remembers():
    harness = open_harness({SSD: holding(SSD)})
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    harness.settle()
    lane = harness.node.transfers.lanes[SSD]
    harness.post(ev.SetAdminState(SSD, AdminState.DETACHED))
    harness.post(ev.ForgetRows(SSD, 0, harness.node.cache.index.extent))
    empty_cpu(harness)
    harness.post(ev.ConfigureTier(lane.tier))
    harness.recover({SSD: harness.tiers[SSD]})
    check_memory(harness.node)


def test_what_a_request_goes_on_with_may_have_been_stored_before_the_restart():
    harness = open_harness({SSD: holding(SSD, range(6))})
    engine = engine_on(harness)
    blocks = engine.chain(range(6))
    engine.answer(engine.lookup(blocks[:2], traits=RequestTraits(request_id="r")))
    engine.prepare(blocks, 2, traits=RequestTraits(request_id="r"))
    check_memory(harness.node)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_warming_and_asking_leaves_both_in_agreement(seed):
    draw = np.random.default_rng(seed)
    chains = [[*range(8)], [0, 1, 2, 80, 81], [0, 1, 2, 3, 4, 90], [50, 51, 52]]
    harness = open_harness({SSD: holding(SSD, *chains)}, EVICTIONS[seed % len(EVICTIONS)])
    engine = engine_on(harness)
    for step in range(60):
        blocks = engine.chain(chains[draw.integers(len(chains))])
        blocks = blocks[: draw.integers(1, len(blocks) + 1)]
        match draw.integers(5):
            case 0:
                warm(harness, engine, blocks)
            case 1:
                engine.announce(blocks, RequestTraits())
            case 2:
                engine.answer(engine.lookup(blocks))
            case 3:
                engine.store(engine.chain([100 + step]))
            case 4 if harness.waiting:
                harness.carry_out(harness.waiting[draw.integers(len(harness.waiting))])
        check_memory(harness.node)
