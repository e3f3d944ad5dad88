"""The node's counters: each where it happens, under its label, and with the sums that must hold."""

from dataclasses import replace

import pytest
from dialogue import CPU, MS, REMOTE, SSD, empty_cpu, engine_on, open_harness

from kvtier.core.identity import HASH_BYTES
from kvtier.node.messages import events as ev
from kvtier.observe.daemon_metrics import (
    ABSENT_TOKENS,
    ADMISSION_BLOCKS,
    ASKED_TOKENS,
    EVICTED_BLOCKS,
    FOUND_TOKENS,
    LOADED_TOKENS,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    ORDERED_TOKENS,
    TRANSFER_BYTES,
    TRANSFER_QUEUE_SECONDS,
    TRANSFER_SECONDS,
    UNLOADED_TOKENS,
)
from kvtier.observe.metrics import Metric
from kvtier.testing.node_harness import NodeHarness

TOKENS = 64
"""Of a block."""

BYTES = 3000


def count(harness: NodeHarness, metric: Metric, suffix: str = "", **labels: str) -> float:
    value = harness.metrics.registry.get_sample_value(metric.name + suffix, labels)
    assert value is not None, f"{metric.name} {labels}"
    return value


def by(harness: NodeHarness, metric: Metric, label: str, **fixed: str) -> dict[str, float]:
    """Return the counts that are not 0, by a label."""
    values = dict(metric.labels)[label]
    counts = {each: count(harness, metric, **fixed, **{label: each}) for each in values}
    return {each: n for each, n in counts.items() if n}


def copied(harness: NodeHarness, route: str) -> dict[str, float]:
    """Return blocks that went over a route, by how that ended."""
    return {
        outcome: n / BYTES
        for outcome, n in by(harness, TRANSFER_BYTES, "outcome", route=route).items()
    }


def unloaded(harness: NodeHarness) -> dict[str, float]:
    """Return blocks that a load was to bring and did not, by why."""
    return {why: n / TOKENS for why, n in by(harness, UNLOADED_TOKENS, "reason").items()}


def spread(harness, engine, numbers):
    """Store a prompt, and let it leave the CPU tier once it is on the others."""
    blocks = engine.chain(numbers)
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    return blocks


def test_a_lookup_is_counted_in_blocks_and_tokens():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = spread(harness, engine, range(4))
    engine.store(engine.chain(range(100, 103)))
    engine.prepare(engine.chain(range(100, 105)), 3)  # two more are pending
    assert engine.found([*blocks, *engine.chain(range(9))[4:7]]) == (SSD,) * 4
    engine.found(engine.chain(range(100, 106)), 1)
    assert by(harness, LOOKUP_BLOCKS, "tier", outcome="hit") == {"ssd": 4, "cpu": 2}
    assert by(harness, LOOKUP_BLOCKS, "tier", outcome="pending") == {"cpu": 2}
    assert by(harness, LOOKUP_BLOCKS, "tier", outcome="miss") == {"none": 4}
    assert by(harness, FOUND_TOKENS, "tier") == {"ssd": 4 * TOKENS, "cpu": 4 * TOKENS}
    assert count(harness, ABSENT_TOKENS) == 4 * TOKENS
    assert count(harness, ASKED_TOKENS) == 12 * TOKENS


def test_a_whole_load_is_counted_by_the_tiers_it_came_from():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = spread(harness, engine, range(6))
    first = engine.load(blocks[:2])
    harness.settle()
    first.take()
    first.release()
    load = engine.load(blocks)
    harness.settle()
    assert load.take() == [CPU] * 2 + [SSD] * 4
    load.release()
    assert count(harness, ORDERED_TOKENS) == 8 * TOKENS
    assert by(harness, LOADED_TOKENS, "tier") == {"ssd": 6 * TOKENS, "cpu": 2 * TOKENS}
    assert unloaded(harness) == {}
    assert copied(harness, "ssd_to_cpu") == {"complete": 6}
    assert copied(harness, "cpu_to_gpu") == {"complete": 8}
    assert copied(harness, "gpu_to_cpu") == copied(harness, "cpu_to_ssd") == {"complete": 6}
    harness.check_idle()


