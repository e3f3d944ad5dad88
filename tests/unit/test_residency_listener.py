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


def open_stage(tiers, eviction="rd-sec", *, num_slabs=1):
    """Return a daemon that has just started: only the index knows what its tiers hold."""
    chosen = policies(Config(policy=PolicyConfig(eviction=eviction)))
    stage = NodeHarness(
        tiers,
        HarnessSettings(num_slabs=num_slabs, slab_bytes=SLOTS // num_slabs * 4096),
        eviction=CheckedEviction(chosen.eviction),
        history=chosen.history,
    )
    stage.recover({name: tier for name, tier in tiers.items() if name is SSD})
    return stage


def holding(name, *chains):
    """Return a tier with these chains, which an earlier run or another node has stored."""
    tier = MemoryTier(1 << 20, name=name)
    stage = NodeHarness({name: tier}, HarnessSettings(num_slabs=2, slab_bytes=1 << 20))
    engine = engine_on(stage)
    for numbers in chains:
        while engine.store(engine.chain(numbers)).lease:
            stage.settle()
    return tier


def warm(stage, engine, blocks):
    hashes = b"".join(block.header.block_hash for block in blocks)
    stage.ask(
        lambda call: ev.Warm(
            call, engine.key_space, blocks[0].header.tenant, hashes, stage.clock() + 10**9
        )
    )


def warm_the_end_of_what_was_loaded(stage, engine, blocks):
    """A request names only the first blocks of the chain, and the others are warmed."""
    load = engine.load(blocks[:3])
    settle_newest_first(stage)
    load.take()
    load.release()
    warm(stage, engine, blocks)


def warm_two_branches(stage, engine, blocks):
    warm(stage, engine, engine.chain([0, 1, 2, 80, 81]))
    settle_newest_first(stage)
    warm(stage, engine, blocks)


def settle_newest_first(stage):
    """Carry out waiting actions newest first, so that children arrive before their parents."""
    while stage.waiting:
        stage.carry_out(stage.waiting[-1])


def evict_next(stage):
    """Evict the first block that the policy proposes, if there is one."""
    cache = stage.node.cache
    victims = cache.eviction.victims(cache.index, cache.slots, 4096)
    rows = np.array([*islice(victims, 1)], np.int64)
    cache.evict(rows)
    victims.close()
    return len(rows)


def chain_is_whole(stage, blocks):
    """Tell whether the chain's blocks in the CPU tier have no gap."""
    here = [stage.holds(block.header, CPU) for block in blocks]
    return here == sorted(here, reverse=True)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize(
    "come_in",
    [warm, warm_the_end_of_what_was_loaded, warm_two_branches],
)
def test_a_chain_leaves_tail_first_whichever_way_it_came_in(come_in, eviction):
    tier = holding(SSD, range(8), [0, 1, 2, 80, 81])
    stage = open_stage({SSD: tier}, eviction)
    engine = engine_on(stage)
    blocks = engine.chain(range(8))
    come_in(stage, engine, blocks)
    settle_newest_first(stage)
    assert all(stage.holds(block.header, CPU) for block in blocks)
    check_memory(stage.node)
    while evict_next(stage):
        assert chain_is_whole(stage, blocks)
    assert not stage.holds(blocks[0].header, CPU)
    check_memory(stage.node)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_blocks_of_another_size_take_the_tail_of_a_warmed_chain(eviction):
    stage = open_stage({SSD: holding(SSD, range(48))}, eviction, num_slabs=8)
    engine, other = engine_on(stage), engine_on(stage, "other", 7000)
    blocks = engine.chain(range(48))
    for _ in range(6):
        warm(stage, engine, blocks)
        stage.settle()
    assert all(stage.holds(block.header, CPU) for block in blocks)
    for number in range(16):
        other.store(other.chain([number]))
        stage.settle()
        assert chain_is_whole(stage, blocks)
    assert not stage.holds(blocks[-1].header, CPU)


def test_remote_blocks_of_another_node_are_told_with_their_parents():
    stage = open_stage({REMOTE: holding(REMOTE, range(6))})
    engine = engine_on(stage)
    blocks = engine.chain(range(6))
    engine.lookup(blocks)
    (probe,) = (work for work in stage.waiting if isinstance(work, ac.ExistsQuery))
    stage.node.cache.residency_listener.tell()
    stage.carry_out(probe)
    stage.node.cache.residency_listener.tell()  # before the request itself is counted
    check_memory(stage.node)


def test_an_attached_disk_may_hold_what_the_history_remembers():
    stage = open_stage({SSD: holding(SSD)})
    engine = engine_on(stage)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    stage.settle()
    lane = stage.node.transfers.lanes[SSD]
    stage.post(ev.SetAdminState(SSD, AdminState.DETACHED))
    stage.post(ev.ForgetRows(SSD, 0, stage.node.cache.index.extent))
    empty_cpu(stage)
    stage.post(ev.ConfigureTier(lane.tier))
    stage.recover({SSD: stage.tiers[SSD]})
    check_memory(stage.node)


def test_what_a_request_goes_on_with_may_have_been_stored_before_the_restart():
    stage = open_stage({SSD: holding(SSD, range(6))})
    engine = engine_on(stage)
    blocks = engine.chain(range(6))
    engine.answer(engine.lookup(blocks[:2], traits=RequestTraits(request_id="r")))
    engine.prepare(blocks, 2, traits=RequestTraits(request_id="r"))
    check_memory(stage.node)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_warming_and_asking_leaves_both_in_agreement(seed):
    draw = np.random.default_rng(seed)
    chains = [[*range(8)], [0, 1, 2, 80, 81], [0, 1, 2, 3, 4, 90], [50, 51, 52]]
    stage = open_stage({SSD: holding(SSD, *chains)}, EVICTIONS[seed % len(EVICTIONS)])
    engine = engine_on(stage)
    for step in range(60):
        blocks = engine.chain(chains[draw.integers(len(chains))])
        blocks = blocks[: draw.integers(1, len(blocks) + 1)]
        match draw.integers(5):
            case 0:
                warm(stage, engine, blocks)
            case 1:
                engine.announce(blocks, RequestTraits())
            case 2:
                engine.answer(engine.lookup(blocks))
            case 3:
                engine.store(engine.chain([100 + step]))
            case 4 if stage.waiting:
                stage.carry_out(stage.waiting[draw.integers(len(stage.waiting))])
        check_memory(stage.node)
