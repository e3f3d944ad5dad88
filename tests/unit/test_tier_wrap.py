import threading

import pytest

from kvtier.core.identity import EVERYTHING
from kvtier.errors import TierError, TierTimeout
from kvtier.testing.block import make_block
from kvtier.testing.faulty_tier import Fault, FaultyTier, scripted_faults, seeded_faults
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import Health, HealthState, MissReason
from kvtier.tiers.breaker import BreakerState, BreakerTier
from kvtier.tiers.memory import EvictionOrder, MemoryTier
from kvtier.tiers.wrapper import Operation, TierCall

READ, WRITE, HEALTH_CHECK = Operation.READ, Operation.WRITE, Operation.HEALTH_CHECK
CAPACITY_BYTES = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def breaker(*faults: tuple[Operation, Fault], faults_max: int = 2) -> tuple[BreakerTier, Clock]:
    clock = Clock()
    faulty = FaultyTier(MemoryTier(CAPACITY_BYTES), scripted_faults(*faults))
    tier = BreakerTier(faulty, faults_max=faults_max, cool_down_ns=100, clock_ns=clock)
    return tier, clock


def opened(*more: tuple[Operation, Fault]) -> tuple[BreakerTier, Clock]:
    """Return a breaker that two reads have opened; ``more`` faults are to come."""
    tier, clock = breaker((READ, Fault.FAIL_BEFORE), (READ, Fault.TIMEOUT_AFTER), *more)
    for _ in range(2):
        with pytest.raises(TierError):
            fetch(tier, make_block(1))
    assert tier.state is BreakerState.OPEN
    return tier, clock


def test_breaker_opens_checks_and_closes() -> None:
    tier, clock = opened((HEALTH_CHECK, Fault.FAIL_BEFORE))
    calls = len(tier.inner.log)
    with pytest.raises(TierError, match="circuit breaker open"):
        fetch(tier, make_block(1))
    assert len(tier.inner.log) == calls
    clock.now_ns = 100
    with pytest.raises(TierError, match="injected"):
        tier.health_check(soon())  # it fails: open for as long again
    clock.now_ns = 199
    with pytest.raises(TierError, match="circuit breaker open"):
        tier.health_check(soon())
    clock.now_ns = 200
    tier.health_check(soon())
    assert tier.state is BreakerState.CLOSED
    assert fetch(tier, make_block(1)) == [MissReason.ABSENT]


def test_nobodys_call_is_the_experiment() -> None:
    tier, clock = opened()
    clock.now_ns = 10_000
    for call in (
        lambda: fetch(tier, make_block(1)),
        lambda: tier.write([make_block(1)], soon()),
        lambda: tier.contains([], soon()),
        lambda: tier.purge(EVERYTHING, soon()),
        lambda: tier.scrub(1, soon()),
    ):
        with pytest.raises(TierError, match="circuit breaker open"):
            call()
    assert tier.state is BreakerState.OPEN
    assert tier.needs_health_check(10**12)


def test_breaker_counts_faults_in_a_row_only() -> None:
    tier, _ = breaker((READ, Fault.FAIL_BEFORE), (WRITE, Fault.FAIL_BEFORE))
    with pytest.raises(TierError):
        fetch(tier, make_block(1))
    assert fetch(tier, make_block(1)) == [MissReason.ABSENT]
    with pytest.raises(TierError):
        tier.write([make_block(1)], soon())
    assert tier.state is BreakerState.CLOSED


def test_reads_that_still_come_do_not_hide_a_medium_that_cannot_be_touched() -> None:
    tier, _ = breaker((HEALTH_CHECK, Fault.FAIL_BEFORE), (HEALTH_CHECK, Fault.FAIL_BEFORE))
    for _ in range(2):
        assert fetch(tier, make_block(1)) == [MissReason.ABSENT]
        with pytest.raises(TierError):
            tier.health_check(soon())
    assert tier.state is BreakerState.OPEN
    assert tier.health() == Health(HealthState.OUT, "a fault was injected before the call")


