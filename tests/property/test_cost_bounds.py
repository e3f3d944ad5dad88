"""Whatever is reported, the models predict finite, positive times, and mend."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.cost.engine import EngineCost
from kvtier.core.cost.fit import SECONDS_MAX, Fit, Rate
from kvtier.core.cost.route import RouteCosts
from kvtier.core.plan import EngineLoad, ModelFlops, StepSample, TransferSample
from kvtier.core.residency import TierName

SECOND = 1_000_000_000
MIB = 1 << 20

# What a broken client, clock or disk might report.
ODD_SECONDS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -1.0, 1e-12, 1e300, math.inf, -math.inf, math.nan]),
    st.floats(1e-6, 1e3),
)
ODD_COUNT = st.one_of(
    st.integers(-(10**30), 10**30), st.integers(0, 1000), st.just(math.nan), st.just(math.inf)
)
CLOCK = st.integers(-(10**19), 10**19)
TRANSFERS = st.builds(TransferSample, ODD_COUNT, ODD_COUNT, ODD_COUNT, ODD_SECONDS)
STEPS = st.builds(StepSample, ODD_COUNT, ODD_COUNT, ODD_SECONDS, ODD_COUNT, ODD_SECONDS)


def is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


@pytest.mark.slow
@given(st.lists(st.tuples(TRANSFERS, CLOCK), max_size=60), st.integers(1, 10**10))
@settings(max_examples=80, deadline=None)
def test_a_restore_has_a_finite_time(noted, block_bytes):
    route = RouteCosts().route(TierName.SSD)
    for sample, now_ns in noted:
        route.note(sample, now_ns)
    speed = route.speed(block_bytes)
    times = [speed.seconds(count) for count in (1, 7, 8, 9, 64, 1000, 16_384)]
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in times), times
    assert times == sorted(times), "more blocks take no less"
    assert all(1.0 <= speed.tail_of(count) <= 1e3 for count in (1, 100))
    assert 0 < route.bytes_per_s() < math.inf


@pytest.mark.slow
@given(st.lists(st.tuples(STEPS, CLOCK), max_size=60), st.builds(EngineLoad, ODD_COUNT, ODD_COUNT))
@settings(max_examples=80, deadline=None)
def test_computing_has_a_finite_time(noted, load):
    engine = EngineCost()
    for step, now_ns in noted:
        engine.note(step, now_ns)
    speed = engine.speed(load)
    assert is_time(engine.wait_s(load, speed))
    times = [speed.compute_s(0, end) for end in (1, 64, 512, 4096, 10**6)]
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in times), times
    assert times == sorted(times), "more tokens take no less"
    assert all(math.isfinite(speed.tail_of(seconds)) for seconds in times)
    assert 0 < engine.saved_s(4096, 64) <= SECONDS_MAX
    assert engine.saved_s(8192, 64) >= engine.saved_s(4096, 64), "deeper blocks save no less"


@given(st.builds(ModelFlops, ODD_SECONDS, ODD_SECONDS, ODD_SECONDS))
@settings(deadline=None)
def test_odd_figures_of_a_model_leave_a_finite_guess(flops):
    engine = EngineCost()
    engine.note_flops(flops)
    assert 0 < engine.saved_s(4096, 4096) <= SECONDS_MAX


@pytest.mark.slow
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    st.lists(st.integers(1, 8), min_size=40, max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_before_a_fit_finds_the_truth(before, sizes):
    fit = Fit((Rate(1e-3, 0.0, 60.0), Rate(1e-3, 0.0, 10.0)), 3.0)
    now_ns = 0
    for seconds in before:
        now_ns += SECOND // 10
        fit.note((1.0, 4.0), seconds, now_ns)
    for size in sizes:
        now_ns += SECOND // 10
        fit.note((1.0, size), 0.002 + 0.003 * size, now_ns)
    latest = sizes[-12:]
    for size in {size for size in latest if latest.count(size) >= 4}:  # others may be unknown
        assert fit.mean_s((1.0, size)) == pytest.approx(0.002 + 0.003 * size, rel=0.2)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([0.05, 0.2, 5.0, 20.0]), min_size=1, max_size=3),
    st.integers(4, 40),
    st.integers(-(10**15), 10**15),
)
@settings(max_examples=60, deadline=None)
def test_a_few_outliers_hardly_move_a_prediction(outliers, apart, clock_step_ns):
    route = RouteCosts().route(TierName.SSD)
    now_ns = 0

    def note(times: float, count: int) -> None:
        nonlocal now_ns
        for turn in range(count):
            now_ns += SECOND // 100
            noise = 1.0 + 0.05 * (-1) ** turn
            seconds = 0.03 * times * noise
            assert route.note(TransferSample(8, 24 * MIB, 1, seconds), now_ns)

    note(1.0, 40)
    for times in outliers:
        note(times, 1)
        now_ns += clock_step_ns
        note(1.0, apart)
    assert route.speed(3 * MIB).seconds(8) == pytest.approx(0.03, rel=0.15)


@given(st.floats(2.5, 50.0), st.sampled_from(list(TierName)[1:]), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_throttled_and_released_tier_shows_within_a_few_transfers(times, tier, seed):
    route = RouteCosts().route(tier)
    now_ns = seed

    def settle(seconds: float, count: int) -> float:
        nonlocal now_ns
        for _ in range(count):
            now_ns += SECOND // 20
            route.note(TransferSample(8, 24 * MIB, 1, seconds), now_ns)
        return route.speed(3 * MIB).seconds(8)

    assert settle(0.03, 30) == pytest.approx(0.03, rel=0.1)
    assert settle(0.03 * times, 6) == pytest.approx(0.03 * times, rel=0.25)
    assert settle(0.03, 6) == pytest.approx(0.03, rel=0.25)
