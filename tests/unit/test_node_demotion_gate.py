"""Dialogues: what leaves the CPU tier is written below where that pays, and nowhere else."""

from collections import Counter, deque
from itertools import count

import pytest
from dialogue import SSD, engine_on, metric

from kvtier.core.admission import AdmitByWorth, AdmitEverything, QuantileGate, RefusalRule, Reject
from kvtier.core.fate import Fate
from kvtier.core.identity import EVERYTHING
from kvtier.core.plan import PlannerSettings
from kvtier.core.planner import Planner
from kvtier.core.request import RequestTraits
from kvtier.core.reuse.history import History
from kvtier.core.slow_tier import WriteMode
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.memory import MemoryTier

SECOND = 1_000_000_000
SHARED = [0, 1, 2, 3]


def open_harness(gate=None, *, slots=64, mode=WriteMode.DEMOTE, admission=None, flush_after_ns=0):
    history, planner = History(), Planner(PlannerSettings(mode="always"))
    gates = {SSD: gate or QuantileGate(1.0)}
    return NodeHarness(
        {SSD: MemoryTier(1 << 26, name=SSD)},
        HarnessSettings(
            num_slabs=1,
            slab_bytes=slots * 4096,
            write={SSD: mode},
            flush_after_ns=flush_after_ns,
        ),
        admission=admission or AdmitByWorth(history, planner, gates, is_ranked=False),
        history=history,
        planner=planner,
    )


def on_ssd(harness, blocks):
    hashes = [block.header.block_hash for block in blocks]
    return sum(harness.tiers[SSD].contains(hashes, 1 << 62))


def refused(harness, rule):
    return metric(harness, "kvtier_refused_blocks_total", tier="ssd", rule=rule)


def ask(harness, engine, blocks, num_prompt_blocks, name):
    """One request as an engine has it: looked up, loaded as far as it is there, and stored."""
    traits = RequestTraits(request_id=name)
    engine.answer(engine.lookup(blocks[:num_prompt_blocks], traits=traits))
    load = engine.load(blocks[:num_prompt_blocks])
    harness.settle()
    load.take()
    load.release()
    granted = engine.prepare(blocks, traits=traits, num_prompt_blocks=num_prompt_blocks)
    if granted.lease:
        engine.complete(granted, [sum_ for sum_ in engine.copy(granted, blocks) if sum_])
    harness.settle()


def test_nothing_is_written_when_it_is_stored():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(10))
    engine.store(blocks)
    harness.settle()
    assert on_ssd(harness, blocks) == 0
    assert harness.holds(blocks[9].header, "cpu")


@pytest.mark.slow
def test_what_has_to_go_is_written_before_it_goes():
    harness = open_harness(slots=64, admission=AdmitEverything())
    engine = engine_on(harness)
    chains = [engine.chain([number, number + 1, number + 2]) for number in range(0, 300, 3)]
    for chain in chains:
        engine.answer(engine.lookup(chain))
        engine.store(chain)
        harness.settle()
    for block in (block for chain in chains for block in chain):
        assert on_ssd(harness, [block]) or harness.holds(block.header, "cpu")
    assert refused(harness, "full") == 0
    harness.check_idle()


def live(harness, num_requests=300):
    """Let users come; returns by sort the blocks that those of the second half had.

    All share a system prompt. A third ask one thing about a document, and a third begin a chat of
    which half goes on minutes later; every request ends in generated tokens.
    """
    harness.is_checked = False  # thousands of events
    engine = engine_on(harness)
    fresh = count(100)
    sorts, waiting = {}, deque()

    def new(length):
        return [next(fresh) for _ in range(length)]

    for number in range(num_requests):
        harness.advance(16 * SECOND)
        if number % 3 == 0:
            pieces = [("shared", SHARED), ("one-off", new(10))]
        elif number % 3 == 1 or len(waiting) < 16:
            pieces = [("shared", SHARED), ("chat", new(4))]
            waiting.append(pieces)
        else:
            waiting.popleft()
            pieces = [*waiting.popleft(), ("tail", new(2))]
        pieces = [*pieces, ("generated", new(2))]
        blocks = engine.chain([number for _, numbers in pieces for number in numbers])
        names = [sort for sort, numbers in pieces for _ in numbers]
        ask(harness, engine, blocks, len(blocks) - 2, f"request {number}")
        if number > num_requests / 2:
            for sort, block in zip(names, blocks, strict=True):
                sorts.setdefault(block.header.block_hash, (sort, block))
    return sorts.values()


