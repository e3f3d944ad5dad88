import threading
import time

import pytest

from kvtier.errors import TierError, TierTimeout
from kvtier.testing.block import make_block, read_of
from kvtier.testing.faulty_tier import Fault, FaultyTier, scripted_faults, seeded_faults
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import MissReason
from kvtier.tiers.memory import EvictionOrder, MemoryTier
from kvtier.tiers.wrap import (
    BreakerState,
    BreakerTier,
    Call,
    CallOutcome,
    DeadlineTier,
    InstrumentTier,
    Operation,
)

READ, WRITE = Operation.READ, Operation.WRITE
CAPACITY_BYTES = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def in_ms(milliseconds: int) -> int:
    return time.monotonic_ns() + milliseconds * 1_000_000


def test_breaker_opens_probes_and_closes() -> None:
    clock = Clock()
    faults = [(READ, Fault.FAIL_BEFORE), (READ, Fault.TIMEOUT_AFTER), (READ, Fault.FAIL_BEFORE)]
    faulty = FaultyTier(MemoryTier(CAPACITY_BYTES), scripted_faults(*faults))
    tier = BreakerTier(faulty, faults_max=2, cool_down_ns=100, clock_ns=clock)
    block = make_block(1)
    store(tier, block)
    for _ in range(2):
        with pytest.raises(TierError):
            fetch(tier, block)
    assert tier.state is BreakerState.OPEN
    calls = len(faulty.log)
    with pytest.raises(TierError, match="left alone"):
        fetch(tier, block)
    assert len(faulty.log) == calls
    clock.now_ns = 100
    with pytest.raises(TierError, match="injected"):
        fetch(tier, block)  # the probe fails: open for as long again
    clock.now_ns = 199
    with pytest.raises(TierError, match="left alone"):
        fetch(tier, block)
    clock.now_ns = 200
    assert fetch(tier, block) == [None]
    assert tier.state is BreakerState.CLOSED


def test_breaker_counts_faults_in_a_row_only() -> None:
    faults = [(READ, Fault.FAIL_BEFORE), (WRITE, Fault.FAIL_BEFORE)]
    tier = BreakerTier(
        FaultyTier(MemoryTier(CAPACITY_BYTES), scripted_faults(*faults)), faults_max=2
    )
    with pytest.raises(TierError):
        fetch(tier, make_block(1))
    assert fetch(tier, make_block(1)) == [MissReason.ABSENT]
    with pytest.raises(TierError):
        tier.write([make_block(1)], soon())
    assert tier.state is BreakerState.CLOSED


def test_breaker_lets_one_probe_through_at_a_time() -> None:
    clock = Clock()
    script = scripted_faults((READ, Fault.FAIL_BEFORE), (READ, Fault.WAIT))
    faulty = FaultyTier(MemoryTier(CAPACITY_BYTES), script)
    tier = BreakerTier(faulty, faults_max=1, cool_down_ns=100, clock_ns=clock)
    with pytest.raises(TierError):
        fetch(tier, make_block(1))
    clock.now_ns = 100
    probe = threading.Thread(target=fetch, args=(tier, make_block(1)))
    probe.start()
    while len(faulty.log) < 2:
        assert probe.is_alive()
    with pytest.raises(TierError, match="left alone"):
        fetch(tier, make_block(1))
    faulty.release.set()
    probe.join(30)
    assert tier.state is BreakerState.CLOSED


def test_deadline_frees_the_caller_and_keeps_its_memory() -> None:
    memory = MemoryTier(CAPACITY_BYTES)
    faulty = FaultyTier(Deaf(memory), scripted_faults())
    tier = DeadlineTier(faulty, num_workers=2)
    block = make_block(1)
    store(memory, block)
    into = memoryview(bytearray(b"\xa5" * 5000))
    for lost in (1, 2):
        with pytest.raises(TierTimeout):
            tier.read([read_of(block, into)], in_ms(30))
        assert tier.num_lost == lost
    started = time.monotonic()
    with pytest.raises(TierError, match="stuck"):
        tier.read([read_of(block, into)], in_ms(20_000))
    assert time.monotonic() - started < 1
    faulty.inner.answer.set()
    faulty.inner.wait_for(2)
    while tier.num_lost:
        assert threading.active_count() > 1
    assert into == b"\xa5" * 5000
    assert fetch(tier, block) == [None]


class Deaf(FaultyTier):
    """A medium that does not answer, and does not know of deadlines, until ``answer`` is set."""

    def __init__(self, inner: MemoryTier) -> None:
        super().__init__(inner, scripted_faults())
        self.answer = threading.Event()
        self.answered = threading.Semaphore(0)

    def around(self, call, step):
        assert self.answer.wait(30)
        try:
            return super().around(Call(call.operation, 0, 0, soon()), step)
        finally:
            self.answered.release()

    def read(self, blocks, deadline_ns):
        return super().read(blocks, soon())

    def wait_for(self, calls: int) -> None:
        for _ in range(calls):
            assert self.answered.acquire(timeout=30)


def test_deadline_passes_faults_on() -> None:
    faulty = FaultyTier(
        MemoryTier(CAPACITY_BYTES),
        scripted_faults((READ, Fault.FAIL_BEFORE), (READ, Fault.TIMEOUT_AFTER)),
    )
    tier = DeadlineTier(faulty)
    with pytest.raises(TierError, match="injected before"):
        fetch(tier, make_block(1))
    with pytest.raises(TierTimeout, match="injected after"):
        fetch(tier, make_block(1))
    assert tier.num_lost == 0
    assert fetch(tier, make_block(1)) == [MissReason.ABSENT]


def test_instrument_reports_every_call() -> None:
    seen: list[tuple[Call, float, CallOutcome]] = []

    class Observer:
        def observe(self, call: Call, seconds: float, outcome: CallOutcome) -> None:
            seen.append((call, seconds, outcome))

    script = scripted_faults((READ, Fault.TIMEOUT_BEFORE), (READ, Fault.FAIL_BEFORE))
    tier = InstrumentTier(FaultyTier(MemoryTier(CAPACITY_BYTES), script), Observer())
    store(tier, make_block(1, 5000), make_block(2, 7000))
    for _ in range(2):
        with pytest.raises(TierError):
            fetch(tier, make_block(1))
    assert [(c.operation, c.num_blocks, c.num_bytes, o) for c, _, o in seen] == [
        (WRITE, 2, 12_000, CallOutcome.DONE),
        (READ, 1, 5000, CallOutcome.TIMEOUT),
        (READ, 1, 5000, CallOutcome.FAULT),
    ]
    assert all(seconds >= 0 for _, seconds, _ in seen)


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
    call = Call(READ, 1, 1, 0)
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
