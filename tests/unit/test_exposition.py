"""What is scraped: word for word what prometheus_client would write."""

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvtier.observe.exposition import Exposition
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import DAEMON_METRICS, LOOKUP_BLOCKS, TRANSFER_SECONDS


def test_it_is_what_the_library_writes_the_first_time_and_later() -> None:
    metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
    exposition = Exposition(metrics.registry)
    for _ in range(3):
        assert exposition.text() == generate_latest(metrics.registry)
        metrics.add(LOOKUP_BLOCKS, 12_345_678, outcome="hit", tier="cpu")
        metrics.observe(TRANSFER_SECONDS, 0.2, route="ssd_to_cpu")


def test_any_text_and_any_number_is_written_as_the_library_does() -> None:
    registry = CollectorRegistry()
    odd = 'a "quoted" \\ line\nand \u2028 another, {le="1"} 7'
    gauge = Gauge("odd", f"Help: {odd}", ["a", "b"], registry=registry)
    Counter("plain_total", "Plain.", registry=registry).inc(3)
    Histogram("seconds", "Times.", ["route"], registry=registry).labels(odd).observe(0.1)
    exposition = Exposition(registry)
    for value in (0.0, -1.5, 1e300, 1234567.0, math.inf, -math.inf, math.nan):
        gauge.labels(odd, "").set(value)
        gauge.labels("", odd).set(-value)
        assert exposition.text() == generate_latest(registry)


class Changing(Collector):
    """A collector whose series come and go."""

    names: tuple[str, ...] = ()

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("tape", "Tapes.", labels=["name"])
        for name in self.names:
            family.add_metric([name], 1.0)
        yield family


def test_series_may_come_and_go() -> None:
    registry, changing = CollectorRegistry(), Changing()
    registry.register(changing)
    exposition = Exposition(registry)
    for names in ((), ("a",), ("b", "a"), ("b",), (), ("c",)):
        changing.names = names
        assert exposition.text() == generate_latest(registry)
