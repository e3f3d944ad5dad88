"""Measuring tiers: right numbers, nothing left behind, and never in a request's way."""

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.core.admission import AdmitEverything
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.plan import PlannerSettings, TransferSample
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName
from kvtier.core.slow_tier import SlowTier
from kvtier.daemon.tiers.benchmark import BLOCK_SIZES
from kvtier.daemon.tiers.benchmark_runner import BenchmarkRunner
from kvtier.node.node import Node, NodeSettings
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.runtime.driver import Driver
from kvtier.testing.block import make_block
from kvtier.testing.faulty_tier import Fault, FaultyTier, scripted_faults
from kvtier.testing.throttle_tier import ThrottleTier
from kvtier.testing.tier_contract import fetch, store
from kvtier.tiers.base import Health, HealthState, Tier
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.host import HostArena
from kvtier.tiers.memory import MemoryTier
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.store import SCRATCH_NAME, SsdTier
from kvtier.tiers.wrapper import Operation, TierWrapper

MIB = 1 << 20
SLAB_BYTES = MIB
HOUR_NS = 3600 * 10**9
SSD = TierName.SSD
WEEK_S = 7 * 86_400


class Listener(Planner):
    """A planner that also remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(PlannerSettings())
        self.heard: list[tuple[TierName, bool, TransferSample]] = []

    def note_transfer(
        self, tier: TierName, is_read: bool, sample: TransferSample, now_ns: int
    ) -> None:
        self.heard.append((tier, is_read, sample))
        super().note_transfer(tier, is_read, sample, now_ns)

    def reads(self, block_bytes: int, depth: int = 1) -> list[float]:
        return [
            sample.seconds
            for _, is_read, sample in self.heard
            if is_read and (sample.num_bytes, sample.depth) == (block_bytes, depth)
        ]


@dataclasses.dataclass
class Bench:
    """A driver over one tier, and its runner; ``now_s`` is the time of day."""

    driver: Driver
    planner: Listener
    tier: Tier
    now_s: list[float]

    def runner(self, device: str = "disk") -> BenchmarkRunner:
        return BenchmarkRunner(
            self.driver, self.planner, {SSD: device}, now_s=lambda: self.now_s[0]
        )


@asynccontextmanager
async def bench_over(tier: Tier) -> AsyncIterator[Bench]:
    arena = HostArena(1, SLAB_BYTES)
    slow = SlowTier(SSD, tier.properties.num_workers, HOUR_NS, SLAB_BYTES)
    settings = NodeSettings("boot", 1, SLAB_BYTES, HOUR_NS, (slow,))
    metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
    node = Node(settings, LeafLru(), AdmitEverything(), metrics)
    driver = Driver(node, arena, {SSD: BreakerTier(tier)})
    bench = Bench(driver, Listener(), tier, [1_000_000.0])
    try:
        yield bench
    finally:
        driver.stop()
        arena.close()


def run(tier: Tier, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with bench_over(tier) as bench:
            await scenario(bench)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def ssd_of(document: Mapping[str, Any]) -> dict[str, Any]:
    json.dumps(document)
    told: dict[str, Any] = document["tiers"]["ssd"]
    return told


def test_every_size_is_written_and_read_alone_and_together() -> None:
    tier = MemoryTier(64 * MIB)

    async def scenario(bench: Bench) -> None:
        told = ssd_of(await bench.runner().probe())
        assert told["reason"] == ""
        assert told["measured_s"] == 1_000_000
        rounds = told["rounds"]
        assert {each["block_bytes"] for each in rounds} == set(BLOCK_SIZES)
        assert {(each["is_read"], each["depth"]) for each in rounds} == {
            (False, 1),
            (True, 1),
            (True, 2),
        }
        assert all(each["seconds"] > 0 for each in rounds)
        assert {name for name, _, _ in bench.planner.heard} == {SSD}
        assert len(bench.planner.reads(64 << 10)) == len(bench.planner.reads(64 << 10, 2)) == 2
        assert tier.usage().num_blocks == 0

    run(tier, scenario)


def test_what_is_measured_is_what_the_medium_takes() -> None:
    def seconds_at(bytes_per_s: float, most_s: float) -> float:
        """Return the shortest time: what a busy machine adds is none of the medium's."""
        taken: list[float] = []

        async def scenario(bench: Bench) -> None:
            while min(taken, default=most_s) >= most_s and len(taken) < 40:
                await bench.runner().probe()
                taken.extend(bench.planner.reads(1 << 20))

        run(ThrottleTier(MemoryTier(64 * MIB), bytes_per_s, 0.002), scenario)
        return min(taken)

    slow_s, fast_s = seconds_at(20 * MIB, 0.078), seconds_at(200 * MIB, 0.014)
    print(f"1 MiB at 20 and 200 MiB/s: {slow_s * 1e3:.1f} and {fast_s * 1e3:.1f} ms")
    assert 0.05 <= slow_s < 0.078
    assert 0.005 <= fast_s < 0.014


