"""Dialogues: what is found is planned for, what is missed is explained, and outcomes are judged."""

import math

import pytest
from dialogue import CPU, MS, REMOTE, SSD, drop, empty_cpu, engine_on, metric

from kvtier.core.fate import Fate
from kvtier.core.limits import USE_KEPT_NS
from kvtier.core.plan import (
    EngineLoad,
    PlannerSettings,
    PlanOutcome,
    PlanReason,
    StepSample,
    TransferSample,
)
from kvtier.core.planner import Planner
from kvtier.core.request import RequestTraits
from kvtier.core.reuse.history import History
from kvtier.node.flow.use_counter import use_of
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.observe.daemon_metrics import (
    ACTUAL_SECONDS,
    DECISIONS,
    FOUND_TOKENS,
    LEFT_TOKENS,
    LOST_SECONDS,
    PREDICTED_SECONDS,
    REGRET_SECONDS,
    SAVED_MEASURED_SECONDS,
    SAVED_SECONDS,
)
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.memory import MemoryTier

BLOCK_BYTES = 3000
OUTCOMES_LIE = (math.nan, math.inf, -1.0, 1e300)


def open_harness(*tiers, mode="always", slots=64, workers=2, wait_max_ns=5_000 * MS):
    """Return a harness with a history and a planner, whose blocks have 64 tokens."""
    slow = {name: MemoryTier(1 << 20, name=name) for name in tiers}
    settings = HarnessSettings(
        num_slabs=1, slab_bytes=slots * 4096, num_workers=workers, pin_share=0.5
    )
    planner = Planner(
        PlannerSettings(mode=mode, is_split_allowed=True, is_guarded=True, wait_max_ns=wait_max_ns)
    )
    return NodeHarness(slow, settings, history=History(), planner=planner)


def ask(engine, blocks, first=0, **said):
    answer = engine.answer(engine.lookup(blocks, first, **said))
    assert isinstance(answer, ac.LookupResult)
    return answer


def below(harness, engine, numbers):
    blocks = engine.chain(numbers)
    for first in range(0, len(blocks), 12):
        engine.store(blocks[: first + 12], first)
        harness.settle()
    empty_cpu(harness)
    return blocks


def missed(harness):
    counts = {fate: metric(harness, "kvtier_missed_blocks_total", fate=fate) for fate in Fate}
    return {fate: count for fate, count in counts.items() if count}


def times_seen(harness, engine, blocks):
    """How often a chain was used, by what the history says at its next use."""
    session = harness.node.sessions[engine.session]
    hashes = b"".join(block.header.block_hash for block in blocks)
    use = use_of(session, blocks[0].header.tenant, hashes, RequestTraits())
    return harness.node.history.touch(use, harness.clock()).times_seen


# Uses


def test_a_request_counts_once_however_often_it_is_heard_of():
    harness = open_harness()
    engine = engine_on(harness)
    blocks, traits = engine.chain(range(6)), RequestTraits(request_id="r1")
    engine.announce(blocks[:5], traits)
    for _ in range(3):
        ask(engine, blocks[:5], traits=traits)
    for length in (2, 4, 6):
        engine.store(blocks[:length], traits=traits)
    assert times_seen(harness, engine, blocks[:5]) == 1


def test_other_requests_count_each():
    harness = open_harness()
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = engine.chain(range(3))
    for name in ("r1", "r2"):
        ask(engine, blocks, traits=RequestTraits(request_id=name))
    ask(other, blocks, traits=RequestTraits(request_id="r1"))  # a name means nothing elsewhere
    assert times_seen(harness, engine, blocks) == 3


def test_requests_without_a_name_count_at_each_lookup():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(5))
    ask(engine, blocks[:3])
    engine.store(blocks[:2])
    engine.store(blocks)
    assert times_seen(harness, engine, blocks[:2]) == 1
    ask(engine, blocks[:3])
    assert times_seen(harness, engine, blocks[:2]) == 3  # the question above counted too


def test_a_request_that_is_only_stored_counts():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks[:2])
    engine.store(blocks)  # the same, farther on
    assert times_seen(harness, engine, blocks[:2]) == 1


def test_a_name_may_be_used_again_after_some_time():
    harness = open_harness()
    engine = engine_on(harness)
    blocks, traits = engine.chain(range(2)), RequestTraits(request_id="r1")
    ask(engine, blocks, traits=traits)
    harness.advance(USE_KEPT_NS + 1)
    ask(engine, blocks, traits=traits)
    assert times_seen(harness, engine, blocks) == 2