def test_what_a_load_does_not_bring_is_counted_by_why():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = spread(harness, engine, range(4))

    late = engine.load(blocks, within_ns=50 * MS)
    harness.advance(50 * MS)
    late.take()
    assert unloaded(harness) == {"late": 4}
    late.release()
    harness.settle()  # what was being read goes on, as a promotion
    empty_cpu(harness)

    released = engine.load(blocks)
    released.take()
    released.release()
    assert unloaded(harness) == {"late": 4, "released": 4}
    harness.settle()
    empty_cpu(harness)

    failed = engine.load(blocks)
    harness.fail(harness.waiting[0])
    failed.take()
    assert unloaded(harness) == {"late": 4, "released": 4, "failed": 4}
    failed.release()

    gone = engine.load(engine.chain([*range(4), 50, 51]))
    harness.settle()
    assert gone.take() == [SSD] * 4
    gone.release()
    assert unloaded(harness) == {"late": 4, "released": 4, "failed": 4, "absent": 2}
    assert count(harness, ORDERED_TOKENS) == 18 * TOKENS
    assert by(harness, LOADED_TOKENS, "tier") == {"ssd": 4 * TOKENS}
    assert by(harness, MISS_BLOCKS, "reason", tier="ssd") == {"late": 4, "fault": 4}
    harness.check_idle()


def test_a_load_without_room_and_one_of_an_engine_that_dies_are_counted():
    harness = open_harness(SSD, slots=4)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    for length in range(1, 5):
        engine.store(blocks[:length])
        harness.settle()
    empty_cpu(harness)
    load = engine.load(blocks)
    harness.settle()
    load.take()
    num_loaded = len(load.accepted)
    assert 0 < num_loaded < 4
    assert unloaded(harness) == {"no_room": 4 - num_loaded}
    engine.die()
    assert copied(harness, "cpu_to_gpu") == {"cancelled": num_loaded}
    assert count(harness, ORDERED_TOKENS) == 4 * TOKENS


def test_what_was_handed_out_and_never_released_is_late():
    harness = open_harness(slots=64)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    load = engine.load(blocks)
    load.take()
    harness.advance(10_000_000 * MS)
    assert not load.release()
    assert copied(harness, "cpu_to_gpu") == {"late": 3}


def test_a_store_counts_the_blocks_that_were_copied_whole():
    harness = open_harness(slots=64)
    engine = engine_on(harness)
    blocks = engine.chain(range(5))
    granted = engine.prepare(blocks)
    checksums = list(engine.copy(granted, blocks))
    engine.complete(granted, checksums[:3])
    engine.store(blocks[:4])
    assert copied(harness, "gpu_to_cpu") == {"complete": 4, "failed": 2}
    assert by(harness, ADMISSION_BLOCKS, "outcome", tier="cpu") == {"admitted": 6, "present": 3}


def test_a_read_that_ends_late_is_counted_as_late():
    harness = open_harness(SSD, slots=64)
    engine = engine_on(harness)
    blocks = spread(harness, engine, range(2))
    load = engine.load(blocks, within_ns=10_000_000 * MS)
    harness.advance(harness.settings.transfer_deadline_ns + 1000 * MS)
    load.take()
    harness.settle()
    assert copied(harness, "ssd_to_cpu") == {"late": 2}
    assert unloaded(harness) == {"late": 2}


def test_transfers_tell_how_long_they_took_and_how_long_blocks_waited():
    harness = open_harness(SSD, slots=64, workers=2)
    engine = engine_on(harness)
    engine.store(engine.chain(range(2)))
    engine.store(engine.chain(range(10, 13)))  # the only worker for writes is taken
    (first,) = harness.waiting
    harness.advance(20 * MS)
    harness.waiting.remove(first)
    ended = harness.completion(first)
    assert isinstance(ended, ev.WriteDone)
    harness.post(replace(ended, seconds=0.25))
    route = {"route": "cpu_to_ssd"}
    assert count(harness, TRANSFER_SECONDS, "_count", **route) == 1
    assert count(harness, TRANSFER_SECONDS, "_sum", **route) == 0.25
    assert count(harness, TRANSFER_QUEUE_SECONDS, "_count", **route) == 5
    assert count(harness, TRANSFER_QUEUE_SECONDS, "_sum", **route) == pytest.approx(3 * 0.02)


def test_a_tier_counts_what_it_was_offered_and_what_left_it():
    harness = open_harness(SSD, REMOTE)
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    engine.store(blocks)
    harness.settle()
    for tier in ("ssd", "remote"):
        assert by(harness, ADMISSION_BLOCKS, "outcome", tier=tier) == {"admitted": 4}
    hashes = b"".join(block.header.block_hash for block in blocks)
    lost = ev.BlocksLost(SSD, hashes[: 3 * HASH_BYTES], "expired")
    harness.post(lost)
    harness.post(replace(lost, hashes=hashes[3 * HASH_BYTES :], reason="corrupt"))
    assert by(harness, EVICTED_BLOCKS, "reason", tier="ssd") == {"expired": 3, "corrupt": 1}
