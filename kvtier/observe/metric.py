"""What a row of the table of metrics is: a counter, a gauge or a histogram."""

from dataclasses import dataclass

__all__ = ["Counter", "Gauge", "Histogram", "Metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: a name, what it tells, and the closed set of each label's values."""

    name: str
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def unit(self) -> str:
        """Return the base unit: the last word of the name that is no ``total``."""
        name = self.name.removesuffix("_total")
        word = name.removesuffix("_per_second").rpartition("_")[2]
        if word not in {"seconds", "bytes", "blocks", "tokens"}:
            return "count"
        return f"{word}/s" if name.endswith("_per_second") else word


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows, from 0 at the start of the process."""


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """How it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """How often a value fell below each bound."""

    buckets: tuple[float, ...]
