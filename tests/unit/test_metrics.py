"""Metrics and the log: closed sets, fixed series, and recording that never raises."""

import io
import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier.observe.log import Log, Repeated, start_log
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import (
    DAEMON_METRICS,
    ENGINE_METRICS,
    LEASES,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    REFUSED_SAMPLES,
    STEP_SECONDS,
    TRANSFER_SECONDS,
)
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
    assert value(metrics, REFUSED_SAMPLES.name) == 5
    assert generate_latest(metrics.registry).count(b"\n") == before


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
            assert len(set(closed)) == len(closed) > 1, f"{metric.name}: {label}"


@pytest.mark.parametrize("table", [DAEMON_METRICS, ENGINE_METRICS])
def test_the_number_of_series_stays_small(table):
    registry = Metrics(table, CollectorRegistry()).registry
    assert generate_latest(registry).count(b"\n") < 1000


def test_every_reason_of_a_miss_has_a_series():
    reasons = dict(MISS_BLOCKS.labels)["reason"]
    assert set(MissReason) <= set(reasons)


@pytest.fixture
def lines():
    """Read what was logged; the root log is put back as it was afterwards."""
    root = logging.getLogger()
    before = list(root.handlers), root.level, logging.getLogger("kvtier").level
    stream = io.StringIO()
    start_log("info", stream)
    yield lambda: stream.getvalue().splitlines()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logging.getLogger("kvtier").setLevel(before[2])


def test_an_event_is_one_line_of_fields(lines):
    log = Log("kvtier.node")
    log.info("store complete", blocks=3, path="/a b", note="two\nlines")
    log.debug("not wanted")
    (line,) = lines()
    assert "level=info log=kvtier.node" in line
    assert line.endswith('event="store complete" blocks=3 path="/a b" note="two\\nlines"')


def test_a_trace_stays_on_its_line(lines):
    try:
        raise KeyError("gone")
    except KeyError:
        Log("kvtier.node").exception("step failed", step=1)
    (line,) = lines()
    assert 'event="step failed" step=1 trace="Traceback' in line
    assert "KeyError" in line


def test_a_repeated_warning_is_written_once_a_period(lines):
    clock = iter((0, 1, 9, 10, 11, 11))
    log = Repeated(Log("kvtier.ssd"), period_ns=10, clock_ns=clock.__next__)
    for _ in range(5):
        log.warning("write failed", tier="ssd")
    log.warning("another thing")
    assert [line.partition("event=")[2] for line in lines()] == [
        '"write failed" tier=ssd',
        '"write failed" tier=ssd left_out=2',
        '"another thing"',
    ]