def test_a_slow_tier_is_measured_as_far_as_it_goes_in_short_time() -> None:
    async def scenario(bench: Bench) -> None:
        began_s = time.monotonic()
        told = ssd_of(await bench.runner().probe())
        assert time.monotonic() - began_s < 20
        assert told["rounds"], "the small sizes"
        assert told["reason"]
        assert bench.tier.usage().num_blocks == 0

    run(ThrottleTier(MemoryTier(64 * MIB), 0.5 * MIB), scenario)


class Weak(TierWrapper):
    """A tier that says how it does, and what it may write."""

    def __init__(self, inner: Tier, health: Health, **detail: int) -> None:
        super().__init__(inner)
        self.told_health, self.detail = health, detail

    def health(self) -> Health:
        return self.told_health

    def usage(self) -> Any:
        return dataclasses.replace(self.inner.usage(), detail=dict(self.detail))


@pytest.mark.parametrize(
    ("health", "detail", "why"),
    [
        (Health(HealthState.DEGRADED, "read-only: full"), {}, "read-only"),
        (Health(HealthState.OUT, "no answer"), {}, "it is out"),
        (Health(), {"write_budget_bytes": MIB}, "write budget"),
    ],
    ids=["read-only", "out", "budget"],
)
def test_nothing_is_written_where_writing_is_not_free(
    health: Health, detail: dict[str, int], why: str
) -> None:
    inner = FaultyTier(MemoryTier(64 * MIB), scripted_faults())

    async def scenario(bench: Bench) -> None:
        told = ssd_of(await bench.runner().probe())
        assert why in told["reason"]
        assert told["rounds"] == []
        assert not any(operation is Operation.WRITE for operation, _ in inner.log)

    run(Weak(inner, health, **detail), scenario)


def test_a_tier_that_fails_half_way_keeps_what_was_measured_and_is_not_taken_out() -> None:
    faults = scripted_faults((Operation.WRITE, Fault.FAIL_AFTER))
    tier = FaultyTier(MemoryTier(64 * MIB), faults)

    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        told = ssd_of(await runner.probe())
        assert "injected" in told["reason"]
        assert told["measured_s"] == 0
        assert bench.driver.tiers[SSD].health().state is HealthState.UP
        assert tier.usage().num_blocks == 0, "though its write went through"
        assert ssd_of(await runner.probe())["reason"] == ""

    run(tier, scenario)


def test_a_full_tier_is_measured_as_far_as_there_is_free_room(tmp_path: Path) -> None:
    """Segments leave 8 MiB free: sizes up to 1 MiB need less than that, and 4 MiB needs more."""
    tier = SsdTier(tmp_path / "ssd", 72 * MIB, 16 * MIB, SsdOptions(num_workers=2))
    blocks = [make_block(number, 4_000_000) for number in range(16)]
    store(tier, *blocks)
    before = tier.usage()

    async def scenario(bench: Bench) -> None:
        told = ssd_of(await bench.runner().probe())
        assert {each["block_bytes"] for each in told["rounds"]} == {64 << 10, 256 << 10, MIB}
        assert "KiB of ssd.capacity free" in told["reason"]

    run(tier, scenario)
    after = tier.usage()
    assert fetch(tier, *blocks) == [None] * 16
    assert (after.num_blocks, after.used_bytes) == (16, before.used_bytes)
    assert after.detail["written_blocks_bytes"] == before.detail["written_blocks_bytes"]
    written = int(after.detail["written_metadata_bytes"])
    assert 3 * MIB > written - int(before.detail["written_metadata_bytes"]) > 2 * MIB
    tier.close()


