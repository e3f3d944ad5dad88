"""Recording into the metrics of ``table``.

Theory
------
Every series of a table is made at once, for every combination of its labels' closed sets. So a
rate is right from the first event on, a sample outside the sets has no series to go to, and
recording is one look-up in a dict that never grows.

Recording never raises: a mistake in an account must not cost a request. A sample that fits no
series is left out and counted in ``kvtier_refused_samples_total``, which tests keep at 0.
"""

from collections.abc import Callable, Sequence
from itertools import product

import prometheus_client
from prometheus_client import CollectorRegistry

from kvtier.observe.table import (
    DAEMON_METRICS,
    ENGINE_METRICS,
    REFUSED_SAMPLES,
    Counter,
    Gauge,
    Histogram,
    Metric,
)

__all__ = ["Metrics", "render_reference"]

_Record = Callable[[float], None]


class Metrics:
    """The series of one process, in a registry of its own. Safe to call from any thread."""

    def __init__(self, table: Sequence[Metric], registry: CollectorRegistry) -> None:
        # A second series for each counter, which nobody reads.
        without_created: Callable[[], None] = prometheus_client.disable_created_metrics
        without_created()
        self.registry = registry
        self._series: dict[tuple[str, ...], _Record] = {}
        for metric in table:
            self._open(metric)
        self._refuse = self._series.get((REFUSED_SAMPLES.name,), _leave_out)

    def add(self, metric: Counter, amount: float = 1, **labels: str) -> None:
        """Count ``amount`` more."""
        if amount < 0:
            self._refuse(1)
            return
        self._record(metric, amount, labels)

    def set(self, metric: Gauge, amount: float, **labels: str) -> None:
        """Say how it is now."""
        self._record(metric, amount, labels)

    def observe(self, metric: Histogram, amount: float, **labels: str) -> None:
        """Note one value."""
        self._record(metric, amount, labels)

    def _record(self, metric: Metric, amount: float, labels: dict[str, str]) -> None:
        values = [labels.get(name, "") for name, _ in metric.labels]
        record = self._series.get((metric.name, *values))
        if record is None or len(labels) != len(values):
            self._refuse(1)
            return
        record(amount)

    def _open(self, metric: Metric) -> None:
        names = [name for name, _ in metric.labels]
        family = _family(metric, names, self.registry)
        for values in product(*(closed for _, closed in metric.labels)):
            child = family.labels(*values) if values else family
            self._series[(metric.name, *values)] = _recorder(child)


_Family = prometheus_client.Counter | prometheus_client.Gauge | prometheus_client.Histogram


def _family(metric: Metric, names: list[str], registry: CollectorRegistry) -> _Family:
    match metric:
        case Counter():
            return prometheus_client.Counter(metric.name, metric.help, names, registry=registry)
        case Gauge():
            return prometheus_client.Gauge(metric.name, metric.help, names, registry=registry)
        case Histogram(buckets=buckets):
            return prometheus_client.Histogram(
                metric.name, metric.help, names, registry=registry, buckets=buckets
            )
    raise AssertionError(f"{metric.name} is of no kind")


def _recorder(child: _Family) -> _Record:
    match child:
        case prometheus_client.Counter():
            return child.inc
        case prometheus_client.Gauge():
            return child.set
        case prometheus_client.Histogram():
            return child.observe
    raise AssertionError(f"{child} is of no kind")


def _leave_out(amount: float) -> None:
    """Count nothing: this table has no row for refused samples."""


_REFERENCE_HEAD = """\
# Metrics

<!-- Written by `make docs` from kvtier/observe/table.py; change it there. -->

The daemon serves its metrics at `http.listen`, an engine at `engine.listen`, both under `/metrics`
in the Prometheus text format. Units are base units. Each label has a closed set of values, all of
which exist from the start, so the number of series is fixed.
"""


def render_reference() -> str:
    """Return docs/operations/metrics.md."""
    parts = [_REFERENCE_HEAD]
    for title, table in (("The daemon", DAEMON_METRICS), ("An engine", ENGINE_METRICS)):
        parts.append(f"\n## {title}\n\n| metric | kind | unit | labels | meaning |\n")
        parts.append("|---|---|---|---|---|\n")
        parts.extend(_row(metric) for metric in table)
    return "".join(parts)


def _row(metric: Metric) -> str:
    kind = type(metric).__name__.lower()
    labels = "; ".join(f"`{name}`: {', '.join(closed)}" for name, closed in metric.labels)
    return f"| `{metric.name}` | {kind} | {metric.unit} | {labels} | {metric.help} |\n"