def test_a_broken_chain_is_refused_before_any_is_counted():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    hashes = b"".join(block.header.block_hash for block in blocks)
    good = ev.AnnouncedRequest(RequestTraits(), bytes(16), hashes, 0)
    for bad in (
        ev.AnnouncedRequest(RequestTraits(), bytes(16), hashes[:-1], 0),
        ev.AnnouncedRequest(RequestTraits(), b"short", hashes, 0),
        ev.AnnouncedRequest(RequestTraits(), bytes(16), hashes, 3),
    ):
        answer = harness.ask(
            lambda call, bad=bad: ev.Announce(call, engine.session, (good, bad), ())
        )
        assert isinstance(answer, ac.Refused)
        assert answer.kind == "chain"
    assert times_seen(harness, engine, blocks) == 0


def test_a_stranger_announces_nothing():
    harness = open_harness()
    answer = harness.ask(lambda call: ev.Announce(call, "nobody", ()))
    assert isinstance(answer, ac.Refused)
    assert answer.kind == "session"


# Plans


def test_what_is_found_is_planned_for():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(6))
    engine.store(blocks[:4])
    found = ask(engine, blocks, traits=RequestTraits(request_id="r1", num_tokens=6 * 64 + 10))
    assert found.plan.num_blocks == 4
    assert found.plan.reason is PlanReason.ALWAYS
    decision = harness.node.decision_log.find_request("r1")
    assert decision.plan is found.plan
    assert decision.found == ((CPU, 4),)
    assert decision.ask.num_tokens == 6 * 64 + 10
    assert decision.ask.block_bytes == BLOCK_BYTES
    assert metric(harness, "kvtier_decisions_total", reason="always") == 1


def test_a_plan_may_be_to_restore_nothing():
    harness = open_harness(mode="never")
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    plan = ask(engine, blocks).plan
    assert (plan.num_blocks, plan.reason) == (0, PlanReason.NEVER)


def test_where_nothing_was_found_nothing_is_decided():
    harness = open_harness()
    engine = engine_on(harness)
    found = ask(engine, engine.chain(range(4)), traits=RequestTraits(request_id="r1"))
    assert (found.plan.num_blocks, found.plan.reason) == (0, PlanReason.NOTHING)
    assert not any(
        metric(harness, "kvtier_decisions_total", reason=reason) for reason in PlanReason
    )
    assert harness.node.decision_log.find_request("r1").missed == {Fate.NEVER_STORED: 4}


def test_a_request_says_how_much_it_wants():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    for tokens, num_blocks in ((0, 0), (63, 0), (64, 1), (200, 3), (10_000, 156)):
        plan = ask(engine, blocks, traits=RequestTraits(max_load_tokens=tokens)).plan
        assert harness.node.decision_log.find(plan.decision).ask.limit_blocks == num_blocks


def test_the_planner_is_told_what_waits_before_a_request():
    harness = open_harness(SSD, workers=1)
    engine, other = engine_on(harness), engine_on(harness, "other")
    mine, others = below(harness, engine, range(700, 704)), below(harness, engine, range(30))
    other.load(others)
    load = EngineLoad(waiting_tokens=7000, num_running=3)
    plan = ask(engine, mine, 1, load=load).plan
    asked = harness.node.decision_log.find(plan.decision).ask
    (source,) = asked.sources
    assert (source.tier, source.num_blocks, source.queued_bytes) == (SSD, 3, 30 * 4096)
    assert (asked.first_token, asked.load) == (64, load)


def test_blocks_that_are_being_read_come_from_where_they_are_read():
    harness = open_harness(SSD, workers=1)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = below(harness, engine, range(12))
    other.load(blocks[:6])
    found = ask(engine, blocks)
    assert found.runs == ((CPU, 6), (SSD, 6))  # six of them are about to be there
    (source,) = harness.node.decision_log.find(found.plan.decision).ask.sources
    assert (source.tier, source.num_blocks) == (SSD, 12)
    assert source.queued_bytes == 6 * (4096 - BLOCK_BYTES)  # none but the reads of these very ones


def test_an_engine_that_can_split_is_known_to():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    for can_split in (False, True):
        engine.can_split = can_split
        engine.attach(harness)
        plan = ask(engine, blocks).plan
        assert harness.node.decision_log.find(plan.decision).ask.can_split is can_split


