"""The planner: how much to restore, and what it was worth."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from kvtier.core.limits import SESSIONS_MAX
from kvtier.core.plan import (
    EngineLoad,
    ModelFlops,
    PlannerSettings,
    PlanOutcome,
    PlanReason,
    PlanRequest,
    RestorePlan,
    Source,
    StepSample,
    TransferSample,
)
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName

SECOND = 1_000_000_000
MIB = 1 << 20
KEY_SPACE = b"k" * 16
TOKENS = 64
BLOCK_BYTES = 3 * MIB
TOKEN_S = 2e-4
BLOCK_S = TOKENS * TOKEN_S
"""What computing a block takes, without attention's share."""

CPU, SSD, REMOTE = TierName.CPU, TierName.SSD, TierName.REMOTE
FAST, EVEN, SLOW = 0.1, 1.0, 10.0
"""A tier's time for a block over that of computing it."""


def planner(now_ns: int = 0, settings: PlannerSettings | None = None, **slow: float) -> Planner:
    """Return one that has seen an engine's steps, and transfers of the tiers named."""
    made = Planner(settings or PlannerSettings())
    for turn in range(32):
        attended = 512 * (turn * 512 + 256)
        seconds = 512 * TOKEN_S + attended * 1e-9
        made.note_steps(KEY_SPACE, [StepSample(512, 0, attended, 0, seconds)], now_ns)
        made.note_steps(KEY_SPACE, [StepSample(0, 1, 0.0, 500, 0.01)], now_ns)
    see(made, now_ns, **{"cpu": 0.01, **slow})
    return made


def see(made: Planner, now_ns: int, **slow: float) -> None:
    for name, times in slow.items():
        for count in (8, 4, 8, 2) * 6:
            sample = TransferSample(count, count * BLOCK_BYTES, 1, 1e-3 + count * BLOCK_S * times)
            made.note_transfer(TierName(name), True, sample, now_ns)


def ask(*runs: tuple[TierName, int], rest: int = 40, **changes: object) -> PlanRequest:
    found = sum(count for _, count in runs)
    asked = PlanRequest(
        key_space=KEY_SPACE,
        sources=tuple(Source(tier, count, 0) for tier, count in runs),
        first_token=0,
        num_tokens=found * TOKENS + rest,
        block_tokens=TOKENS,
        block_bytes=BLOCK_BYTES,
        limit_blocks=None,
        load=EngineLoad(),
        can_split=False,
    )
    return replace(asked, **changes)


def outcome(
    tiers: Iterable[tuple[TierName, int]], restore_s: float, ttft_s: float, wait_s: float = 0.0
) -> PlanOutcome:
    compute_s = max(ttft_s - restore_s, 0.0)
    return PlanOutcome(1, tuple(tiers), restore_s, 100, compute_s, wait_s, ttft_s + wait_s)


# How much


def test_a_fast_tier_is_restored_and_a_slow_one_is_not():
    fast = planner(ssd=FAST).plan(ask((SSD, 64)), 7, 0)
    assert (fast.decision, fast.num_blocks, fast.reason) == (7, 64, PlanReason.ALL)
    assert fast.total_s < fast.recompute_total_s
    slow = planner(ssd=SLOW).plan(ask((SSD, 64)), 7, 0)
    assert (slow.num_blocks, slow.reason) == (0, PlanReason.COST)
    assert slow.total_s == slow.recompute_total_s
    assert slow.restore.mean_s > 0, "what it would have taken is told as well"


def test_the_prediction_is_what_it_takes():
    plan = planner(ssd=0.5).plan(ask((SSD, 64)), 1, 0)
    assert plan.restore.mean_s == pytest.approx(64 * (BLOCK_S * 0.5 + 1e-3 / 8), rel=0.1)
    assert plan.recompute.mean_s == pytest.approx(64 * BLOCK_S, rel=0.05)
    assert plan.recompute_total_s == pytest.approx(64 * BLOCK_S, rel=0.1)


def test_an_idle_and_a_full_engine_give_opposite_answers():
    made = planner(ssd=2.0)
    assert made.plan(ask((SSD, 64)), 1, 0).num_blocks == 0
    full = made.plan(ask((SSD, 64), load=EngineLoad(20_000, 8)), 1, 0)
    assert (full.num_blocks, full.reason) == (64, PlanReason.ALL), "while it waits that is free"


