"""A tier that is made slower: as slow as it is told to be, for as long as it is told."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvtier.core.identity import EVERYTHING
from kvtier.errors import TierTimeout
from kvtier.testing.block import make_block
from kvtier.testing.child import await_true
from kvtier.testing.throttle_tier import ThrottleTier
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason
from kvtier.tiers.memory import MemoryTier

BLOCK_BYTES = 100_000


def throttled(bytes_per_s: float = 0.0, latency_s: float = 0.0) -> tuple[ThrottleTier, BlockWrite]:
    """Return a tier that holds a block, and that block."""
    tier, block = ThrottleTier(MemoryTier(16 << 20)), make_block(1, BLOCK_BYTES)
    store(tier, block)
    tier.set(bytes_per_s, latency_s)
    return tier, block


def seconds_of(tier: ThrottleTier, *blocks: BlockWrite) -> float:
    began_s = time.monotonic()
    assert fetch(tier, *blocks) == [None] * len(blocks)
    return time.monotonic() - began_s


@pytest.mark.slow
def test_a_call_takes_its_bytes_and_its_latency() -> None:
    tier, block = throttled(bytes_per_s=2 * BLOCK_BYTES)
    assert seconds_of(tier, block) >= 0.5
    tier.set(0.0, latency_s=0.2)
    assert seconds_of(tier, block, block, block) >= 0.2
    tier.set(1.0, latency_s=1000.0)
    tier.set(0.0)
    assert seconds_of(tier, block) < 10


@pytest.mark.slow
def test_calls_share_the_wire_and_not_the_latency() -> None:
    tier, block = throttled(bytes_per_s=BLOCK_BYTES / 0.3, latency_s=1.0)
    began_s = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(fetch, tier, block) for _ in range(4)]:
            assert each.result(30) == [None]
    took_s = time.monotonic() - began_s
    assert took_s >= 4 * 0.3, "one block after the other"
    assert took_s < 4 * 1.0, "and all of them wait for their latency at once"


def _begun(tier: ThrottleTier, threads: ThreadPoolExecutor, block: BlockWrite) -> Future[object]:
    future: Future[object] = threads.submit(fetch, tier, block)
    await_true(lambda: len(tier._turns) > 0, "the call waits")
    return future


def test_it_is_released_while_a_call_waits() -> None:
    tier, block = throttled(bytes_per_s=BLOCK_BYTES / 1000)
    with ThreadPoolExecutor(1) as threads:
        future = _begun(tier, threads, block)
        tier.set(0.0)
        assert future.result(30) == [None]
    tier.set(0.0, latency_s=1000.0)
    with ThreadPoolExecutor(1) as threads:
        future = _begun(tier, threads, block)
        tier.set(0.0)
        assert future.result(30) == [None]


def test_what_is_too_slow_ends_at_its_deadline_and_reaches_nothing() -> None:
    tier, _ = throttled(bytes_per_s=1.0)
    other = make_block(2, BLOCK_BYTES)
    began_s = time.monotonic()
    with pytest.raises(TierTimeout):
        tier.write([other], time.monotonic_ns() + 100_000_000)
    assert 0.1 <= time.monotonic() - began_s < 5
    tier.set(0.0)
    assert fetch(tier, other) == [MissReason.ABSENT]


@pytest.mark.slow
def test_what_gave_up_is_not_waited_for() -> None:
    tier, block = throttled(bytes_per_s=BLOCK_BYTES)
    large = make_block(2, 50 * BLOCK_BYTES)
    with ThreadPoolExecutor(1) as threads:
        deadline_ns = time.monotonic_ns() + 200_000_000
        future = threads.submit(tier.write, [large], deadline_ns)
        await_true(lambda: len(tier._turns) > 0, "the call waits")
        assert seconds_of(tier, block) < 10
        with pytest.raises(TierTimeout):
            future.result(30)


def test_what_is_no_transfer_is_not_slowed() -> None:
    tier, block = throttled(latency_s=1000.0)
    began_s = time.monotonic()
    tier.health_check(soon())
    tier.scrub(1 << 20, soon())
    assert tier.remove([block.header.block_hash], soon()).num_blocks == 1
    assert tier.purge(EVERYTHING, soon()).num_blocks == 0
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("speed", [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0)])
def test_no_speed_is_refused(speed: tuple[float, float]) -> None:
    tier, block = throttled()
    with pytest.raises(ValueError, match="no speed"):
        tier.set(*speed)
    assert fetch(tier, block) == [None]


def test_speed_changes_under_many_calls() -> None:
    tier, block = throttled(bytes_per_s=100 * BLOCK_BYTES)
    is_over = threading.Event()

    def wobble() -> None:
        number = 0
        while not is_over.wait(0.001):
            number += 1
            tier.set((number % 3) * 1000 * BLOCK_BYTES, (number % 2) * 0.001)

    with ThreadPoolExecutor(5) as threads:
        wobbling = threads.submit(wobble)
        reading = [threads.submit(fetch, tier, block) for _ in range(100)]
        assert [each.result(60) for each in reading] == [[None]] * 100
        is_over.set()
        wobbling.result(30)
    assert not tier._turns