def test_a_load_waits_no_longer_than_its_plan_says():
    harness = open_harness(SSD, wait_max_ns=50 * MS)
    engine = engine_on(harness)
    blocks = below(harness, engine, range(4))
    plan = ask(engine, blocks).plan
    assert plan.wait_ns == 50 * MS
    load = engine.load(blocks, decision=plan.decision, within_ns=400 * MS)
    harness.advance(50 * MS)
    load.take()
    assert load.end == "late"
    assert missed(harness) == {Fate.DEADLINE: 4}
    load.release()
    harness.settle()
    harness.check_idle()


def test_a_load_from_the_back_comes_in_parts_as_small_as_its_plan_says():
    harness = open_harness(SSD, mode="auto", wait_max_ns=60_000 * MS, workers=4)
    engine = engine_on(harness)
    engine.can_split = True
    engine.attach(harness)
    blocks = below(harness, engine, range(32))
    planner = harness.node.planner
    steps = [StepSample(count, 0, 0.0, 0, count / 512) for count in (512, 64)] * 8
    engine.measured(steps=steps)
    for count in (8, 1, 4, 1) * 8:  # a block takes as long as computing it
        sample = TransferSample(count, count * BLOCK_BYTES, 1, count / 8)
        planner.note_transfer(SSD, True, sample, harness.clock())
    plan = ask(engine, blocks).plan
    assert (plan.reason, plan.part_blocks) == (PlanReason.SPLIT, 2)
    load = engine.load(blocks, decision=plan.decision, from_back=True)
    assert [len(read.blocks) for read in harness.waiting] == [2] * 4
    harness.carry_out(harness.waiting[0])
    assert load.take() == [SSD] * 2
    load.release()
    harness.settle()
    harness.check_idle()


@pytest.mark.parametrize(("waiting_tokens", "num_brought"), [(0, 0), (1_000_000, 8)])
def test_an_announced_request_has_brought_what_pays(waiting_tokens, num_brought):
    harness = open_harness(SSD, mode="auto")
    engine = engine_on(harness)
    blocks = below(harness, engine, range(8))
    load = EngineLoad(waiting_tokens=waiting_tokens)
    engine.measured(steps=[StepSample(512, 0, 0.0, 0, 0.001)] * 16, load=load)
    for count in (8, 1, 4, 1) * 8:  # far slower than computing
        sample = TransferSample(count, count * BLOCK_BYTES, 1, count / 10)
        harness.node.planner.note_transfer(SSD, True, sample, harness.clock())
    engine.announce(blocks, RequestTraits(request_id="a"))
    harness.settle()
    assert metric(harness, "kvtier_prefetched_blocks_total", reason="announced") == num_brought


@pytest.mark.parametrize("decision", [1, 0, 10**9])
def test_a_plan_of_another_engine_bounds_no_load(decision):
    harness = open_harness(SSD, wait_max_ns=50 * MS)
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = below(harness, engine, range(4))
    assert ask(engine, blocks).plan.decision == 1
    load = other.load(blocks, decision=decision, within_ns=80 * MS)
    harness.advance(60 * MS)
    load.take()
    assert load.end == ""


# Fates


def test_blocks_that_were_never_here():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(5))
    ask(engine, blocks)
    assert missed(harness) == {Fate.NEVER_STORED: 5}
    engine.store(blocks[:2])
    ask(engine, blocks[:3])
    assert missed(harness) == {Fate.NEVER_STORED: 5, Fate.NOT_OFFERED: 1}  # the third, this time


def test_tokens_that_fill_no_block():
    harness = open_harness()
    engine = engine_on(harness)
    ask(engine, (), traits=RequestTraits(request_id="r1", num_tokens=40))
    assert harness.node.decision_log.find_request("r1").missed == {Fate.TOO_SHORT: 1}


def test_blocks_of_a_tier_that_does_not_answer():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = below(harness, engine, range(4))
    before = missed(harness)
    harness.post(ev.TierUp(SSD, is_up=False))
    ask(engine, blocks)
    assert missed(harness) == before | {Fate.TIER_DOWN: 4}


def test_blocks_of_a_tier_that_fails():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = below(harness, engine, range(4))
    plan = ask(engine, blocks, traits=RequestTraits(request_id="r1")).plan
    load = engine.load(blocks, decision=plan.decision)
    harness.fail(harness.waiting[0])
    assert (load.take(), load.end) == ([], "failed")
    assert harness.node.decision_log.find_request("r1").missed == {Fate.TIER_DOWN: 4}


