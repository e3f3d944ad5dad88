"""One reading of the metrics, for documents that tell the same numbers."""

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from kvtier.observe.metrics import Metric

__all__ = ["Samples"]


class Samples:
    """All series of a registry, as they were at one moment."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in registry.collect():
            for sample in family.samples:
                self._series[sample.name].append((sample.labels, sample.value))

    def sum(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Return the sum of a metric's series that have these labels."""
        series = self._series.get(metric.name + suffix, ())
        return sum(value for given, value in series if labels.items() <= given.items())

    def count(self, metric: Metric, suffix: str = "", **labels: str) -> int:
        """Return a sum that is a whole number, as one."""
        return int(self.sum(metric, suffix, **labels))

    def counts(self, metric: Metric, **fixed: str) -> dict[str, int]:
        """Return the counts of a metric by its last label, where they are not 0."""
        label, values = metric.labels[-1]
        counts = {value: self.count(metric, **fixed, **{label: value}) for value in values}
        return {value: count for value, count in counts.items() if count}
