"""Replays of small traces: with time and without, alike each time, and right where one can tell."""

from dataclasses import replace

import numpy as np
import pytest

from kvtier.sim.replay.instant import replay_instant
from kvtier.sim.replay.report import study_page, study_text
from kvtier.sim.replay.results import ReplayRun, TraceSummary
from kvtier.sim.replay.setup import Machine, ReplayEngines, ReplayLink, ReplaySetup
from kvtier.sim.replay.study import default_sizes, run_study
from kvtier.sim.replay.timed import replay_timed
from kvtier.sim.replay.trace import Numbering, Trace, TraceRequest, in_order, optimal_hits
from kvtier.sim.replay.traffic import Traffic, with_noise

TOKENS = 64
SMALL = Machine(token_bytes=16_384)
FAST = SMALL.model_copy(update={"cpu": ReplayLink(read_bytes_per_s=1e12, latency_s=0.0)})


def chains(*ids: list[int], step_s: float = 10.0) -> Trace:
    numbering = Numbering()
    requests = [
        TraceRequest(
            round(n * step_s * 1e9), numbering.number(bytes(16), each), TOKENS * len(each) + 1
        )
        for n, each in enumerate(ids)
    ]
    return Trace("chains", TOKENS, in_order(requests), numbering.keys())


def busy(num_sessions: int = 6, hours: float = 0.1) -> Trace:
    traffic = Traffic(
        num_sessions, prompt_tokens=1000, turn_tokens=300, gap_s=40.0, hours=hours, seed=5
    )
    return traffic.trace()


def lru(cpu_blocks: int, ssd_blocks: int = 0, **more: object) -> ReplaySetup:
    plain = {"policy": "lru", "machine": SMALL, "is_instant": True} | more
    return ReplaySetup(cpu_blocks=cpu_blocks, ssd_blocks=ssd_blocks, **plain)


def hit_blocks(run: ReplayRun) -> int:
    return sum(run.whole.hit_tokens.values()) // TOKENS


def naive_lru(trace: Trace, num_blocks: int) -> int:
    """Hits of leaf-first LRU, in as few lines as can be."""
    used: dict[int, tuple[int, int]] = {}
    hits = 0
    for number, request in enumerate(trace.requests):
        chain = request.blocks.tolist()
        for block in chain:
            if block not in used:
                break
            hits += 1
        for place, block in enumerate(chain):
            used[block] = (number, -place)
        while len(used) > num_blocks:
            del used[min(used, key=used.__getitem__)]
    return hits


@pytest.mark.parametrize("num_blocks", [60, 150, 1000])
def test_without_time_lru_is_what_everyone_calls_lru(num_blocks):
    trace = busy()
    run = replay_instant(trace, lru(num_blocks))
    assert hit_blocks(run) == naive_lru(trace, num_blocks)
    assert hit_blocks(run) <= sum(optimal_hits(trace, num_blocks))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rd", "rd-sec", "lru"])
def test_what_a_full_cpu_tier_has_no_use_for_gets_to_the_ssd_all_the_same(policy):
    trace = chains(*[list(range(100 * n, 100 * n + 20)) for n in range(10)] * 8)
    run = replay_instant(trace, lru(60, 400, policy=policy, overrides={"ssd.gate": "1.0"}))
    assert hit_blocks(run) >= 0.85 * 7 * 200, "all rounds but the first find all, nearly"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rd", "rd-sec", "credit-lru", "s3-fifo", "lru"])
def test_no_policy_beats_the_best_choice_in_hindsight(policy):
    trace = busy()
    run = replay_instant(trace, lru(150, policy=policy))
    assert 0 < hit_blocks(run) <= sum(optimal_hits(trace, 150)), policy


@pytest.mark.slow
def test_what_never_comes_back_costs_run_density_less_than_lru():
    traffic = Traffic(
        25, prompt_tokens=1500, turn_tokens=300, turns=4, gap_s=60.0, hours=0.25, block_tokens=256
    )
    trace = with_noise(traffic.trace())
    hits = {
        policy: hit_blocks(replay_instant(trace, lru(60, policy=policy)))
        for policy in ("lru", "rd-sec")
    }
    assert hits["rd-sec"] >= 1.3 * hits["lru"] > 0, hits


def test_without_time_every_full_block_counts_and_no_partial_one():
    trace = chains([1, 2, 3], [1, 2, 3], [1, 2, 4])
    run = replay_instant(trace, lru(100))
    assert hit_blocks(run) == 5
    assert run.whole.num_tokens == 3 * (3 * TOKENS + 1)


def test_written_at_once_everything_is_on_the_ssd_too():
    trace = busy()
    run = replay_instant(trace, lru(80, 100_000, overrides={"ssd.write": "store"}))
    assert hit_blocks(run) == sum(optimal_hits(trace, 100_000))
    assert run.written_blocks == trace.num_distinct
    assert run.whole.ratio(["ssd"]) > 0
    assert run.read_blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [replay_instant, replay_timed])
@pytest.mark.parametrize("policy", ["lru", "rd-sec"])
def test_the_same_trace_gives_the_same_figures(replayed, policy):
    trace = busy()
    setup = lru(80, 200, policy=policy, is_instant=replayed is replay_instant)
    first, second = (replayed(trace, setup).document() for _ in range(2))
    for each in (first, second):
        del each["decision_s"], each["node_s"]
    assert first == second


