"""The model of computing: from an engine's steps to seconds."""

import math
import random

import pytest

from kvtier.core.cost.engine import EngineCost
from kvtier.core.plan import EngineLoad, ModelFlops, StepSample

SECOND = 1_000_000_000
IDLE = EngineLoad()


def step(new, past=0, *, decoding=0, decode_past=0, seconds) -> StepSample:
    return StepSample(new, decoding, new * (past + new / 2), decode_past, seconds)


def true_s(new, past, *, token_s=1e-4, floor_s=0.01, attended_s=2e-9) -> float:
    return max(floor_s, new * token_s) + attended_s * new * (past + new / 2)


def fed(*, noise=0.0, count=60, **truth) -> EngineCost:
    """Return a model that saw chunks of 512 and some shorter ends, at many depths."""
    chance = random.Random(4)
    engine = EngineCost()
    for turn in range(count):
        new, past = chance.choice([512, 512, 512, 300, 40]), chance.randrange(0, 30_000)
        seconds = true_s(new, past, **truth) * math.exp(chance.gauss(0, noise))
        assert engine.note(step(new, past, seconds=seconds), turn * SECOND // 20)
    return engine


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("end", [512, 4096, 32_768])
def test_token_and_attention_come_out(noise, end):
    speed = fed(noise=noise).speed(IDLE)
    expected = sum(true_s(512, past) for past in range(0, end, 512))
    assert speed.chunk == 512
    assert speed.compute_s(0, end) == pytest.approx(expected, rel=0.1)


def test_few_tokens_take_the_floor():
    engine = fed()
    for turn in range(20):
        engine.note(step(1, decoding=0, seconds=0.01), turn)
        engine.note(StepSample(0, 4, 0.0, 4000, 0.0105), turn)
    speed = engine.speed(IDLE)
    assert speed.compute_s(0, 1) == pytest.approx(0.01, rel=0.15)
    assert speed.compute_s(0, 60) == pytest.approx(0.01, rel=0.15)
    assert speed.knee_tokens == pytest.approx(100, rel=0.35)


def test_a_full_batch_does_not_look_like_slow_prefill():
    quiet, full = fed(), EngineCost()
    chance = random.Random(4)
    for turn in range(60):
        now_ns = turn * SECOND // 20
        decoding, past = chance.choice([8, 24, 48]), chance.randrange(0, 30_000)
        new, decode_s = 512 - decoding, decoding * 4e-4
        full.note(StepSample(0, decoding, 0.0, decoding * 1000, 0.01 + decode_s), now_ns)
        seconds = true_s(new, past) + decode_s
        full.note(
            step(new, past, decoding=decoding, decode_past=decoding * 1000, seconds=seconds), now_ns
        )
    expected = quiet.speed(IDLE).compute_s(0, 4096)
    assert full.speed(IDLE).compute_s(0, 4096) == pytest.approx(expected, rel=0.15)
    loaded = full.speed(EngineLoad(0, 48)).compute_s(0, 4096)
    assert loaded == pytest.approx(expected + 9 * 48 * 4e-4, rel=0.2), "each step takes them along"


def test_a_request_waits_for_all_that_came_before():
    engine = fed()
    load = EngineLoad(waiting_tokens=51_200)
    assert engine.wait_s(load, engine.speed(load)) > 100 * 512 * 1e-4
    assert engine.wait_s(IDLE, engine.speed(IDLE)) == 0


def test_before_anything_was_measured_the_engine_is_thought_fast():
    guess = EngineCost().saved_s(4096, 4096)
    assert 0.1 < guess < 0.5, "some 15,000 tokens a second"


def test_the_first_steps_replace_the_guess():
    engine = EngineCost()
    engine.note(step(512, seconds=2.0), 0)
    assert engine.is_measured
    assert engine.speed(IDLE).compute_s(0, 512) == pytest.approx(2.0, rel=0.1)


def test_a_model_says_how_much_work_it_is_until_it_was_measured():
    engine = EngineCost()
    engine.note_flops(ModelFlops(per_token=16e9, per_attended=5e5, per_s=1e14))
    assert engine.saved_s(4096, 4096) == pytest.approx(16e9 / 1e14 * 4096, rel=0.2)
    engine.note(step(512, seconds=1.0), 0)
    engine.note_flops(ModelFlops(per_token=16e9, per_attended=5e5, per_s=1e14))
    assert engine.speed(IDLE).compute_s(0, 512) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("per_s", [0.0, -1.0, math.nan, math.inf, 1.0])
def test_a_device_of_no_speed_leaves_the_guess(per_s):
    engine = EngineCost()
    engine.note_flops(ModelFlops(16e9, 5e5, per_s))
    assert engine.document() == EngineCost().document()


def test_deeper_blocks_save_more():
    engine = fed()
    shallow, deep = engine.saved_s(64, 64), engine.saved_s(32_768, 64)
    assert deep - shallow == pytest.approx(64 * 32_700 * 2e-9, rel=0.1)
    assert engine.saved_s(32_768, 128) == pytest.approx(2 * deep, rel=0.01)


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_one_step_ten_times_wrong_changes_next_to_nothing(times):
    engine = fed(noise=0.03)
    before = engine.speed(IDLE).compute_s(0, 4096)
    for turn in range(10):
        seconds = true_s(512, 1024) * (times if turn == 0 else 1)
        engine.note(step(512, 1024, seconds=seconds), 4 * SECOND + turn)
    assert engine.speed(IDLE).compute_s(0, 4096) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("times", [0.2, 5.0])
def test_another_speed_shows_after_a_few_steps(times):
    engine = fed(noise=0.03)
    before = engine.speed(IDLE).compute_s(0, 4096)
    for turn in range(8):
        engine.note(step(512, 512 * turn, seconds=true_s(512, 512 * turn) * times), 4 * SECOND)
    assert engine.speed(IDLE).compute_s(0, 4096) == pytest.approx(before * times, rel=0.2)


@pytest.mark.parametrize(
    "bad",
    [
        step(512, seconds=math.nan),
        step(512, seconds=-1.0),
        step(512, seconds=math.inf),
        StepSample(-5, 0, 1.0, 0, 1.0),
        StepSample(0, 0, 0.0, 0, 1.0),
        StepSample(512, 0, math.nan, 0, 1.0),
        StepSample(512, 0, -1.0, 0, 1.0),
        StepSample(512, 0, 1.0, 10**400, 1.0),
        StepSample(10**12, 0, 1.0, 0, 1.0),
    ],
    ids=str,
)
def test_what_cannot_be_is_left_out(bad):
    engine = fed()
    before = engine.document()
    assert not engine.note(bad, SECOND)
    assert engine.document() == before


@pytest.mark.parametrize("odd", [-1, 10**300, math.nan])
def test_an_odd_load_is_brought_to_what_is_possible(odd):
    engine = fed()
    load = EngineLoad(odd, odd)
    speed = engine.speed(load)
    assert 0 <= engine.wait_s(load, speed) <= 1e5
    assert speed.chunk >= 1


def test_requests_that_take_longer_than_their_steps_stretch_the_prediction():
    engine = fed()
    before = engine.speed(IDLE).compute_s(0, 4096)
    for turn in range(10):
        engine.note_whole(1.0, 1.5, turn * SECOND)
    assert engine.speed(IDLE).compute_s(0, 4096) == pytest.approx(1.5 * before, rel=0.05)
