"""What a row of the table of metrics is: a counter, a gauge or a histogram."""

from dataclasses import dataclass

__all__ = ["TRANSFER_BUCKETS", "Counter", "Gauge", "Histogram", "Metric"]

# One step of about 2.5 each: a quantile read from a bucket is then within a factor of 1.6. The
# range is that of one block from memory (50 us) to the longest deadline (5 s).
_MILLISECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
TRANSFER_BUCKETS = tuple(milliseconds / 1000 for milliseconds in _MILLISECONDS)
"""Of what moves or decides about blocks, in seconds."""


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