def test_however_long_the_wait_a_small_gain_is_one():
    made = planner(ssd=2.0)
    assert made.plan(ask((SSD, 64)), 1, 0).num_blocks == 0, "now computing is the road last taken"
    full = made.plan(ask((SSD, 64), load=EngineLoad(1_000_000, 8)), 1, 0)
    assert full.recompute_total_s > 100 * 64 * BLOCK_S, "it gains less than a hundredth of that"
    assert (full.num_blocks, full.reason) == (64, PlanReason.ALL), "and those behind it gain too"


def test_a_queue_before_a_tier_makes_computing_the_shorter_way():
    made, asked = planner(ssd=0.5), ask((SSD, 64))
    assert made.plan(asked, 1, 0).num_blocks == 64
    queued = replace(asked, sources=(Source(SSD, 64, 512 * BLOCK_BYTES),))
    assert made.plan(queued, 1, 0).num_blocks == 0


def test_of_a_chain_over_tiers_the_part_that_pays_is_restored():
    plan = planner(ssd=FAST, remote=SLOW).plan(ask((SSD, 32), (REMOTE, 32)), 1, 0)
    assert (plan.num_blocks, plan.reason) == (32, PlanReason.PART)


def test_within_a_run_it_stops_where_the_engine_is_ready():
    # The engine is busy for a while; what is there by then costs nothing, the rest does not pay.
    load = EngineLoad(waiting_tokens=40 * TOKENS)
    plan = planner(ssd=2.0).plan(ask((SSD, 64), load=load), 1, 0)
    assert plan.reason is PlanReason.PART
    assert 14 <= plan.num_blocks <= 24
    assert plan.restore.mean_s <= 0.6 < plan.recompute.mean_s


def test_a_few_tokens_are_not_worth_a_transfer():
    # The floor of one step is paid anyway, and computes these as well.
    plan = planner(ssd=EVEN * 0.9).plan(ask((SSD, 1), rest=10), 1, 0)
    assert plan.num_blocks == 0


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, 0), (5, 5), (64, 64), (100, 64), (-3, 0), (None, 64)]
)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_request_gets_no_more_than_it_wants(limit, expected, mode):
    made = planner(settings=PlannerSettings(mode=mode), ssd=FAST)
    plan = made.plan(ask((SSD, 64), limit_blocks=limit), 1, 0)
    assert plan.num_blocks == expected
    assert (plan.reason is PlanReason.LIMIT) == (expected < 64)


def test_where_nothing_was_found_there_is_nothing_to_decide():
    assert planner().plan(ask(), 3, 0) == RestorePlan(3, 0, PlanReason.NOTHING)


@pytest.mark.parametrize("slow", [FAST, SLOW])
def test_the_operator_may_decide(slow):
    always = planner(settings=PlannerSettings(mode="always", wait_max_ns=SECOND), ssd=slow)
    plan = always.plan(ask((SSD, 64)), 1, 0)
    assert (plan.num_blocks, plan.reason, plan.wait_ns) == (64, PlanReason.ALWAYS, SECOND)
    never = planner(settings=PlannerSettings(mode="never"), ssd=slow)
    plan = never.plan(ask((SSD, 64)), 1, 0)
    assert (plan.num_blocks, plan.reason, plan.wait_ns) == (0, PlanReason.NEVER, 0)


# Splitting


def test_where_both_ends_take_as_long_splitting_halves_the_time():
    made = planner(ssd=EVEN * 0.9)
    plain = made.plan(ask((SSD, 128)), 1, 0)
    split = made.plan(ask((SSD, 128), can_split=True), 1, 0)
    assert (split.reason, split.is_split, split.num_blocks) == (PlanReason.SPLIT, True, 128)
    assert min(plain.total_s, plain.recompute_total_s) > 1.6 * split.total_s


def test_splitting_goes_on_as_long_as_a_request_may_wait():
    asked = ask((SSD, 512), can_split=True)
    free = planner(ssd=EVEN).plan(asked, 1, 0)
    settings = PlannerSettings(wait_max_ns=2 * SECOND)
    short = planner(settings=settings, ssd=EVEN).plan(asked, 1, 0)
    assert free.total_s == pytest.approx(free.recompute_total_s / 2, rel=0.1)
    assert short.is_split
    assert short.wait_ns == 2 * SECOND
    gained_s = short.recompute_total_s - short.total_s
    assert 1.9 <= gained_s <= 2.8, "two seconds of loading save as many, or more where it is deep"