def test_with_time_a_request_waits_for_its_bytes_and_computes_the_rest():
    trace = chains([*range(40)], [*range(40)], step_s=100.0)
    machine = FAST.model_copy(update={"engines": ReplayEngines(call_s=0.0)})
    setup = lru(100, is_instant=False, machine=machine, overrides={"cost.restore": "always"})
    run = replay_timed(trace, setup)
    cold_s = machine.prefill_model.seconds(40 * TOKENS + 1, 0)
    # All but the last token are restored in next to no time: the floor is what is left.
    warm_s = machine.prefill_model.seconds(1, 40 * TOKENS)
    assert run.whole.ttft.mean_s == pytest.approx((cold_s + warm_s) / 2, rel=1e-3)
    assert run.whole.cold.mean_s == pytest.approx(cold_s)
    assert hit_blocks(run) == 40


def test_with_time_two_at_once_cannot_share_what_is_not_computed_yet():
    together = chains([*range(40)], [*range(40)], step_s=0.0)
    apart = chains([*range(40)], [*range(40)], step_s=100.0)
    setup = lru(100, is_instant=False)
    assert hit_blocks(replay_timed(together, setup)) == 0
    assert hit_blocks(replay_timed(apart, setup)) == 40


def test_engines_that_are_few_make_requests_wait():
    trace = chains(*([place] for place in range(20)), step_s=0.0)
    one = SMALL.model_copy(update={"engines": ReplayEngines(count=1)})
    many = replay_timed(trace, lru(100, is_instant=False))
    few = replay_timed(trace, lru(100, is_instant=False, machine=one))
    assert few.whole.ttft.p99_s > 5 * many.whole.ttft.p99_s
    assert few.whole.cold.p99_s > 5 * many.whole.cold.p99_s
    assert few.whole.num_requests == 20


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("rate", [1e6, 1e9, 1e11])
def test_at_every_speed_of_the_disk_every_request_gets_its_token(count, rate):
    trace = busy(hours=0.05)
    engines = ReplayEngines(count=count)
    link = ReplayLink(read_bytes_per_s=rate, write_bytes_per_s=rate)
    machine = SMALL.model_copy(update={"engines": engines, "ssd": link})
    setup = lru(60, 2000, policy="rd-sec", is_instant=False, machine=machine)
    run = replay_timed(trace, setup)
    assert run.whole.num_requests == len(trace.requests)
    assert run.whole.ttft.p50_s <= 1.05 * run.whole.cold.p50_s + 0.001


def test_a_request_without_a_full_block_and_one_longer_than_the_tier():
    trace = chains([], [*range(300)], [], [*range(300)])
    for replayed in (replay_instant, replay_timed):
        run = replayed(trace, lru(50, is_instant=replayed is replay_instant))
        assert run.whole.num_requests == 4
        assert hit_blocks(run) <= 50


def test_a_trace_with_one_request():
    trace = chains([1, 2])
    study = run_study(trace, [lru(4)], 1)
    assert study.runs[0].whole.num_requests == 1
    assert "chains" in study_text(study)


@pytest.mark.slow
def test_a_study_repeats_on_several_processes_and_keeps_its_order():
    trace = busy()
    setups = [lru(size, policy=policy) for policy in ("rd", "lru") for size in (60, 200)]
    alone, spread = (run_study(trace, setups, jobs) for jobs in (1, 2))
    assert [(r.policy, r.cpu_blocks) for r in spread.runs] == [
        (s.policy, s.cpu_blocks) for s in setups
    ]
    assert [r.whole for r in alone.runs] == [r.whole for r in spread.runs]
    assert alone.bounds == spread.bounds


@pytest.mark.slow
def test_what_is_shown_is_safe_and_fits_the_terminal():
    trace = replace(busy(), name="<b>name", notes=("a note & more",))
    setups = [lru(60, 100, is_instant=False), lru(200, 100, is_instant=False, policy="rd-sec")]
    study = run_study(trace, setups, 1)
    text, page = study_text(study), study_page(study)
    assert max(map(len, text.splitlines())) <= 80
    assert "<b>name" not in page
    assert "a note &amp; more" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


@pytest.mark.slow
def test_a_page_with_many_runs_has_bars_for_every_policy():
    setups = [lru(n, 100, policy=name) for name in ("rd", "lru") for n in (40, 60, 100, 200)]
    page = study_page(run_study(busy(), setups, 1))
    for policy in ("rd", "lru"):
        assert f"<title>{policy} 200, from ssd: " in page
        assert f"<title>{policy} 40, from ssd: " not in page, "they would not fit"


def test_a_part_of_nothing_has_no_ratio():
    part = TraceSummary.of([])
    assert (part.ratio(), part.saved_share, part.ttft.p99_s) == (0.0, 0.0, 0.0)


def test_a_ladder_spans_a_trace():
    sizes = default_sizes(busy())
    assert sizes == sorted(sizes)
    assert sizes[-1] <= busy().num_distinct
    assert np.prod(sizes) > 0
