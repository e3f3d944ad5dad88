"""The guard: a tier that does not pay is left alone, and comes back when it does."""

import pytest

from kvtier.core.cost.guard import TierGuard
from kvtier.core.residency import TierName

SECOND = 1_000_000_000
SSD = TierName.SSD


def after(gains, *, start_ns=0) -> TierGuard:
    """Return a guard that saw these outcomes, a tenth of a second apart."""
    guard = TierGuard()
    for turn, gain in enumerate(gains):
        guard.note(SSD, gain, start_ns + turn * SECOND // 10)
    return guard


def test_a_tier_that_loses_is_closed_and_the_others_are_not():
    assert after([-0.5] * 5).closed(SECOND) == {SSD}


@pytest.mark.parametrize(
    "gains",
    [
        [],
        [-1.0] * 4,  # a handful first
        [0.3] * 6 + [-1e6],  # one outlier, however large
        [0.3, -1.0] * 5,  # most do not lose
        [-0.01] * 10,  # what it costs is nothing
        [float("nan")] * 10,
        [float("-inf")] * 10,
    ],
    ids=str,
)
def test_a_tier_that_pays_or_is_not_proved_guilty_stays_open(gains):
    assert not after(gains).closed(2 * SECOND)


def test_after_the_pause_one_request_tries_it():
    guard = after([-0.5] * 5)
    assert guard.closed(4 * SECOND)
    assert not guard.closed(6 * SECOND), "the pause is over"
    guard.begin(SSD, 6 * SECOND)
    assert guard.closed(6 * SECOND) == {SSD}, "one at a time"
    guard.note(SSD, 0.4, 7 * SECOND)
    assert not guard.closed(7 * SECOND), "it pays again"


def test_each_trial_that_fails_doubles_the_pause_up_to_a_bound():
    guard = after([-0.5] * 5)
    now_ns, pauses = SECOND, []
    for _ in range(9):
        start_ns = now_ns
        while guard.closed(now_ns):
            now_ns += SECOND
        pauses.append(round((now_ns - start_ns) / SECOND))
        guard.begin(SSD, now_ns)
        guard.note(SSD, -0.5, now_ns)
    assert pauses[1:6] == [10, 20, 40, 80, 160]
    assert pauses[-1] == 160


def test_a_trial_of_which_nothing_is_heard_is_given_up():
    guard = after([-0.5] * 5)
    guard.begin(SSD, 6 * SECOND)
    assert guard.closed(30 * SECOND)
    assert not guard.closed(37 * SECOND)


def test_what_was_decided_before_the_tier_was_closed_opens_nothing():
    guard = after([-0.5] * 5)
    guard.note(SSD, 1.0, SECOND)
    assert guard.closed(SECOND) == {SSD}


@pytest.mark.parametrize("now_ns", [-(10**18), 0, 10**18])
def test_a_clock_that_jumps_leaves_nothing_closed_for_long(now_ns):
    guard = after([-0.5] * 5, start_ns=10**15)
    guard.begin(SSD, 10**15 + SECOND)
    if now_ns < 10**15:
        assert not guard.closed(now_ns), "set back: there may be a trial at once"
    assert not guard.closed(now_ns + 200 * SECOND)


def test_a_tier_that_pays_for_long_is_no_longer_on_probation():
    guard = after([-0.5] * 5)
    for now_s in (10, 30):
        guard.begin(SSD, now_s * SECOND)
        guard.note(SSD, -0.5, now_s * SECOND)
    guard.begin(SSD, 100 * SECOND)
    for turn in range(12):
        guard.note(SSD, 0.5, 100 * SECOND + turn)
    for turn in range(8):
        guard.note(SSD, -0.5, 101 * SECOND + turn)
    assert guard.closed(102 * SECOND) == {SSD}
    assert not guard.closed(107 * SECOND), "for the first pause again"


def test_the_gpu_tier_is_not_guarded():
    guard = TierGuard()
    for turn in range(10):
        guard.note(TierName.GPU, -1.0, turn)
    assert not guard.closed(SECOND)