def test_measuring_respects_the_free_space_floor(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "ssd", 64 * MIB, 16 * MIB, SsdOptions(free_space_floor_bytes=1 << 60))

    async def scenario(bench: Bench) -> None:
        told = ssd_of(await bench.runner().probe())
        assert told["rounds"] == []
        assert "ssd.free_space_floor" in told["reason"]

    run(tier, scenario)
    assert not list((tmp_path / "ssd").glob("**/*.segment"))
    tier.close()


def test_earlier_figures_are_kept_until_there_is_room_again() -> None:
    tier = MemoryTier(64 * MIB)
    block = make_block(1, 64 * MIB - 1000)

    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        first = ssd_of(await runner.probe())
        store(tier, block)
        bench.now_s[0] += WEEK_S
        again = ssd_of(await runner.probe())
        assert (again["is_kept"], again["measured_s"]) == (True, first["measured_s"])
        assert again["rounds"] == first["rounds"]
        assert list(runner.unmeasured()) == ["ssd"]
        assert "are free" in again["reason"]
        restarted = bench.runner()
        restarted.recall(runner.document())
        assert ssd_of(restarted.document())["rounds"] == first["rounds"]

    run(tier, scenario)
    assert fetch(tier, block) == [None]


def test_a_tier_that_was_never_measured_says_why() -> None:
    tier = MemoryTier(MIB)
    store(tier, make_block(1, MIB - 1000))

    async def scenario(bench: Bench) -> None:
        told = ssd_of(await bench.runner().probe())
        assert (told["rounds"], told["measured_s"], told["is_kept"]) == ([], 0, False)
        assert "are free" in told["reason"]

    run(tier, scenario)


def test_damaged_blocks_fail_the_measurement() -> None:
    tier = FaultyTier(MemoryTier(64 * MIB), scripted_faults((Operation.READ, Fault.FLIP_BIT)))

    async def scenario(bench: Bench) -> None:
        assert "checksum" in ssd_of(await bench.runner().probe())["reason"]

    run(tier, scenario)


def test_a_block_that_does_not_fit_ends_it(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "ssd", 16 * MIB, 2 * MIB)

    async def scenario(bench: Bench) -> None:
        told = ssd_of(await bench.runner().probe())
        assert "not accept blocks of 4194304 bytes" in told["reason"]
        assert {each["block_bytes"] for each in told["rounds"]} == {64 << 10, 256 << 10, MIB}
        assert tier.usage().num_blocks == 0

    run(tier, scenario)
    tier.close()


KILLED = """
import os, signal, sys, time
from pathlib import Path
from kvtier.daemon.tiers.benchmark import run_benchmark
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.store import SsdTier

def hook(step):
    if step == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

tier = SsdTier(Path(sys.argv[1]), 64 << 20, 16 << 20, SsdOptions(hook=hook))
run_benchmark(1 << 20, tier, time.monotonic_ns() + 30_000_000_000)
"""


@pytest.mark.parametrize("step", ["segment.header", "record.write", "record.read"])
def test_a_crash_in_the_middle_leaves_nothing_that_the_next_start_counts(
    tmp_path: Path, step: str
) -> None:
    directory = tmp_path / "ssd"
    tier = SsdTier(directory, 64 * MIB, 16 * MIB)
    mine = make_block(1, 100_000)
    store(tier, mine)
    tier.close()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(directory), step], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (directory / SCRATCH_NAME).is_dir(), "the process died during the measurement"
    tier = SsdTier(directory, 64 * MIB, 16 * MIB)
    assert not (directory / SCRATCH_NAME).exists()
    assert (tier.usage().num_blocks, len(list(directory.glob("*.segment")))) == (1, 1)
    assert fetch(tier, mine) == [None]
    tier.close()


def test_it_is_done_once_a_week_for_the_medium_it_was_done_on() -> None:
    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        await runner.step()
        num_heard = len(bench.planner.heard)
        assert num_heard
        await runner.step()
        assert len(bench.planner.heard) == num_heard
        kept = json.loads(json.dumps(runner.document()))
        for device, passed_s, is_redone in (
            ("disk", 0, False),
            ("disk", WEEK_S - 1, False),
            ("disk", WEEK_S, True),
            ("disk", -10, True),
            ("another disk", 0, True),
        ):
            bench.planner.heard.clear()
            bench.now_s[0] = 1_000_000.0 + passed_s
            again = bench.runner(device)
            again.recall(kept)
            await again.step()
            assert bool(bench.planner.heard) == is_redone, (device, passed_s)

    run(MemoryTier(64 * MIB), scenario)


