"""The text that Prometheus reads, made in little time.

Theory
------
Making it holds the interpreter, and so the node's loop. ``prometheus_client`` writes every name and
label anew for each scrape, which is most of its time. But the series of a process are fixed: so
what stands before a value is written once, by ``prometheus_client`` itself, and kept.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

__all__ = ["Exposition"]


class Exposition:
    """Says what a registry holds; its samples have no timestamps. For one thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._titles: dict[str, str] = {}
        self._heads: dict[tuple[str, ...], str] = {}

    def text(self) -> bytes:
        """Return what ``generate_latest`` would."""
        families = list(self._registry.collect())
        try:
            return "".join(self._lines(families)).encode()
        except KeyError:  # a series that was not there the last time
            return self._learn(families)

    def _lines(self, families: Sequence[Metric]) -> Iterator[str]:
        titles, heads = self._titles, self._heads
        for family in families:
            yield titles[family.name]
            for sample in family.samples:
                value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # the library's
                yield f"{heads[_key(sample)]} {value}\n"

    def _learn(self, families: Sequence[Metric]) -> bytes:
        """Keep what stands before the values, and nothing of series that are no more."""
        text = generate_latest(_Taken(families))
        lines = iter(text.decode().split("\n"))
        self._titles, self._heads = {}, {}
        for family in families:
            self._titles[family.name] = f"{next(lines)}\n{next(lines)}\n"
            for sample in family.samples:
                self._heads[_key(sample)] = next(lines).rpartition(" ")[0]
        return text


def _key(sample: Sample) -> tuple[str, ...]:
    return (sample.name, *sample.labels.values())


class _Taken(Collector):
    """Families as they were collected."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families