def test_blocks_whose_bytes_are_not_those_that_were_stored():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = below(harness, engine, range(4))
    rotten = blocks[2].header
    harness.tiers[SSD].remove([rotten.block_hash], 1 << 62)
    harness.tiers[SSD].write([BlockWrite(rotten, memoryview(bytes(rotten.payload_bytes)))], 1 << 62)
    plan = ask(engine, blocks, traits=RequestTraits(request_id="r1")).plan
    load = engine.load(blocks, decision=plan.decision)
    harness.settle()
    assert load.take() == [SSD] * 2
    assert harness.node.decision_log.find_request("r1").missed == {Fate.FAILED_CHECK: 2}
    load.release()
    found = ask(engine, blocks, traits=RequestTraits(request_id="r2"))
    assert found.num_blocks == 2
    # The one behind it is there, yet cannot be reached for the same reason.
    assert harness.node.decision_log.find_request("r2").missed == {Fate.FAILED_CHECK: 2}


def test_blocks_that_go_by_anothers_name():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    hashes = b"".join(block.header.block_hash for block in reversed(blocks))
    deadline_ns = harness.clock() + 50 * MS
    harness.ask(lambda call: ev.Lookup(call, engine.session, bytes(16), hashes, 0, deadline_ns))
    assert missed(harness)[Fate.IDENTITY] == 4


def test_blocks_that_are_being_dropped():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    harness.settle()
    load = engine.load(blocks)  # what holds them
    drop(harness, CPU)
    ask(engine, blocks)
    assert missed(harness)[Fate.DROPPED] == 4
    load.release()


def test_blocks_that_the_arena_has_no_room_for():
    harness = open_harness(SSD, slots=6)
    engine = engine_on(harness)
    blocks = engine.chain(range(6))
    for length in range(1, 7):
        engine.store(blocks[:length])
        harness.settle()
    empty_cpu(harness)
    plan = ask(engine, blocks, traits=RequestTraits(request_id="r1")).plan
    engine.load(blocks, decision=plan.decision)
    assert harness.node.decision_log.find_request("r1").missed[Fate.REFUSED_FULL] == 2


def test_blocks_of_a_shared_tier_that_did_not_answer_in_time():
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    call = engine.lookup(engine.chain(range(4)), traits=RequestTraits(request_id="r1"))
    harness.advance(400 * MS)
    engine.answer(call)
    assert harness.node.decision_log.find_request("r1").missed == {Fate.DEADLINE: 4}


# Outcomes


def an_outcome(plan, tiers=((CPU, 4),), **changed):
    measured = {"restore_s": 0.01, "compute_s": 0.02, "wait_s": 0.0, "ttft_s": 0.05} | changed
    return PlanOutcome(plan.decision, tuple(tiers), computed_tokens=10, **measured)


def planned():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    return harness, engine, ask(engine, blocks, traits=RequestTraits(request_id="r1")).plan


def test_an_outcome_is_judged():
    harness, engine, plan = planned()
    outcome = an_outcome(plan)
    engine.measured(outcomes=[outcome])
    decision = harness.node.decision_log.find_request("r1")
    assert decision.outcome == outcome
    assert decision.evaluation.taken == "restore"


def summed(harness, row, label):
    counts = {v: metric(harness, row.name, **{label: v}) for v in dict(row.labels)[label]}
    return {value: count for value, count in counts.items() if count}


def test_what_decisions_came_to_is_counted_as_it_was_judged():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    engine.measured(steps=[StepSample(64, 0, 2048.0, 0, 0.5)] * 20)
    judgements = []
    for number, ttft_s in enumerate((0.05, 0.07, 30.0)):
        plan = ask(engine, blocks, traits=RequestTraits(request_id=f"r{number}")).plan
        engine.measured(outcomes=[an_outcome(plan, ttft_s=ttft_s, restore_s=0.01 + ttft_s / 2)])
        judgements.append(harness.node.decision_log.find_request(f"r{number}"))
    predicted_s = sum(each.plan.total_s for each in judgements)
    saved_s = sum(each.evaluation.saved_s.get(CPU, 0.0) for each in judgements)
    lost_s = sum(each.evaluation.lost_s.get(CPU, 0.0) for each in judgements)
    assert saved_s > 0 < lost_s
    assert summed(harness, DECISIONS, "reason") == {"always": 3}
    assert summed(harness, SAVED_SECONDS, "tier") == {"cpu": pytest.approx(saved_s)}
    assert summed(harness, LOST_SECONDS, "tier") == {"cpu": pytest.approx(lost_s)}
    assert summed(harness, REGRET_SECONDS, "taken") == {
        "restore": pytest.approx(sum(each.evaluation.regret_s for each in judgements))
    }
    assert summed(harness, ACTUAL_SECONDS, "of") == {
        "first_token": pytest.approx(30.12),
        "restore": pytest.approx(0.03 + 30.12 / 2),
    }
    told = summed(harness, PREDICTED_SECONDS, "of")
    assert told["first_token"] == pytest.approx(predicted_s)
    assert told["restore"] == pytest.approx(sum(each.plan.restore.mean_s for each in judgements))


