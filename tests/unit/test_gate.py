"""The gate lets the best share through, whatever the scores are and however they change."""

import hashlib
import random
from itertools import count

import pytest

from kvtier.core.admission import QuantileGate

MIB = 1 << 20
SECOND = 1_000_000_000


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8)).digest()[:16]


def run(gate, scores, *, num_bytes=MIB, pause_ns=SECOND // 10, start=0):
    """Offer blocks one after the other; returns how many went through."""
    clock = count(start * pause_ns, pause_ns)
    return sum(
        gate.take(score, key(start + number), num_bytes=num_bytes, now_ns=next(clock))
        for number, score in enumerate(scores)
    )


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.15, 0.5, 0.75])
def test_each_half_of_a_day_has_its_share(share):
    seed = 7
    print(f"seed {seed}")
    draw = random.Random(seed)
    gate = QuantileGate(share)
    morning = [draw.betavariate(2, 5) for _ in range(20_000)]
    evening = [draw.betavariate(5, 2) / 2 for _ in range(20_000)]
    for number, half in enumerate((morning, evening)):
        taken = run(gate, half, start=number * 20_000)
        assert taken == pytest.approx(share * 20_000, rel=0.1)


def test_the_better_half_goes_through():
    draw = random.Random(3)
    gate = QuantileGate(0.5)
    run(gate, [draw.random() for _ in range(20_000)])
    good = run(gate, [draw.uniform(0.6, 1) for _ in range(100)], start=20_000)
    bad = run(gate, [draw.uniform(0, 0.4) for _ in range(100)], start=20_100)
    assert (good, bad) == (100, 0)


def test_equal_scores_are_told_apart_by_their_hashes_the_same_each_time():
    gate = QuantileGate(0.5)
    taken = run(gate, [0.3] * 20_000)
    assert taken == pytest.approx(10_000, rel=0.1)
    first = [gate.would_take(0.3, key(number)) for number in range(1000)]
    run(gate, [0.3] * 20, start=50_000)
    again = [gate.would_take(0.3, key(number)) for number in range(1000)]
    assert sum(a != b for a, b in zip(first, again, strict=True)) < 400
    assert 300 < sum(first) < 700


def test_at_first_everything_goes_through_that_is_worth_anything():
    gate = QuantileGate(0.75)
    assert gate.would_take(0.0, key(1))
    assert not gate.would_take(-1.0, key(1))


def test_what_had_to_be_written_counts_as_written():
    draw = random.Random(5)
    gate = QuantileGate(0.5)
    free_taken = 0
    for number in range(20_000):
        if number % 4 == 0:
            gate.take_needed(num_bytes=MIB, now_ns=0)
        else:
            free_taken += gate.take(draw.random(), key(number), num_bytes=MIB, now_ns=0)
    assert gate.num_taken == pytest.approx(10_000, rel=0.1)
    assert free_taken == pytest.approx(5_000, rel=0.15)


@pytest.mark.slow
def test_a_gate_that_was_shut_by_needs_opens_again():
    gate = QuantileGate(0.5)
    for _ in range(100_000):
        gate.take_needed(num_bytes=MIB, now_ns=0)
    draw = random.Random(6)
    run(gate, [draw.random() for _ in range(120_000)], start=1)
    assert run(gate, [draw.random() for _ in range(1000)], start=120_001) > 400


@pytest.mark.parametrize(("share", "taken"), [(0.0, 0), (1.0, 5000)])
def test_none_and_all(share, taken):
    draw = random.Random(8)
    gate = QuantileGate(share)
    assert run(gate, [draw.random() for _ in range(5000)]) == taken


def test_a_budget_lowers_the_share():
    gate = QuantileGate(0.75)
    gate.note_allowance(2.0 * MIB)  # of ten a second
    draw = random.Random(9)
    run(gate, [draw.random() for _ in range(10_000)])
    assert gate.share == pytest.approx(0.2, rel=0.1)
    taken = run(gate, [draw.random() for _ in range(10_000)], start=10_000)
    assert taken == pytest.approx(2000, rel=0.15)
    gate.note_allowance(None)
    assert gate.share == 0.75


def test_a_budget_that_is_spent_shuts_the_gate():
    gate = QuantileGate(0.75)
    run(gate, [0.5] * 100)
    gate.note_allowance(0.0)
    assert not gate.would_take(1.0, key(1))


def test_a_clock_that_is_set_back_or_leaps_changes_little():
    gate = QuantileGate(0.75)
    gate.note_allowance(5.0 * MIB)
    run(gate, [0.5] * 2000)
    before = gate.share
    gate.take(0.5, key(1), num_bytes=MIB, now_ns=0)
    assert gate.share == pytest.approx(before, rel=0.01)
    gate.take(0.5, key(2), num_bytes=MIB, now_ns=10**18)
    assert gate.share == 0.75  # after years of silence a block is no burst
