"""Metrics: closed sets, fixed series, and recording that never raises."""

import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier.observe.daemon_metrics import (
    DAEMON_METRICS,
    LEASES,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    TIER_STATE,
    TRANSFER_SECONDS,
)
from kvtier.observe.engine_metrics import (
    ENGINE_METRICS,
    STEP_SECONDS,
)
from kvtier.observe.metrics import REFUSED_SAMPLES, Metrics
from kvtier.tiers.base import MissReason


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(DAEMON_METRICS, CollectorRegistry())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_counts_go_to_their_series(metrics):
    metrics.add(LOOKUP_BLOCKS, 3, outcome="hit", tier="cpu")
    metrics.add(LOOKUP_BLOCKS, tier="none", outcome="miss")
    metrics.set(LEASES, 2)
    metrics.observe(TRANSFER_SECONDS, 0.2, route="ssd_to_cpu")
    assert value(metrics, LOOKUP_BLOCKS.name, outcome="hit", tier="cpu") == 3
    assert value(metrics, LOOKUP_BLOCKS.name, outcome="miss", tier="none") == 1
    assert value(metrics, LEASES.name) == 2
    assert value(metrics, f"{TRANSFER_SECONDS.name}_count", route="ssd_to_cpu") == 1
    assert value(metrics, REFUSED_SAMPLES.name) == 0


def test_every_series_is_there_from_the_start(metrics):
    for _, outcomes in LOOKUP_BLOCKS.labels[:1]:
        for outcome in outcomes:
            assert value(metrics, LOOKUP_BLOCKS.name, outcome=outcome, tier="ssd") == 0


def test_a_sample_outside_the_sets_is_left_out_and_counted(metrics):
    before = generate_latest(metrics.registry).count(b"\n")
    metrics.add(LOOKUP_BLOCKS, 1, outcome="hit", tier="/etc/passwd")
    metrics.add(LOOKUP_BLOCKS, 1, outcome="hit")
    metrics.add(LOOKUP_BLOCKS, 1, outcome="hit", tier="cpu", request="r1")
    metrics.add(LOOKUP_BLOCKS, -1, outcome="hit", tier="cpu")
    metrics.observe(STEP_SECONDS, 1)  # an engine's metric, not in this table
    metrics.set_one(TIER_STATE, "state", "asleep", tier="ssd")
    for amount in (math.nan, math.inf):
        metrics.add(LOOKUP_BLOCKS, amount, outcome="hit", tier="cpu")
        metrics.set(LEASES, amount)
        metrics.observe(TRANSFER_SECONDS, amount, route="ssd_to_cpu")
    assert value(metrics, REFUSED_SAMPLES.name) == 6 + 6
    assert value(metrics, LOOKUP_BLOCKS.name, outcome="hit", tier="cpu") == 0
    assert generate_latest(metrics.registry).count(b"\n") == before


def test_one_of_several_states_is_set(metrics):
    def state_of(tier: str) -> list[str]:
        states = dict(TIER_STATE.labels)["state"]
        return [s for s in states if value(metrics, TIER_STATE.name, tier=tier, state=s)]

    for state in ("up", "out", "degraded"):
        metrics.set_one(TIER_STATE, "state", state, tier="ssd")
        assert state_of("ssd") == [state]
    metrics.set_one(TIER_STATE, "state", None, tier="ssd")
    assert state_of("ssd") == state_of("cpu") == []


def test_two_processes_of_one_test_do_not_share_series(metrics):
    other = Metrics(DAEMON_METRICS, CollectorRegistry())
    metrics.set(LEASES, 7)
    assert value(other, LEASES.name) == 0


@pytest.mark.parametrize("table", [DAEMON_METRICS, ENGINE_METRICS])
def test_names_follow_the_rules(table):
    names = [metric.name for metric in table]
    assert len(set(names)) == len(names)
    for metric in table:
        assert metric.name.startswith("kvtier_")
        assert metric.help.endswith("."), f"{metric.name}: help is a sentence"
        assert (type(metric).__name__ == "Counter") == metric.name.endswith("_total")
        assert (type(metric).__name__ == "Histogram") <= metric.name.endswith("_seconds")
        for label, closed in metric.labels:
            # A process has one version and one way for bytes; all others tell things apart.
            least = 1 if label in {"version", "transport"} else 2
            assert len(set(closed)) == len(closed) >= least, f"{metric.name}: {label}"


@pytest.mark.parametrize("table", [DAEMON_METRICS, ENGINE_METRICS])
def test_the_number_of_series_stays_small(table):
    registry = Metrics(table, CollectorRegistry()).registry
    assert generate_latest(registry).count(b"\n") < 1000


def test_every_reason_of_a_miss_has_a_series():
    reasons = dict(MISS_BLOCKS.labels)["reason"]
    assert set(MissReason) <= set(reasons)
