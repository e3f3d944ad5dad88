"""PromQL built from the metrics table, so that no query can name a metric that does not exist.

Each selector checks type, labels and label values of its metric when this package is imported: a
renamed metric or a removed value fails the build instead of a dashboard.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

from kvtier.connectors.vllm import stats
from kvtier.observe.metrics import Counter, Histogram, Metric

__all__ = ["BOARD", "RULE", "WITH_KVTIER", "Scope", "labelled", "ratio"]

WITH_KVTIER = f"and on (job, instance) {stats.ATTACHED.name}"
"""Excludes vLLM instances without kvtier."""

_HOUR_S = 3600

_HISTOGRAM_PARTS = frozenset({"bucket", "sum", "count"})


@dataclass(frozen=True, slots=True)
class Scope:
    """Common label matchers and the time window of a query."""

    window: str
    matchers: tuple[str, ...] = ()

    def over(self, window: str) -> Self:
        """Return the same scope with another time window."""
        return replace(self, window=window)

    def series(self, metric: Metric, part: str = "", **labels: str | tuple[str, ...]) -> str:
        """Select a metric's series: a ``part`` of a histogram, and values of each label."""
        is_histogram = isinstance(metric, Histogram)
        assert (part in _HISTOGRAM_PARTS) == is_histogram, f"{metric.name} has no {part!r}"
        closed_sets = dict(metric.labels)
        matchers = list(self.matchers)
        for label, wanted in labels.items():
            values = (wanted,) if isinstance(wanted, str) else wanted
            unknown = set(values) - set(closed_sets.get(label, ()))
            assert not unknown, f"{metric.name} has no {label} {unknown}"
            matchers.append(f'{label}{"=" if len(values) == 1 else "=~"}"{"|".join(values)}"')
        name = f"{metric.name}_{part}" if part else metric.name
        return f"{name}{{{', '.join(matchers)}}}" if matchers else name

    def rate(
        self, metric: Counter | Histogram, part: str = "", **labels: str | tuple[str, ...]
    ) -> str:
        """Return the growth of a counter per second; to be put into parentheses."""
        rate = f"rate({self.series(metric, part, **labels)}[{self.window}])"
        is_vllms_own = re.match(r"vllm:(?!kvtier_)", metric.name)
        return f"{rate} {WITH_KVTIER}" if is_vllms_own else rate

    def increase(
        self, metric: Counter | Histogram, part: str = "", **labels: str | tuple[str, ...]
    ) -> str:
        """Return how much a counter has grown."""
        return f"increase({self.series(metric, part, **labels)}[{self.window}])"

    def in_an_hour(self, metric: Counter, **labels: str | tuple[str, ...]) -> str:
        """Return how much a counter of rare events has grown within an hour.

        To Prometheus a count that was there at a process's first scrape is no increase.
        """
        counted = self.series(metric, "", **labels)
        started = f"process_start_time_seconds > time() - {_HOUR_S}"
        grown = self.over("1h").increase(metric, "", **labels)
        return f"({counted} and on (job, instance) {started}) > {grown} or {grown}"

    def known(self, metric: Counter, label: str) -> str:
        """Return a counter's rates by a label, without values that never occurred.

        For labels with many values, in panels where some value always occurs.
        """
        return (
            f"sum by ({label}) ({self.rate(metric)})"
            f" and sum by ({label}) ({self.series(metric)}) > 0"
        )

    def quantile(
        self, share: float, metric: Histogram, keep: str, **labels: str | tuple[str, ...]
    ) -> str:
        """Return a quantile; ``keep`` is a grouping that includes ``le``, such as ``by (le)``."""
        buckets = self.rate(metric, "bucket", **labels)
        return f"histogram_quantile({share}, sum {keep} ({buckets}))"

    def mean(self, metric: Histogram, keep: str, **labels: str | tuple[str, ...]) -> str:
        """Return the mean; ``keep`` is a grouping such as ``by (route)``."""
        values, events = (self.rate(metric, part, **labels) for part in ("sum", "count"))
        return ratio(f"sum {keep} ({values})", f"sum {keep} ({events})")


def ratio(above: str, below: str) -> str:
    """Return a quotient; without events it is NaN, which is not drawn."""
    return f"{above}\n/\n{below}"


def labelled(expr: str, label: str, value: str, source: str = "") -> str:
    """Return the same series with one more label; ``$1`` is the value of the label ``source``."""
    pattern = "(.*)" if source else ""
    return f'label_replace({expr}, "{label}", "{value}", "{source}", "{pattern}")'


BOARD = Scope("$__rate_interval", ('job=~"$job"', 'instance=~"$instance"'))
"""Scope of dashboards: Grafana substitutes the user's selection."""

RULE = Scope("5m")
"""Scope of recording rules and alerts: all targets, five minutes."""