def test_what_was_measured_is_told_apart_from_what_is_predicted():
    harness = open_harness()
    engine = engine_on(harness)
    engine.measured(steps=[StepSample(64, 0, 2048.0, 0, 0.5)] * 20)
    known, unknown = engine.chain(range(4)), engine.chain(range(10, 14))
    cold = ask(engine, known).plan
    engine.measured(outcomes=[PlanOutcome(cold.decision, (), 0.0, 4 * 64, 1.0, 0.0, 1.0)])
    for blocks in (known, unknown):
        engine.store(blocks)
        plan = ask(engine, blocks).plan
        engine.measured(outcomes=[an_outcome(plan, ttft_s=0.4, restore_s=0.3)])
    measured = metric(harness, SAVED_MEASURED_SECONDS.name, tier=CPU)
    assert measured == pytest.approx(0.6)
    assert metric(harness, SAVED_SECONDS.name, tier=CPU) > measured + 1.0, "2 s were predicted"


def test_what_is_found_and_left_is_counted_by_the_decision():
    harness = open_harness(SSD, mode="never")
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    ask(engine, blocks)
    assert summed(harness, LEFT_TOKENS, "reason") == {"never": 4 * 64}
    assert summed(harness, FOUND_TOKENS, "tier") == {"cpu": 4 * 64}


@pytest.mark.parametrize("what", ["restore_s", "compute_s", "wait_s", "ttft_s"])
@pytest.mark.parametrize("lie", OUTCOMES_LIE)
def test_an_outcome_that_cannot_be_is_not_taken_in(what, lie):
    harness, engine, plan = planned()
    engine.measured(outcomes=[an_outcome(plan, **{what: lie})])
    assert harness.node.decision_log.find_request("r1").outcome is None
    engine.measured(outcomes=[an_outcome(plan)])
    assert harness.node.decision_log.find_request("r1").outcome is not None


@pytest.mark.parametrize("tiers", [((CPU, 5),), ((CPU, -1),), ((CPU, 2), (SSD, 3))])
def test_an_outcome_that_is_not_of_its_plan_is_not_taken_in(tiers):
    harness, engine, plan = planned()
    engine.measured(outcomes=[an_outcome(plan, tiers)])
    assert harness.node.decision_log.find_request("r1").outcome is None


def test_an_outcome_counts_once_and_for_its_own_engine_alone():
    harness, engine, plan = planned()
    engine_on(harness, "liar").measured(outcomes=[an_outcome(plan, ttft_s=9.0)])
    assert harness.node.decision_log.find_request("r1").outcome is None
    engine.measured(outcomes=[an_outcome(plan), an_outcome(plan, ttft_s=9.0)])
    assert harness.node.decision_log.find_request("r1").outcome.ttft_s == 0.05


@pytest.mark.slow
def test_a_model_that_computes_fast_is_not_made_to_wait_for_a_slow_tier():
    harness = open_harness(SSD, mode="auto")
    engine = engine_on(harness)
    blocks = below(harness, engine, range(8))
    step = StepSample(512, 0, 512 * 256.0, 0, 0.0005)
    for _ in range(50):
        engine.measured(steps=[step] * 4)
        harness.advance(10 * MS)
        load = engine.load(blocks)
        harness.advance(200 * MS)  # each transfer is late, and so at least as slow as that
        harness.settle()
        load.release()
        empty_cpu(harness)
    plan = ask(engine, blocks).plan
    assert plan.num_blocks == 0
    assert plan.reason in {PlanReason.COST, PlanReason.RISK, PlanReason.GUARD}
    assert missed(harness)[Fate.COST] >= 8


def test_a_node_without_a_planner_has_everything_restored():
    harness = NodeHarness({})
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    engine.store(blocks)
    assert ask(engine, blocks).plan is None
    engine.measured(outcomes=[PlanOutcome(1, (), 0.0, 0, 0.0, 0.0, 0.0)])
