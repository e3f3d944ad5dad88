"""The daemon's numbers as Prometheus gets them: equal to what is there, and there at any time."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.client import Client, OwnTier
from kvtier.config import load_config
from kvtier.core.plan import EngineLoad, StepSample
from kvtier.observe.daemon_metrics import (
    BREAKER_STATE,
    DAEMON_METRICS,
    GATE_SHARE,
    LEASES,
    LOOKUP_SECONDS,
    PINS,
    POLICY_SECONDS,
    PREFILL_TOKENS_PER_SECOND,
    READY,
    REMEMBERED_BLOCKS,
    RESTORE_BYTES_PER_SECOND,
    SESSIONS,
    SSD_DIRECT_IO,
    SSD_READ_ONLY,
    SSD_WRITE_BUDGET_BYTES,
    SSD_WRITE_BUDGET_LEFT_BYTES,
    SSD_WRITE_BUDGET_STATE,
    SSD_WRITTEN_BYTES,
    TIER_BLOCKS,
    TIER_CAPACITY_BYTES,
    TIER_STATE,
    TIER_UP,
    TIER_USED_BYTES,
)
from kvtier.observe.metrics import BUILD, REFUSED_SAMPLES, Counter, Metric
from kvtier.testing.child import await_true, free_port, work_directory
from kvtier.testing.running_node import RunningNode, fetch
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.memory import MemoryTier
from tests.integration.in_process import running
from tests.integration.pattern import BLOCK_BYTES, PatternEngine, key_space

pytestmark = pytest.mark.slow

BLOCKS = 12


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def value(node: RunningNode, metric: Metric, suffix: str = "", **labels: str) -> float:
    return node.metric(metric.name + suffix, **labels)


@contextmanager
def attached_client(node: RunningNode, own: OwnTier) -> Iterator[Client]:
    """Attach an engine that tells so of its own tier."""
    client = Client(node.socket, key_space("other"), "other", own_tier=lambda: own)
    client.start()
    try:
        assert client.wait_attached(30)
        yield client
    finally:
        client.close()


def one_of(node: RunningNode, metric: Metric, **labels: str) -> str:
    """Return the state whose series is 1, where no other one is."""
    states = [s for s in dict(metric.labels)["state"] if value(node, metric, state=s, **labels)]
    assert len(states) <= 1, states
    return states[0] if states else ""


def test_gauges_are_what_the_status_says(directory: Path) -> None:
    node = RunningNode(directory, {"ssd.write_budget": "1GiB"})
    own = OwnTier(capacity_bytes=1 << 20, used_bytes=1 << 19, used_tokens=40, hit_tokens=0)
    with (
        node.daemon() as daemon,
        PatternEngine(node.socket) as engine,
        attached_client(node, own) as other,
    ):
        for prompt in range(3):
            assert engine.store(prompt, 4) == 4
        node.await_blocks("ssd", BLOCKS)
        node.drop("cpu")
        assert engine.lookup(1, 4) == (["ssd"] * 4, "complete")
        assert engine.load(1, 4) == (["ssd"] * 4, "complete")
        engine.client.note_steps([StepSample(512, 0, 131_072.0, 0, 0.5)] * 8, EngineLoad())
        node.await_idle()
        await_true(lambda: value(node, TIER_USED_BYTES, tier="gpu") > 0, "engines have reported")
        await_true(lambda: value(node, PREFILL_TOKENS_PER_SECOND) > 0, "steps were reported")
        told = node.stat()
        tiers = told["tiers"]
        for metric, key in (
            (TIER_BLOCKS, "blocks"),
            (TIER_USED_BYTES, "used_bytes"),
            (TIER_CAPACITY_BYTES, "capacity_bytes"),
        ):
            gauges = {tier: value(node, metric, tier=tier) for tier in tiers}
            assert gauges == {tier: tiers[tier][key] for tier in tiers}, key
        assert value(node, SESSIONS, transport="shm") == value(node, SESSIONS) == 2
        assert tiers["gpu"]["used_bytes"] == own.used_bytes
        assert tiers["ssd"]["blocks"] == BLOCKS
        assert tiers["cpu"]["used_bytes"] == 4 * BLOCK_BYTES
        assert {tier: one_of(node, TIER_STATE, tier=tier) for tier in ("cpu", "ssd", "remote")} == {
            "cpu": "up",
            "ssd": "up",
            "remote": "off",
        }
        assert [value(node, TIER_UP, tier=tier) for tier in ("cpu", "ssd", "remote")] == [1, 1, 0]
        assert one_of(node, BREAKER_STATE, tier="ssd") == "closed"
        assert one_of(node, BREAKER_STATE, tier="remote") == ""
        detail = tiers["ssd"]["detail"]
        assert value(node, SSD_DIRECT_IO) == detail["direct_io"]
        assert value(node, SSD_READ_ONLY) == 0
        assert value(node, SSD_WRITTEN_BYTES, kind="blocks") == detail["written_blocks_bytes"] > 0
        assert value(node, SSD_WRITTEN_BYTES, kind="moved") == 0
        assert value(node, SSD_WRITTEN_BYTES, kind="metadata") > 0
        assert value(node, SSD_WRITE_BUDGET_BYTES) == 1 << 30
        left_bytes = value(node, SSD_WRITE_BUDGET_LEFT_BYTES)
        assert 0 <= (1 << 30) - left_bytes <= 4 * value(node, SSD_WRITTEN_BYTES)
        assert one_of(node, SSD_WRITE_BUDGET_STATE) == "left"
        assert value(node, GATE_SHARE) == 1, "all is written at once here"
        assert value(node, RESTORE_BYTES_PER_SECOND, route="ssd_to_cpu") > 0
        assert value(node, REMEMBERED_BLOCKS) == told["policy"]["remembered_blocks"] >= BLOCKS
        assert value(node, LEASES) == value(node, PINS) == 0
        assert value(node, READY) == value(node, BUILD) == 1
        assert value(node, LOOKUP_SECONDS, "_count") == 1
        assert value(node, POLICY_SECONDS, "_count") >= 4, "three stores and a lookup"
        assert value(node, REFUSED_SAMPLES) == 0
        other.close()
        await_true(lambda: value(node, SESSIONS) == 1, "it is gone")
        assert daemon.stop() == 0


def test_every_series_is_there_before_the_first_request_and_no_other(directory: Path) -> None:
    node = RunningNode(directory)
    with node.daemon():
        text = fetch(f"http://127.0.0.1:{node.http_port}/metrics").decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    own = {name for name in found if not name.startswith("process_")}
    assert own == {metric.name.removesuffix("_total") for metric in DAEMON_METRICS}
    for metric in DAEMON_METRICS:
        family = found[metric.name.removesuffix("_total")]
        assert family.type == type(metric).__name__.lower()
        assert family.documentation == metric.help
        series = {
            tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            for sample in family.samples
        }
        num_series = 1
        for _, closed in metric.labels:
            num_series *= len(closed)
        assert len(series) == num_series, metric.name
        if isinstance(metric, Counter) and metric != SSD_WRITTEN_BYTES:
            assert not any(sample.value for sample in family.samples), "the first event is a growth"
    assert {"process_resident_memory_bytes", "process_start_time_seconds"} <= found.keys()


def test_a_scrape_is_answered_while_the_loop_is_held_up(directory: Path) -> None:
    port, held, over = free_port(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert over.wait(60)

    settings = {
        "daemon.socket": str(directory / "k.sock"),
        "http.listen": f"127.0.0.1:{port}",
        "cpu.capacity": "16MiB",
        "cpu.slab": "1MiB",
        "ssd.directory": str(directory / "ssd"),
    }
    config = load_config(None, settings, {})
    with running(config, lambda: BreakerTier(MemoryTier(1 << 20))) as loop:
        loop.call_soon_threadsafe(hold)
        assert held.wait(30)
        try:
            for path in ("/metrics", "/healthz", "/readyz"):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request("GET", path)
                reply = connection.getresponse()
                assert reply.status == http.HTTPStatus.OK, path
                assert reply.read()
                connection.close()
        finally:
            over.set()