def test_where_one_end_is_far_faster_nothing_is_split():
    made = planner(cpu=0.01)
    plan = made.plan(ask((CPU, 64), can_split=True), 1, 0)
    assert (plan.reason, plan.is_split) == (PlanReason.ALL, False)


def test_an_operator_may_forbid_splitting():
    made = planner(settings=PlannerSettings(is_split_allowed=False), ssd=EVEN * 0.9)
    assert not made.plan(ask((SSD, 128), can_split=True), 1, 0).is_split


def test_while_the_engine_is_busy_all_of_it_is_loaded():
    load = EngineLoad(waiting_tokens=50_000)
    plan = planner(ssd=EVEN).plan(ask((SSD, 128), can_split=True, load=load), 1, 0)
    assert (plan.reason, plan.num_blocks) == (PlanReason.ALL, 128)


# Bounds


def test_a_request_waits_until_computing_would_have_been_done():
    plan = planner(ssd=0.5).plan(ask((SSD, 64)), 1, 0)
    assert plan.wait_ns == pytest.approx(64 * BLOCK_S * 1e9, rel=0.1)


def test_no_more_is_restored_than_comes_within_the_longest_wait():
    made = planner(settings=PlannerSettings(wait_max_ns=SECOND // 10), ssd=FAST)
    plan = made.plan(ask((SSD, 512)), 1, 0)
    assert plan.wait_ns <= SECOND // 10
    assert 0 < plan.num_blocks < 100
    assert plan.restore.mean_s <= 0.1


def test_the_road_is_changed_only_for_a_gain():
    made, asked, reasons = planner(ssd=0.93), ask((SSD, 64)), []
    for turn in range(40):  # around break-even, by less than the margin
        see(made, 0, ssd=0.92 + 0.005 * (turn % 2))
        reasons.append(made.plan(asked, 1, 0).num_blocks > 0)
    changes = sum(before != after for before, after in pairwise(reasons))
    assert changes <= 1


def test_what_may_turn_out_far_longer_is_not_risked():
    made = planner()
    for turn in range(60):  # better on average, and now and then ten times as long
        times = 8.0 if turn % 6 == 0 else 0.5
        sample = TransferSample(8, 8 * BLOCK_BYTES, 1, 8 * BLOCK_S * times)
        made.note_transfer(SSD, True, sample, 0)
    plan = made.plan(ask((SSD, 8), rest=10), 1, 0)
    assert (plan.num_blocks, plan.reason) == (0, PlanReason.RISK)


def test_a_decision_takes_no_longer_for_many_blocks():
    made = planner(ssd=0.9, remote=2.0)

    def cost_s(num_blocks: int) -> float:
        asked = ask((SSD, num_blocks), (REMOTE, num_blocks), can_split=True)
        times = []
        for _ in range(30):
            start = time.process_time()
            made.plan(asked, 1, 0)
            times.append(time.process_time() - start)
        return min(times)

    assert cost_s(8000) < 4 * cost_s(32) + 1e-4


def test_a_chain_that_alternates_between_tiers_is_no_burden():
    runs = [(SSD, 1), (REMOTE, 1)] * 4000
    plan = planner(ssd=FAST, remote=FAST).plan(ask(*runs, can_split=True), 1, 0)
    assert 0 < plan.num_blocks <= 8000
    assert plan.wait_ns > 0


def test_a_split_has_to_be_worth_a_chunk_too_many():
    hardly = planner(ssd=0.02).plan(ask((SSD, 64), can_split=True), 1, 0)
    assert (hardly.is_split, hardly.reason) == (False, PlanReason.ALL)
    well = planner(ssd=0.3).plan(ask((SSD, 64), can_split=True), 1, 0)
    assert (well.is_split, well.reason) == (True, PlanReason.SPLIT)


def test_a_load_from_the_back_shows_that_the_way_into_the_engine_is_fast():
    made, asked = planner(ssd=0.01), ask((SSD, 64), can_split=True)
    see(made, 0, cpu=0.3)
    plan = made.plan(asked, 1, 0)
    assert plan.is_split
    before_s = plan.restore.mean_s
    took_s = 64 * BLOCK_S * 0.02
    for _ in range(8):
        made.note_outcome(asked, plan, outcome([(SSD, 56)], took_s, took_s + 0.05), 0)
    after = made.plan(asked, 1, 0)
    assert after.restore.mean_s < 0.2 * before_s
    slow_s = 64 * BLOCK_S * 2
    for _ in range(8):
        made.note_outcome(asked, plan, outcome([(SSD, 56)], slow_s, slow_s + 0.05), 0)
    assert made.plan(asked, 1, 0).restore.mean_s == after.restore.mean_s, "it may be faster"


# Guard and trials


def lose(made: Planner, count: int, now_ns: int = 0) -> None:
    """Let restores that were thought to pay take ten times as long as computing."""
    for _ in range(count):
        asked = ask((SSD, 64))
        plan = RestorePlan(1, 64, PlanReason.ALL, wait_ns=1, total_s=0.1, recompute_total_s=1.0)
        made.note_outcome(asked, plan, outcome([(SSD, 64)], 9.0, 9.1), now_ns)
        see(made, now_ns, ssd=FAST)  # each transfer was fast: it lies elsewhere


def test_a_tier_that_does_not_pay_is_left_alone_and_comes_back():
    made = planner(ssd=FAST)
    lose(made, 6)
    assert made.guarded(0) == {SSD}
    plan = made.plan(ask((SSD, 64)), 1, SECOND)
    assert (plan.num_blocks, plan.reason) == (0, PlanReason.GUARD)
    front = made.plan(ask((CPU, 16), (SSD, 48)), 1, SECOND)
    assert (front.num_blocks, front.reason) == (16, PlanReason.GUARD), "the others serve"

    asked = ask((SSD, 64), load=EngineLoad(waiting_tokens=10**6))
    trial = made.plan(asked, 1, 6 * SECOND)
    assert trial.num_blocks == 64
    assert made.guarded(6 * SECOND) == {SSD}, "one at a time"
    made.note_outcome(asked, trial, outcome([(SSD, 64)], 0.1, 0.2), 7 * SECOND)
    assert not made.guarded(7 * SECOND)


def test_the_guard_can_be_switched_off():
    made = planner(settings=PlannerSettings(is_guarded=False), ssd=FAST)
    lose(made, 6)
    assert not made.guarded(0)


def test_a_tier_nobody_measured_for_a_while_is_tried_at_hardly_any_cost():
    made = planner(ssd=SLOW)
    asked = ask((SSD, 64))
    assert made.plan(asked, 1, SECOND).num_blocks == 0, "it was measured a second ago"
    trial = made.plan(asked, 1, 3 * SECOND)
    assert (trial.num_blocks, trial.reason) == (8, PlanReason.PART), "one transfer"
    assert trial.wait_ns <= 0.05 * trial.recompute_total_s * 1e9
    assert trial.total_s <= 1.05 * trial.recompute_total_s
    assert made.plan(asked, 1, 4 * SECOND).num_blocks == 0, "and then not for a while"


@pytest.mark.parametrize("tier", [CPU, SSD, REMOTE])
def test_a_tier_nobody_ever_measured_is_not_left_out_for_that(tier):
    made = Planner(PlannerSettings())
    for turn in range(16):  # computing is faster than one guesses that anything is restored
        made.note_steps(KEY_SPACE, [StepSample(64 << turn % 4, 0, 0.0, 0, 2e-5)], 0)
    assert not made.is_measured(tier)
    plans = [made.plan(ask((tier, 16)), turn, turn * SECOND // 10) for turn in range(100)]
    assert any(plan.num_blocks for plan in plans), "it is tried within seconds"
    assert all(plan.total_s <= 1.05 * plan.recompute_total_s for plan in plans)


def test_what_is_brought_closer_is_what_pays():
    load = EngineLoad(waiting_tokens=50_000)
    both = ask((SSD, 32), (REMOTE, 32))
    made = planner(ssd=FAST, remote=SLOW)
    assert made.num_paying(both, 0) == 32
    assert made.num_paying(replace(both, load=load), 0) > 32, "while it waits that is free"
    assert made.num_paying(replace(both, limit_blocks=5), 0) == 5
    assert planner(ssd=SLOW).num_paying(ask((SSD, 64)), 0) == 0
    for mode, most in (("never", 0), ("always", 64)):
        assert planner(settings=PlannerSettings(mode=mode), ssd=SLOW).num_paying(both, 0) == most


def test_a_trial_takes_no_time_from_the_blocks_that_pay():
    made = planner(ssd=FAST, remote=SLOW)
    trial = made.plan(ask((SSD, 32), (REMOTE, 32)), 1, 3 * SECOND)
    assert (trial.num_blocks, trial.reason) == (40, PlanReason.PART)
    assert trial.wait_ns >= 32 * BLOCK_S * FAST * 1e9
    assert trial.total_s <= 1.05 * made.plan(ask((SSD, 32), (REMOTE, 32)), 1, 3 * SECOND).total_s


def test_a_tier_that_got_faster_is_used_after_a_few_transfers():
    made, asked = planner(ssd=SLOW), ask((SSD, 64))
    assert made.plan(asked, 1, 0).num_blocks == 0
    for _ in range(5):
        sample = TransferSample(8, 8 * BLOCK_BYTES, 1, 8 * BLOCK_S * FAST)
        made.note_transfer(SSD, True, sample, SECOND)
    assert made.plan(asked, 1, SECOND).num_blocks == 64


@pytest.mark.parametrize("share", [0.05, 20.0])
def test_the_way_into_the_engine_shows_in_what_comes_from_other_tiers(share: float):
    made, asked = planner(ssd=0.01), ask((SSD, 64))
    see(made, 0, cpu=0.2)  # slower than the tier, so that this is what a restore waits for
    for _ in range(8):
        plan = made.plan(asked, 1, 0)
        took_s = 64 * BLOCK_S * 0.2 * share
        plan = replace(plan, num_blocks=64, wait_ns=100 * SECOND)
        made.note_outcome(asked, plan, outcome([(SSD, 64)], took_s, took_s + 0.01), 0)
    restore = made.plan(asked, 1, 0).restore
    if share > 1:
        assert restore.mean_s > 64 * BLOCK_S, "nor is it trusted beyond what it does"
    else:
        assert restore.mean_s < 0.1 * 64 * BLOCK_S * 0.2, "it is learned in some loads"


def test_long_requests_do_not_all_pay_for_trials():
    made, asked = planner(ssd=SLOW), ask((SSD, 1600))
    now_ns, trials = 3 * SECOND, 0
    for _ in range(20):
        plan = made.plan(asked, 1, now_ns)
        trials += plan.num_blocks > 0
        now_ns += round(plan.total_s * 1e9)
    assert plan.total_s > 20, "longer than the longest pause between trials"
    assert 2 <= trials <= 5


# What it was worth


def test_seconds_saved_are_shared_out_by_blocks():
    made, asked = planner(ssd=FAST), ask((CPU, 16), (SSD, 48))
    plan = made.plan(asked, 1, 0)
    judged = made.note_outcome(asked, plan, outcome([(CPU, 16), (SSD, 48)], 0.1, 0.11, 3.0), 0)
    assert judged.taken == "restore"
    assert sum(judged.saved_s.values()) == pytest.approx(plan.recompute_total_s - 0.11, rel=0.05)
    assert judged.saved_s[SSD] == pytest.approx(3 * judged.saved_s[CPU])
    assert not judged.lost_s
    assert judged.regret_s == 0


def test_seconds_lost_are_those_of_whom_it_waited_for():
    made, asked = planner(ssd=FAST), ask((CPU, 16), (SSD, 48))
    plan = made.plan(asked, 1, 0)
    judged = made.note_outcome(asked, plan, outcome([(CPU, 16)], 1.0, 2.0), 0)
    assert judged.lost_s == {SSD: pytest.approx(2.0 - plan.recompute_total_s, rel=0.1)}
    assert judged.regret_s == judged.lost_s[SSD]
    assert not judged.saved_s


def test_no_more_is_claimed_than_was_measured_of_the_same_prompt():
    made, asked = planner(ssd=FAST), ask((SSD, 64))
    plan = made.plan(asked, 1, 0)
    restored = outcome([(SSD, 64)], 0.1, 0.11)
    assert plan.recompute_total_s > 0.6
    judged = made.note_outcome(asked, plan, restored, 0, cold_s=0.5)
    assert judged.saved_s == {SSD: pytest.approx(0.39)}
    assert judged.cold_s == 0.5
    judged = made.note_outcome(asked, plan, restored, 0, cold_s=60.0)
    assert judged.saved_s[SSD] < plan.recompute_total_s, "and no more than is predicted"
    judged = made.note_outcome(asked, plan, restored, 0, cold_s=0.1)
    assert not judged.saved_s
    assert not judged.lost_s, "it paid according to predictions"


def test_a_prompt_that_was_partly_on_the_gpu_is_bounded_and_not_measured():
    made, asked = planner(ssd=FAST), ask((SSD, 64), first_token=64 * TOKENS, num_tokens=8300)
    plan = made.plan(asked, 1, 0)
    predicted = made.note_outcome(asked, plan, outcome([(SSD, 64)], 0.1, 0.11), 0)
    assert predicted.saved_s[SSD] > 0.5
    judged = made.note_outcome(asked, plan, outcome([(SSD, 64)], 0.1, 0.11), 0, cold_s=0.5)
    assert judged.saved_s == {SSD: pytest.approx(0.39)}
    assert judged.cold_s is None
    late = outcome([(SSD, 64)], 1.9, 2.0)
    unbounded = made.note_outcome(asked, plan, late, 0)
    assert made.note_outcome(asked, plan, late, 0, cold_s=9.0).lost_s == unbounded.lost_s


def test_a_loss_is_no_larger_than_was_measured_of_the_same_prompt():
    made, asked = planner(ssd=FAST), ask((SSD, 64))
    plan = made.plan(asked, 1, 0)
    late = outcome([(SSD, 64)], 1.9, 2.0)
    assert made.note_outcome(asked, plan, late, 0).lost_s[SSD] > 1.0
    judged = made.note_outcome(asked, plan, late, 0, cold_s=1.5)
    assert judged.lost_s == {SSD: pytest.approx(0.5)}
    assert judged.regret_s == judged.lost_s[SSD]
    judged = made.note_outcome(asked, plan, late, 0, cold_s=3.0)
    assert (judged.saved_s, judged.lost_s, judged.regret_s) == ({}, {}, 0)


def test_no_savings_are_claimed_from_the_first_steps_of_an_engine():
    made, asked = Planner(PlannerSettings(mode="always")), ask((SSD, 64))
    slow = StepSample(512, 0, 512 * 256.0, 0, 5.0)  # as a first step often is
    made.note_steps(KEY_SPACE, [slow], 0)
    plan = made.plan(asked, 1, 0)
    restored = outcome([(SSD, 64)], 0.1, 0.11)
    assert plan.recompute_total_s > 30
    assert not made.note_outcome(asked, plan, restored, 0).saved_s
    assert made.note_outcome(asked, plan, restored, 0, cold_s=6.0).saved_s[SSD] < 6.0
    made.note_steps(KEY_SPACE, [slow] * 7, 0)
    assert made.note_outcome(asked, plan, restored, 0).saved_s


def test_computing_what_would_have_been_restored_sooner_is_regretted():
    made, asked = planner(ssd=SLOW), ask((SSD, 64))
    plan = made.plan(asked, 1, 0)
    assert not plan.num_blocks
    took = outcome([], 0.0, 0.8)
    assert made.note_outcome(asked, plan, took, 0).regret_s == 0
    see(made, 0, ssd=FAST)  # it turns out that it had become fast
    judged = made.note_outcome(asked, plan, took, 0)
    assert judged.taken == "recompute"
    assert 0.4 < judged.regret_s <= 0.8


def test_loads_from_the_cpu_tier_teach_the_way_into_the_engine():
    made, asked = planner(), ask((CPU, 64))
    before = made.restore_s(CPU, 64 * BLOCK_BYTES)
    for _ in range(12):
        plan = made.plan(asked, 1, 0)
        made.note_outcome(asked, plan, outcome([(CPU, 64)], 0.4, 0.41), 0)
    assert made.restore_s(CPU, 64 * BLOCK_BYTES) > 10 * before


def test_what_was_cut_short_does_not_make_a_tier_look_fast():
    made, asked = planner(ssd=FAST), ask((SSD, 64))
    before = made.plan(asked, 1, 0).restore.mean_s
    for _ in range(12):
        plan = made.plan(asked, 1, 0)
        made.note_outcome(asked, plan, outcome([(SSD, 2)], 0.001, 1.0), 0)
    assert made.plan(asked, 1, 0).restore.mean_s >= 0.9 * before


# Many engines, and restarts


def test_models_of_different_engines_are_kept_apart():
    made = planner(ssd=0.5)
    steps = [StepSample(512, 0, 512 * 256.0, 0, 0.001)] * 32
    made.note_steps(b"fast", steps, 0)
    assert made.plan(ask((SSD, 64)), 1, 0).num_blocks == 64
    assert made.plan(ask((SSD, 64), key_space=b"fast"), 1, 0).num_blocks == 0
    assert made.saved_s(4096, 64) == made.saved_s(4096, 64, b"fast"), "who reported last"
    assert made.saved_s(4096, 64, KEY_SPACE) > 10 * made.saved_s(4096, 64)


@pytest.mark.parametrize("lie", [0.001, 0.1, 10.0, 1000.0])
def test_what_one_engine_says_of_itself_decides_nothing_for_another_of_its_kind(lie: float):
    made = planner(ssd=0.5)
    honest = replace(ask((SSD, 64)), session="honest")
    before = made.plan(honest, 1, 0)
    for _ in range(8):
        made.note_steps(KEY_SPACE, [StepSample(512, 0, 512 * 256.0, 0, 0.02)] * 8, 0, "honest")
        told = made.plan(honest, 1, 0)
        liar = [StepSample(512, 0, 512 * 256.0, 0, 0.02 * lie)] * 8
        made.note_steps(KEY_SPACE, liar, 0, "liar")
        assert made.plan(honest, 1, 0) == told, "whatever the other one says"
    assert before.num_blocks == 64


def test_a_new_engine_begins_with_what_is_known_of_its_kind():
    made = planner(ssd=0.5)
    made.note_steps(KEY_SPACE, [StepSample(512, 0, 512 * 256.0, 0, 0.001)] * 32, 0, "old")
    made.note_flops(KEY_SPACE, ModelFlops(1e12, 0.0, 1e12), "new")
    fresh = made.plan(replace(ask((SSD, 64)), session="new"), 1, 0)
    assert fresh.num_blocks == 0, "it computes as fast as the other"
    assert len(made.document()["recompute"]) == 1, "one kind"


def test_so_many_engines_are_remembered_and_no_more():
    made = planner()
    for number in range(2 * SESSIONS_MAX):
        made.note_steps(b"%d" % number, [StepSample(512, 0, 1e5, 0, 0.1)], 0)
    assert len(made.document()["recompute"]) == SESSIONS_MAX


def test_what_was_learned_survives_a_restart():
    made = planner(ssd=0.4)
    kept = json.loads(json.dumps(made.document(), allow_nan=False))
    again = Planner(PlannerSettings())
    assert again.recall(kept) == ""
    asked = ask((SSD, 64))
    before, after = made.plan(asked, 1, 0), again.plan(asked, 1, 0)
    assert after.num_blocks == before.num_blocks == 64
    assert after.total_s == pytest.approx(before.total_s, rel=0.01)
    assert after.recompute_total_s == pytest.approx(before.recompute_total_s, rel=0.01)
    assert again.document()["restore"].keys() == kept["restore"].keys(), "and the next one"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 2},
        {"version": "1"},
        {"version": 1, "restore": []},
        {"version": 1, "restore": {"ssd_read": {"rates": [1, 2], "tail": 1, "depth": 1}}},
        {"version": 1, "restore": {"ssd_read": {"rates": [1, 2, 3, -4], "tail": 1, "depth": 1}}},
        {"version": 1, "restore": {"ssd_read": {"rates": None, "depth": 1}}},
        {"version": 1, "restore": {"ssd_read": {"depth": 10**9}}},
        {"version": 1, "recompute": {"zz": {"prefill": {}}}},
        {"version": 1, "recompute": {"00": {"prefill": {"rates": [float("nan")] * 3}}}},
        {"version": 1, "recompute": {"00": 5}},
        [],
        None,
        "text",
    ],
    ids=str,
)
def test_a_foreign_document_is_ignored_with_a_reason(document):
    made = planner(ssd=FAST)
    before = made.document()
    assert made.recall(document)
    assert made.document() == before


def test_figures_for_people():
    learned = planner(ssd=FAST).document()
    assert learned["recompute"][KEY_SPACE.hex()]["tokens_per_s"] == pytest.approx(5000, rel=0.1)
    expected = 8 * MIB / (1e-3 + 8 * MIB / BLOCK_BYTES * BLOCK_S * FAST)
    assert learned["restore"]["ssd_read"]["bytes_per_s"] == pytest.approx(expected, rel=0.6)
    assert learned["guarded"] == []
