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
from math import isfinite

import prometheus_client
from prometheus_client import CollectorRegistry

from kvtier import __version__
from kvtier.observe.metric import Counter, Gauge, Histogram, Metric
from kvtier.observe.table import BUILD, REFUSED_SAMPLES

__all__ = ["Metrics"]

_Record = Callable[[float], None]


class Metrics:
    """The series of one process, in a registry of its own. Safe to call from any thread."""

    def __init__(self, table: Sequence[Metric], registry: CollectorRegistry) -> None:
        # A second series for each counter, which nobody reads.
        without_created: Callable[[], None] = prometheus_client.disable_created_metrics
        without_created()
        self.registry = registry
        self._series: dict[tuple[str, ...], _Record] = {}
        self._families: dict[str, _Family] = {}
        for metric in table:
            self._open(metric)
        self._refuse = self._series.get((REFUSED_SAMPLES.name,), _leave_out)
        if BUILD in table:
            self.set(BUILD, 1, version=__version__)

    def add(self, metric: Counter, amount: float = 1, **labels: str) -> None:
        """Count ``amount`` more."""
        if amount < 0:
            self._refuse(1)
            return
        self._record(metric, amount, labels)

    def set(self, metric: Gauge, amount: float, **labels: str) -> None:
        """Say how it is now."""
        self._record(metric, amount, labels)

    def set_one(self, metric: Gauge, label: str, value: str | None, **labels: str) -> None:
        """Set the series whose ``label`` has this value to 1 and the others to 0; None: all."""
        values = dict(metric.labels)[label]
        for each in values:
            self.set(metric, each == value, **labels, **{label: each})
        if value is not None and value not in values:
            self._refuse(1)

    def follow(self, metric: Gauge, now: Callable[[], float]) -> None:
        """Have ``now`` say how it is, at each scrape and on whichever thread answers it."""
        family = self._families[metric.name]
        assert isinstance(family, prometheus_client.Gauge), f"{metric.name} is no gauge"
        family.set_function(now)

    def observe(self, metric: Histogram, amount: float, **labels: str) -> None:
        """Note one value."""
        self._record(metric, amount, labels)

    def _record(self, metric: Metric, amount: float, labels: dict[str, str]) -> None:
        values = [labels.get(name, "") for name, _ in metric.labels]
        record = self._series.get((metric.name, *values))
        # One that is no number would spoil a sum for as long as the process lives.
        if record is None or len(labels) != len(values) or not isfinite(amount):
            self._refuse(1)
            return
        record(amount)

    def _open(self, metric: Metric) -> None:
        names = [name for name, _ in metric.labels]
        family = self._families[metric.name] = _family(metric, names, self.registry)
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