@pytest.mark.slow
def test_what_never_comes_back_costs_no_writes_once_that_was_learned():
    harness = open_harness(QuantileGate(1.0), slots=128)
    blocks = live(harness)
    offered = Counter(sort for sort, _ in blocks)
    written = Counter(sort for sort, block in blocks if on_ssd(harness, [block]))
    print({sort: f"{written[sort]} of {offered[sort]} written" for sort in offered})
    assert written["chat"] > offered["chat"] * 0.8
    for sort in ("one-off", "generated", "tail"):
        assert written[sort] < offered[sort] * 0.1, sort
    assert written["shared"] == 0  # they never have to go
    assert refused(harness, "worth") > 500


@pytest.mark.slow
def test_of_what_pays_the_gate_takes_its_share():
    gate = QuantileGate(0.25)
    live(open_harness(gate, slots=128))
    assert gate.num_taken == pytest.approx(gate.num_offered * 0.25, rel=0.2)


def test_a_parent_follows_its_child_whatever_it_is_worth():
    """Only the tail of a chain is taken by choice; what leads to it has to come too."""
    taken = []

    class TailsOnly(AdmitEverything):
        def decide(self, offer):
            if offer.tier is not SSD or offer.is_needed:
                return super().decide(offer)
            is_tail = offer.first_position == 9
            taken.extend(offer.keys if is_tail else ())
            return super().decide(offer) if is_tail else Reject(RefusalRule.BUDGET)

    harness = open_harness(slots=64, admission=TailsOnly())
    engine = engine_on(harness)
    chains = [engine.chain(range(number, number + 10)) for number in range(0, 300, 10)]
    for chain in chains:
        engine.store(chain)
        harness.settle()
    written = [on_ssd(harness, chain) for chain in chains]
    assert len(taken) >= 20
    assert set(written[:20]) == {10}


def test_a_refused_block_is_remembered_as_such():
    harness = open_harness(QuantileGate(0.0), slots=64)
    engine = engine_on(harness)
    first = engine.chain(range(10))
    engine.store(first)
    for number in range(100, 200):
        engine.store(engine.chain([number]))
        harness.settle()
    assert on_ssd(harness, first) == 0
    assert harness.node.history.fates([first[9].header.block_hash]) == [Fate.REFUSED_BUDGET]
    assert refused(harness, "budget") >= 10


def test_a_burst_that_outruns_the_tier_is_counted():
    harness = open_harness(slots=64, admission=AdmitEverything())
    engine = engine_on(harness)
    for number in range(100):
        engine.store(engine.chain([number]))  # nothing that is queued gets written
    assert refused(harness, "full") == pytest.approx(100 - 64, abs=16)
    harness.settle()
    harness.check_idle()


def test_a_second_use_writes_what_is_here_and_what_comes_again():
    harness = open_harness(mode=WriteMode.SECOND_USE)
    engine = engine_on(harness)
    blocks, gone = engine.chain(range(10)), engine.chain(range(50, 60))
    for number, each in enumerate((blocks, gone)):
        engine.answer(engine.lookup(each, traits=RequestTraits(request_id=f"first {number}")))
        engine.store(each)
        harness.settle()
    assert on_ssd(harness, blocks) == 0
    assert refused(harness, "second_use") == 20
    engine.answer(engine.lookup(blocks, traits=RequestTraits(request_id="second")))
    harness.settle()
    assert on_ssd(harness, blocks) == 10
    harness.node.cache.evict_all(EVERYTHING)
    engine.answer(engine.lookup(gone, traits=RequestTraits(request_id="again")))
    assert on_ssd(harness, gone) == 0
    engine.store(gone)
    harness.settle()
    assert on_ssd(harness, gone) == 10
    harness.check_idle()


# Flushing


def test_what_lingers_is_written_while_the_tier_is_idle():
    harness = open_harness(admission=AdmitEverything(), flush_after_ns=60 * SECOND)
    engine = engine_on(harness)
    blocks = engine.chain(range(10))
    engine.store(blocks)
    harness.advance(59 * SECOND)
    assert not harness.waiting
    harness.advance(SECOND)
    harness.settle()
    assert on_ssd(harness, blocks) == 10
    harness.check_idle()


def test_what_lingers_is_still_up_to_the_gate_and_is_not_offered_again_and_again():
    harness = open_harness(QuantileGate(0.0), flush_after_ns=60 * SECOND)
    engine = engine_on(harness)
    for number in range(40):
        engine.store(engine.chain([number]))
    harness.advance(600 * SECOND)
    assert not harness.waiting
    assert refused(harness, "budget") == 0  # it counts when they go
    harness.check_idle()


@pytest.mark.slow
def test_what_was_flushed_counts_as_written_when_it_goes():
    gate = QuantileGate(0.5)
    harness = open_harness(gate, slots=64, flush_after_ns=SECOND)
    engine = engine_on(harness)
    for number in range(64):
        engine.answer(engine.lookup(engine.chain([number])))
        engine.store(engine.chain([number]))
        harness.advance(SECOND)
        harness.settle()
    assert on_ssd(harness, engine.chain([0])) == 1
    assert gate.num_offered > 0
    assert gate.num_taken == gate.num_offered


