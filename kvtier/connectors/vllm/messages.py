"""Messages between the halves, and stats, in the classes that vLLM passes on. Imports vLLM."""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.connectors.kit.guard import guarded
from kvtier.connectors.vllm.block_identity import RankReport
from kvtier.connectors.vllm.jobs import StepJobs, StepResults
from kvtier.connectors.vllm.stats import ROWS, Counts, Row, StatKind, add_up, summary
from kvtier.core.residency import TierName
from kvtier.observe.log import Log

__all__ = [
    "Handshake",
    "KvtierMetrics",
    "KvtierStats",
    "StepMetadata",
    "WorkerMetadata",
    "hit_sources",
]


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """A worker's description of its blocks."""

    facts: RankReport


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """The workers' jobs of a step; they start once ``weights`` is not empty."""

    jobs: StepJobs
    weights: bytes


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """The workers' results for the scheduler half."""

    results: StepResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add the results of another worker."""
        self._add(other)
        return self

    @guarded(Log("kvtier.vllm"), lambda: None)
    def _add(self, other: Any) -> None:
        self.results.add(other.results)


_log = Log("kvtier.vllm")


@dataclass
class KvtierStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there to be checked
    """Counts of a step, or of the interval between two lines of vLLM's log."""

    @classmethod
    def of(cls, counts: Mapping[str, Any] | None) -> "KvtierStats":
        """Return stats with a copy of ``counts``: vLLM adds to stats and also reuses the counts."""
        return cls(data=deepcopy(dict(counts or {})))

    def reset(self) -> None:
        """Drop all counts."""
        self.data: Counts = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later counts, or those of another worker."""
        self._add(other)
        return self

    @guarded(_log, lambda: None)
    def _add(self, other: KVConnectorStats) -> None:
        add_up(self.data, other.data)

    @guarded(_log, dict)
    def reduce(self) -> dict[str, int | float]:
        """Return the figures for vLLM's log."""
        return summary(self.data)

    @guarded(_log, lambda: True)
    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class KvtierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not there to be checked
    """The rows of ``stats`` as Prometheus metrics, one series for each engine and label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[str, int, str], Any] = {}
        for row in ROWS.values():
            metric = self._metric(row)
            for engine, labels in per_engine_labelvalues.items():
                for value in row.values:
                    own = [value] if row.label else []
                    self._series[row.name, engine, value] = metric.labels(*labels, *own)

    @guarded(_log, lambda: None)
    def observe(self, counts: Counts, engine: int = 0) -> None:
        """Record the counts of one engine; those without a series are ignored."""
        for name, by_label in counts.items():
            for label, values in by_label.items():
                series = self._series.get((name, engine, label))
                if series is not None:
                    _record(ROWS[name].kind, series, values)

    def _metric(self, row: Row) -> Any:
        common: dict[str, Any] = {
            "name": row.name,
            "documentation": row.text,
            "labelnames": [*self._labelnames, *([row.label] if row.label else [])],
        }
        if row.kind is StatKind.COUNTER:
            return self._counter_cls(**common)
        if row.kind is StatKind.GAUGE:
            return self._gauge_cls(**common, multiprocess_mode="mostrecent")
        return self._histogram_cls(**common, buckets=list(row.buckets))


def hit_sources(split: Mapping[TierName, int]) -> dict[Any, int]:
    """Return tokens by vLLM's hit source, which exists since 0.32."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    sources: Counter[Any] = Counter()
    for tier, num_tokens in split.items():
        if tier is TierName.CPU:
            sources[CacheHitSource.HOST] += num_tokens
        elif tier.is_shared:
            sources[CacheHitSource.EXTERNAL_UNSPECIFIED] += num_tokens
        else:
            sources[CacheHitSource.DISK] += num_tokens
    return dict(sources)


def _record(kind: StatKind, series: Any, values: list[float]) -> None:
    for value in values:
        if kind is StatKind.COUNTER:
            series.inc(value)
        elif kind is StatKind.GAUGE:
            series.set(value)
        else:
            series.observe(value)
