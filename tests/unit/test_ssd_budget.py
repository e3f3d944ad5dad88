"""The token bucket of bytes, alone and in the store."""

from pathlib import Path

import pytest

from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import WriteOutcome
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.store import SsdTier
from kvtier.tiers.ssd.store_limits import DAY_S, WriteBudget

START_S = 10**9


class Clock:
    """The time of day, as the test sets it."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> int:
        return self.now_s


class Bucket:
    """A budget with a clock and a counter of what was written."""

    def __init__(self, day_bytes: int) -> None:
        self.clock = Clock()
        self.written_bytes = 0
        self.budget = WriteBudget(day_bytes, lambda: self.written_bytes, self.clock)

    def write(self, num_bytes: int) -> None:
        self.written_bytes += num_bytes

    @property
    def left(self) -> int:
        return self.budget.available_bytes()


def test_a_day_is_there_at_the_start_and_comes_back_evenly() -> None:
    bucket = Bucket(DAY_S * 10)
    assert bucket.left == DAY_S * 10
    bucket.write(DAY_S * 10)
    assert bucket.left == 0
    bucket.clock.now_s += 1
    assert bucket.left == 10
    bucket.clock.now_s += DAY_S // 2
    assert bucket.left == 10 + DAY_S * 5
    bucket.clock.now_s += 10 * DAY_S
    assert bucket.left == DAY_S * 10


def test_a_debt_is_paid_first_and_never_lasts_longer_than_a_day() -> None:
    bucket = Bucket(DAY_S)
    bucket.write(DAY_S + 100)
    assert bucket.left == 0
    bucket.clock.now_s += 100
    assert bucket.left == 0
    bucket.clock.now_s += 1
    assert bucket.left == 1
    bucket.budget.recall(1000 * DAY_S)
    bucket.clock.now_s += DAY_S + 1
    assert bucket.left == 1


@pytest.mark.parametrize("leap_s", [-1, -10 * DAY_S])
def test_a_clock_set_back_refills_nothing_and_stops_nothing(leap_s: int) -> None:
    bucket = Bucket(DAY_S)
    bucket.write(DAY_S)
    assert bucket.left == 0
    bucket.clock.now_s += leap_s
    assert bucket.left == 0
    bucket.clock.now_s += 5
    assert bucket.left == 5


def test_a_clock_that_leaps_ahead_gives_a_day_and_no_more() -> None:
    bucket = Bucket(DAY_S)
    bucket.write(DAY_S)
    bucket.clock.now_s += 100 * DAY_S
    assert bucket.left == DAY_S


def test_without_a_budget_all_is_allowed() -> None:
    bucket = Bucket(0)
    bucket.write(1 << 60)
    assert bucket.budget.allows(1 << 60)
    assert not bucket.budget.is_limited


SEGMENT_BYTES = 1 << 20
BLOCK_BYTES = 16_000
DAY_BYTES = 20 * 20_480 + 4096
"""Twenty records and the header page of their segment."""


def open_tier(directory: Path, clock: Clock, day_bytes: int = DAY_BYTES) -> SsdTier:
    options = SsdOptions(write_budget_bytes=day_bytes, now_s=clock)
    return SsdTier(directory, 8 << 20, SEGMENT_BYTES, options)


def outcomes(tier: SsdTier, numbers: range) -> list[WriteOutcome]:
    blocks = [make_block(number, BLOCK_BYTES) for number in numbers]
    return list(tier.write(blocks, soon()).outcomes)


def test_beyond_the_budget_blocks_are_rejected_and_nothing_is_given_up(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    assert tier.usage().detail["write_budget_bytes"] == DAY_BYTES
    assert tier.usage().detail["write_budget_day_bytes"] == DAY_BYTES
    assert tier.usage().detail["write_budget"] == "left"
    told = outcomes(tier, range(30))
    assert told == [WriteOutcome.STORED] * 20 + [WriteOutcome.REJECTED] * 10
    assert tier.usage().detail["write_budget_bytes"] < 20_480
    assert tier.usage().detail["write_budget"] == "used_up"
    assert not tier.health().reason
    assert fetch(tier, *[make_block(number, BLOCK_BYTES) for number in range(20)]) == [None] * 20
    clock.now_s += DAY_S // 2
    assert tier.usage().detail["write_budget"] == "left", "what was refused could be written now"
    told = outcomes(tier, range(20, 40))
    assert told == [WriteOutcome.STORED] * 10 + [WriteOutcome.REJECTED] * 10
    tier.close()


def test_without_a_budget_there_is_no_gauge(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 8 << 20, SEGMENT_BYTES)
    assert "write_budget_bytes" not in tier.usage().detail
    tier.close()


def test_a_restart_does_not_fill_the_bucket(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    assert outcomes(tier, range(20)) == [WriteOutcome.STORED] * 20
    tier.close()
    clock.now_s += 60
    tier = open_tier(tmp_path, clock)
    assert outcomes(tier, range(20, 25)) == [WriteOutcome.REJECTED] * 5
    tier.close()
    clock.now_s += DAY_S
    tier = open_tier(tmp_path, clock)
    assert outcomes(tier, range(20, 25)) == [WriteOutcome.STORED] * 5
    tier.close()


def test_what_is_there_already_costs_nothing(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    store(tier, *[make_block(number, BLOCK_BYTES) for number in range(20)])
    assert outcomes(tier, range(20)) == [WriteOutcome.STORED] * 20
    tier.close()