def test_a_stop_writes_what_is_worth_it_however_narrow_the_way():
    harness = open_harness(slots=64, admission=AdmitEverything())
    engine = engine_on(harness)
    chains = [engine.chain(range(number, number + 5)) for number in range(0, 50, 5)]
    for chain in chains:
        engine.store(chain)
    assert not harness.waiting
    harness.post(ev.DaemonStopping())
    harness.settle()
    assert [on_ssd(harness, chain) for chain in chains] == [5] * 10
    harness.check_idle()


def test_a_stop_writes_what_is_worth_most_first_and_parents_before_their_children():
    harness = open_harness(slots=64)
    engine = engine_on(harness)
    rare, often = engine.chain(range(10)), engine.chain(range(50, 60))
    for blocks, times in ((rare, 1), (often, 12)):
        for turn in range(times):
            request = RequestTraits(request_id=f"{blocks[0].header.block_hash.hex()} {turn}")
            engine.answer(engine.lookup(blocks, traits=request))
            engine.store(blocks)
            harness.advance(10 * SECOND)
    harness.post(ev.DaemonStopping())
    order = [block.header.block_hash for work in harness.waiting for block in work.blocks]
    assert order == [block.header.block_hash for block in often][: len(order)]
    harness.settle()
    assert on_ssd(harness, often) == 10


def test_a_stop_while_the_tier_is_down_waits_for_nothing():
    harness = open_harness(admission=AdmitEverything())
    engine = engine_on(harness)
    engine.store(engine.chain(range(10)))
    harness.post(ev.TierUp(SSD, is_up=False))
    harness.post(ev.DaemonStopping())
    assert not harness.waiting
    harness.check_idle()


def test_what_is_dropped_after_the_stop_began_is_not_written():
    harness = open_harness(admission=AdmitEverything())
    engine = engine_on(harness)
    blocks = engine.chain(range(10))
    engine.store(blocks)
    harness.node.flush.close(ev.DaemonStopping(), harness.clock())
    harness.node.cache.evict_all(EVERYTHING)
    harness.post(ev.Tick())
    assert not harness.waiting
    harness.check_idle()


def test_an_allowance_reaches_the_gate():
    gate = QuantileGate(0.75)
    harness = open_harness(gate)
    gate.take(1.0, b"k" * 16, num_bytes=60 * 4096, now_ns=0)
    harness.post(ev.SetWriteAllowance(SSD, 1024.0))
    assert gate.share == pytest.approx(0.25)
    harness.post(ev.SetWriteAllowance(SSD, None))
    assert gate.share == 0.75


def store(harness, engine, blocks):
    engine.answer(engine.lookup(blocks))
    granted = engine.prepare(blocks)
    assert len(granted.indexes) == len(blocks)
    engine.complete(granted, [sum_ for sum_ in engine.copy(granted, blocks) if sum_])


def change_the_order(harness):
    """Fill the tier, use what is the next to go, and push out what then is; returns that."""
    engine = engine_on(harness)
    chains = [engine.chain(range(first, first + 16)) for first in range(0, 500, 100)]
    for blocks in chains[:4]:
        store(harness, engine, blocks)
        harness.settle()
    load = engine.load(chains[0])
    load.take()
    load.release()
    store(harness, engine, chains[4])
    return chains[1]


def test_no_block_leaves_without_having_been_offered_whatever_the_order_was():
    gate = QuantileGate(0.0)
    harness = open_harness(gate)
    late = change_the_order(harness)
    num_gone = sum(not harness.holds(block.header, "cpu") for block in late)
    assert num_gone >= 12
    assert gate.num_offered >= 16 + num_gone
    assert refused(harness, "full") == 0


def test_what_a_tier_takes_at_the_last_moment_stays_until_it_is_written():
    harness = open_harness(admission=AdmitEverything())
    late = change_the_order(harness)
    harness.settle()
    assert all(on_ssd(harness, [block]) or harness.holds(block.header, "cpu") for block in late)
    assert on_ssd(harness, late) >= 12
    harness.check_idle()


def test_a_slow_drive_keeps_no_store_out():
    harness = open_harness(admission=AdmitEverything())
    engine = engine_on(harness)
    for number in range(20):
        blocks = engine.chain(range(100 * number, 100 * number + 12))
        granted = engine.prepare(blocks)
        assert len(granted.indexes) == 12, "what waits to be written is a quarter of the tier"
        engine.complete(granted, [sum_ for sum_ in engine.copy(granted, blocks) if sum_])