def test_what_asks_too_much_is_no_fault_of_the_medium() -> None:
    tier, _ = breaker(
        (Operation.PURGE, Fault.TIMEOUT_AFTER), (Operation.SCRUB, Fault.TIMEOUT_AFTER), faults_max=1
    )
    with pytest.raises(TierTimeout):
        tier.purge(EVERYTHING, soon())
    with pytest.raises(TierTimeout):
        tier.scrub(1, soon())
    assert tier.state is BreakerState.CLOSED


def test_a_call_after_its_own_deadline_asks_nobody_and_tells_nothing() -> None:
    tier, clock = breaker(faults_max=1)
    clock.now_ns = 1000
    with pytest.raises(TierTimeout, match="passed before"):
        tier.contains([], 1000)
    assert tier.inner.log == []
    assert tier.state is BreakerState.CLOSED


def test_a_medium_is_touched_once_a_period_and_soon_after_a_fault() -> None:
    tier, clock = breaker((READ, Fault.FAIL_BEFORE))
    assert not tier.needs_health_check(50)
    clock.now_ns = 50
    assert tier.needs_health_check(50)
    tier.health_check(soon())
    assert not tier.needs_health_check(50)
    with pytest.raises(TierError):
        fetch(tier, make_block(1))
    assert tier.needs_health_check(50)
    tier.health_check(soon())
    assert not tier.needs_health_check(50)


def test_breaker_lets_one_health_check_through_at_a_time() -> None:
    tier, clock = opened((HEALTH_CHECK, Fault.WAIT))
    clock.now_ns = 100
    check = threading.Thread(target=tier.health_check, args=(soon(),))
    check.start()
    while len(tier.inner.log) < 3:
        assert check.is_alive()
    assert not tier.needs_health_check(0)
    with pytest.raises(TierError, match="circuit breaker open"):
        tier.health_check(soon())
    tier.inner.release.set()
    check.join(30)
    assert tier.state is BreakerState.CLOSED


def test_faults_are_what_they_say() -> None:
    block = make_block(1)
    script = scripted_faults(
        (WRITE, Fault.FAIL_BEFORE),
        (WRITE, Fault.FAIL_AFTER),
        (READ, Fault.FLIP_BIT),
        (READ, Fault.TRUNCATE),
        (READ, Fault.SERVE_DAMAGED),
        (READ, Fault.LOSE),
    )
    memory = MemoryTier(CAPACITY_BYTES)
    tier = FaultyTier(memory, script)
    for is_stored in (False, True):
        with pytest.raises(TierError):
            tier.write([block], soon())
        assert memory.contains([block.header.block_hash], soon()) == [is_stored]
    assert fetch(tier, block) == [MissReason.CHECKSUM]
    assert fetch(tier, block) == [MissReason.LENGTH]
    with pytest.raises(AssertionError):
        fetch(tier, block)
    assert fetch(tier, block) == [MissReason.ABSENT]


def test_a_seed_gives_the_same_faults_again() -> None:
    call = TierCall(READ, 1, 1, 0)
    first, second, other = (seeded_faults(seed, 0.5) for seed in (7, 7, 8))
    drawn = [first(call) for _ in range(100)]
    assert drawn == [second(call) for _ in range(100)]
    assert drawn != [other(call) for _ in range(100)]
    assert 30 < sum(fault is not None for fault in drawn) < 70


@pytest.mark.parametrize(("order", "evicted"), [(EvictionOrder.FIFO, 0), (EvictionOrder.LRU, 1)])
def test_memory_evicts_in_its_order(order: EvictionOrder, evicted: int) -> None:
    blocks = [make_block(number, 5000) for number in range(4)]
    tier = MemoryTier(3 * 5128, order=order)
    store(tier, *blocks[:3])
    assert fetch(tier, blocks[0]) == [None]
    report = tier.write([blocks[3]], soon())
    assert report.evicted == (blocks[evicted].header.block_hash,)