def test_what_failed_is_not_tried_again_at_once() -> None:
    tier = FaultyTier(MemoryTier(64 * MIB), scripted_faults((Operation.WRITE, Fault.FAIL_BEFORE)))

    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        await runner.step()
        num_calls = len(tier.log)
        await runner.step()
        assert len(tier.log) == num_calls
        assert bench.planner.heard == []

    run(tier, scenario)


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"tiers": None},
        {"tiers": []},
        {"tiers": {"ssd": 7}},
        {"tiers": {"ssd": {"device": "disk", "measured_s": 1_000_000, "rounds": []}}},
        {"tiers": {"ssd": {"device": "disk", "measured_s": 1_000_000, "rounds": "abc"}}},
        {"tiers": {"ssd": {"device": "disk", "measured_s": "x", "rounds": [{}]}}},
        {"tiers": {"nowhere": {}}},
        {
            "tiers": {
                "ssd": {
                    "device": "disk",
                    "measured_s": 1_000_000,
                    "rounds": [
                        {
                            "is_read": True,
                            "block_bytes": MIB,
                            "num_blocks": 1,
                            "depth": 1,
                            "seconds": float("nan"),
                        }
                    ],
                }
            }
        },
    ],
)
def test_what_was_kept_and_is_no_probe_is_done_anew(kept: dict[str, Any]) -> None:
    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        runner.recall(kept)
        await runner.step()
        assert bench.planner.heard

    run(MemoryTier(64 * MIB), scenario)


def test_reads_that_requests_wait_for_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.daemon.tiers.benchmark_runner._BUSY_LIMIT_S", 0.05)
    tier = FaultyTier(MemoryTier(64 * MIB), scripted_faults())

    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(bench.driver, "is_reading", lambda _name: True)
        told = ssd_of(await bench.runner().probe())
        assert told["reason"] == "it was busy with requests"
        assert not any(operation is Operation.WRITE for operation, _ in tier.log)

    run(tier, scenario)


def test_a_tier_is_not_measured_while_it_is_emptied() -> None:
    tier = FaultyTier(MemoryTier(64 * MIB), scripted_faults())

    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        measuring = asyncio.create_task(runner.step())
        while not any(operation is Operation.WRITE for operation, _ in tier.log):
            await asyncio.sleep(0)
        async with runner.hold():
            assert tier.usage().num_blocks == 0, "its own blocks would be counted"
            await measuring
            assert ssd_of(runner.document())["reason"] == "it was being dropped"
            num_calls = len(tier.log)
            await runner.step()
            assert "dropped" in ssd_of(await runner.probe())["reason"]
            assert len(tier.log) == num_calls, "nor does another one begin"
        await runner.step()
        told = ssd_of(runner.document())
        assert (told["reason"], told["measured_s"]) == ("", 1_000_000), "then it is done at once"

    run(tier, scenario)


def test_a_drop_waits_for_no_measurement_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.daemon.tiers.benchmark_runner._HOLD_S", 0.05)
    tier = FaultyTier(MemoryTier(64 * MIB), scripted_faults((Operation.READ, Fault.WAIT)))

    async def scenario(bench: Bench) -> None:
        runner = bench.runner()
        measuring = asyncio.create_task(runner.step())
        while not any(operation is Operation.READ for operation, _ in tier.log):
            await asyncio.sleep(0)
        async with runner.hold():
            assert not measuring.done()
        await measuring

    run(tier, scenario)


def test_a_tier_that_hangs_costs_its_threads_and_no_more() -> None:
    tier = FaultyTier(MemoryTier(64 * MIB), scripted_faults((Operation.READ, Fault.WAIT)))

    async def scenario(bench: Bench) -> None:
        began_s = time.monotonic()
        told = ssd_of(await bench.runner().probe())
        assert "failed" in told["reason"]
        assert time.monotonic() - began_s < 30

    run(tier, scenario)


def test_tiers_that_are_not_below_the_cpu_are_said_to_be() -> None:
    async def scenario(bench: Bench) -> None:
        told = (await bench.runner().probe([TierName.CPU, TierName.REMOTE]))["tiers"]
        assert "measured by the engines' own loads" in told["cpu"]["reason"]
        assert told["remote"]["reason"] == "it is not configured"

    run(MemoryTier(64 * MIB), scenario)
