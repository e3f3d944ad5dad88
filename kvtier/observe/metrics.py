"""Defines metrics, and records samples in their series.

Theory
------
All series of a table are created at the start, for every combination of the labels' closed sets. So
rates are right from the first event on, and recording is one lookup in a dict that never grows.

Recording never raises, because a wrong sample must not fail a request. A sample that fits no series
is dropped and counted in ``kvtier_refused_samples_total``, which tests keep at 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite

import prometheus_client
from prometheus_client import CollectorRegistry

from kvtier import __version__

__all__ = [
    "BUILD",
    "REFUSED_SAMPLES",
    "TRANSFER_BUCKETS",
    "Counter",
    "Gauge",
    "Histogram",
    "Metric",
    "Metrics",
    "table_of",
]

# One step of about 2.5 each: a quantile read from a bucket is then within a factor of 1.6. The
# range is that of one block from memory (50 us) to the longest deadline (5 s).
_MILLISECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
TRANSFER_BUCKETS = tuple(milliseconds / 1000 for milliseconds in _MILLISECONDS)
"""Buckets of transfers and decisions, in seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, help text, and the closed set of values of each label."""

    name: str
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def unit(self) -> str:
        """Return the base unit, from the last word of the name except ``total``."""
        name = self.name.removesuffix("_total")
        word = name.removesuffix("_per_second").rpartition("_")[2]
        if word not in {"seconds", "bytes", "blocks", "tokens"}:
            return "count"
        return f"{word}/s" if name.endswith("_per_second") else word


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only grows, from 0 at the start of the process."""


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """Counts of values by bucket."""

    buckets: tuple[float, ...]


BUILD = Gauge(
    "kvtier_build_info", "Always 1; the label is the version.", (("version", (__version__,)),)
)
REFUSED_SAMPLES = Counter(
    "kvtier_refused_samples_total",
    "Samples that match no series and were dropped; any value but 0 is a bug.",
)

_Record = Callable[[float], None]


def table_of(names: Mapping[str, object], *shared: Metric) -> tuple[Metric, ...]:
    """Return the metrics among a module's ``names``, with the ``shared`` ones at the end."""
    own = (row for row in names.values() if isinstance(row, Metric) and row not in shared)
    return (*own, *shared)


class Metrics:
    """Records into the series of one process. Thread-safe."""

    def __init__(self, table: Sequence[Metric], registry: CollectorRegistry) -> None:
        # The ``_created`` metrics would add an unused series for each counter.
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
        """Add ``amount`` to a counter."""
        if amount < 0:
            self._refuse(1)
            return
        self._record(metric, amount, labels)

    def set(self, metric: Gauge, amount: float, **labels: str) -> None:
        """Set a gauge."""
        self._record(metric, amount, labels)

    def set_one(self, metric: Gauge, label: str, value: str | None, **labels: str) -> None:
        """Set the series whose ``label`` has this value to 1, and all others to 0."""
        values = dict(metric.labels)[label]
        for each in values:
            self.set(metric, each == value, **labels, **{label: each})
        if value is not None and value not in values:
            self._refuse(1)

    def follow(self, metric: Gauge, now: Callable[[], float]) -> None:
        """Get a gauge's value from ``now`` at each scrape, on the thread that answers it."""
        family = self._families[metric.name]
        assert isinstance(family, prometheus_client.Gauge), f"{metric.name} is not a gauge"
        family.set_function(now)

    def observe(self, metric: Histogram, amount: float, **labels: str) -> None:
        """Record a value."""
        self._record(metric, amount, labels)

    def _record(self, metric: Metric, amount: float, labels: dict[str, str]) -> None:
        values = [labels.get(name, "") for name, _ in metric.labels]
        record = self._series.get((metric.name, *values))
        # NaN or infinity would spoil a sum until the process ends.
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
    raise AssertionError(f"{metric.name} has an unknown type")


def _recorder(child: _Family) -> _Record:
    match child:
        case prometheus_client.Counter():
            return child.inc
        case prometheus_client.Gauge():
            return child.set
        case prometheus_client.Histogram():
            return child.observe
    raise AssertionError(f"{child} has an unknown type")


def _leave_out(amount: float) -> None:
    """Drop a sample; this table has no metric for refused samples."""
