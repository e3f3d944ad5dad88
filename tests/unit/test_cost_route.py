"""The model of restores: from transfers to seconds."""

import math
import random

import pytest

from kvtier.core.cost.route import RouteCost, RouteCosts, transfer_blocks
from kvtier.core.plan import TransferSample
from kvtier.core.residency import LOWER_TIERS, TierName

SECOND = 1_000_000_000
MIB = 1 << 20


def fed(truth, samples, *, noise=0.0, tier=TierName.SSD) -> RouteCost:
    """Return a route that saw these (blocks, bytes, depth), a tenth of a second apart."""
    chance = random.Random(5)
    route = RouteCosts().route(tier)
    for turn, (blocks, num_bytes, depth) in enumerate(samples):
        seconds = truth(blocks, num_bytes, depth) * math.exp(chance.gauss(0, noise))
        sample = TransferSample(blocks, num_bytes, depth, seconds)
        assert route.note(sample, turn * SECOND // 10)
    return route


SIZES = [(1, MIB, 1), (8, 8 * MIB, 1), (2, 6 * MIB, 1), (8, 24 * MIB, 1), (1, 3 * MIB, 1)] * 8


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_start_and_bandwidth_come_out(noise):
    route = fed(lambda n, size, _: 2e-3 + n * 1e-4 + size / 5e8, SIZES, noise=noise)
    for count in (1, 4, 8):
        expected = 2e-3 + count * (1e-4 + 3 * MIB / 5e8)
        assert route.speed(3 * MIB).seconds(count) == pytest.approx(expected, rel=0.12)
    assert route.bytes_per_s() == pytest.approx(8 * MIB / (2.8e-3 + 8 * MIB / 5e8), rel=0.12)
    assert 1.0 <= route.speed(3 * MIB).tail < 1.4


def test_transfers_that_share_a_medium_do_not_add_up_their_speeds():
    depths = [(8, 24 * MIB, depth) for depth in (1, 2, 4)] * 12
    shared = fed(lambda _, size, depth: depth * size / 5e8, depths).speed(3 * MIB)
    apart = fed(lambda _, size, depth: size / 5e8, depths).speed(3 * MIB)
    assert shared.depth == apart.depth == 4
    assert shared.seconds(320) == pytest.approx(320 * 3 * MIB / 5e8, rel=0.15)
    assert apart.seconds(320) == pytest.approx(320 * 3 * MIB / 5e8 / 4, rel=0.15)


def test_what_is_queued_waits_as_long_as_it_takes_to_pass():
    speed = fed(lambda _, size, depth: depth * size / 5e8, [(8, 24 * MIB, 2)] * 12).speed(3 * MIB)
    assert speed.queue_s(160) == pytest.approx(speed.seconds(160), rel=0.05)
    assert speed.queue_s(0) == 0


def test_more_blocks_never_take_less():
    speed = fed(lambda _, size, depth: depth**0.5 * size / 5e8, SIZES).speed(MIB)
    times = [speed.seconds(count) for count in range(200)]
    assert times == sorted(times)
    assert times[0] == 0


def test_an_unmeasured_tier_is_doubted():
    restores = RouteCosts()
    seconds = [restores.route(tier).speed(3 * MIB).seconds(64) for tier in LOWER_TIERS]
    assert seconds == sorted(seconds), "memory, then a drive, then a network"
    assert all(0.01 < value < 10 for value in seconds)
    assert restores.route(TierName.SSD).speed(3 * MIB).tail >= 3
    assert not restores.document(), "guesses are not kept"


def test_one_measurement_replaces_the_guess():
    route = fed(lambda *_: 2.0, [(8, 24 * MIB, 1)])
    assert route.speed(3 * MIB).seconds(8) == pytest.approx(2.0, rel=0.05)
    assert route.speed(3 * MIB).tail > 2, "but not the doubt"


@pytest.mark.parametrize("times", [0.01, 100.0])
def test_one_outlier_changes_next_to_nothing(times):
    route = fed(lambda _, size, __: size / 5e8, [(8, 24 * MIB, 1)] * 32, noise=0.05)
    before = route.speed(3 * MIB).seconds(8)
    for turn in range(10):
        seconds = 24 * MIB / 5e8 * (times if turn == 0 else 1)
        route.note(TransferSample(8, 24 * MIB, 1, seconds), 4 * SECOND + turn)
        assert route.speed(3 * MIB).seconds(8) == pytest.approx(before, rel=0.1)


def test_the_slow_twentieth_shows_in_the_tail():
    chance = random.Random(3)
    samples = [(8, 24 * MIB, 1)] * 200
    spiky = fed(lambda *_: 0.5 if chance.random() < 0.15 else 0.05, samples)
    assert spiky.speed(3 * MIB).seconds(8) == pytest.approx(0.05, rel=0.3)
    assert spiky.speed(3 * MIB).tail > 5
    assert spiky.speed(3 * MIB).tail_of(8) > spiky.speed(3 * MIB).tail_of(800) > 1


@pytest.mark.parametrize(
    "sample",
    [
        TransferSample(8, MIB, 1, seconds)
        for seconds in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e9)
    ]
    + [
        TransferSample(0, MIB, 1, 1.0),
        TransferSample(8, 0, 1, 1.0),
        TransferSample(8, -5, 1, 1.0),
        TransferSample(8, 10**400, 1, 1.0),
        TransferSample(8, MIB, 0, 1.0),
    ],
    ids=str,
)
def test_what_cannot_be_is_left_out(sample):
    route = fed(lambda *_: 0.05, [(8, 24 * MIB, 1)] * 8)
    before = route.document()
    assert not route.note(sample, SECOND)
    assert route.document() == before


def test_a_clock_set_back_changes_no_prediction():
    route = fed(lambda *_: 0.05, [(8, 24 * MIB, 1)] * 8)
    for now_ns in (-(10**18), 10**18, 0):
        route.note(TransferSample(8, 24 * MIB, 1, 0.05), now_ns)
        assert route.speed(3 * MIB).seconds(8) == pytest.approx(0.05, rel=0.01)


def test_whole_restores_that_take_longer_stretch_the_prediction():
    route = fed(lambda *_: 0.05, [(8, 24 * MIB, 1)] * 8)
    for turn in range(10):
        route.note_whole(0.2, 0.4, turn * SECOND)
    assert route.speed(3 * MIB).lag == pytest.approx(2.0, rel=0.05)
    assert route.speed(3 * MIB).seconds(8) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("start_s", "num_blocks", "part"),
    [(0.0, 16, 1), (0.0, 64, 4), (0.0, 1024, 8), (0.0, 3, 1), (2e-3, 16, 3), (1.0, 16, 8)],
)
def test_what_is_loaded_from_the_back_comes_in_parts(start_s, num_blocks, part):
    # A block takes 6 ms: with 2 ms to begin, transfers of one would take a third longer.
    speed = fed(lambda _, size, __: start_s + size / 5e8, SIZES).speed(3 * MIB)
    cut = speed.in_parts(num_blocks)
    assert cut.part_blocks == part
    assert cut.seconds(num_blocks) >= speed.seconds(num_blocks) * 0.999
    assert cut.seconds(num_blocks) <= speed.seconds(num_blocks) * 1.12 + start_s


def test_an_unfinished_transfer_is_compared_with_those_of_its_direction():
    slow, fast = RouteCosts(), TransferSample(8, 24 * MIB, 1, 0.01)
    for turn in range(16):
        slow.route(TierName.SSD, is_read=False).note(TransferSample(8, 24 * MIB, 1, 1.0), turn)
        slow.route(TierName.SSD).note(TransferSample(8, 24 * MIB, 1, 0.001), turn)
    assert slow.route(TierName.SSD).is_slow(fast)
    assert not slow.route(TierName.SSD, is_read=False).is_slow(fast)


def test_a_transfer_carries_as_many_blocks_as_the_node_puts_into_it():
    assert [transfer_blocks(size) for size in (0, 1, MIB // 4, MIB, 64 * MIB)] == [64, 64, 32, 8, 8]
