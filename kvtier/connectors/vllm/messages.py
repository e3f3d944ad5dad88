"""What the two halves say to each other, in classes that vLLM passes on. Imports vLLM."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.connectors.guard import guarded
from kvtier.connectors.vllm.order import RankFacts, Results, WorkerOrders
from kvtier.observe.log import Log

__all__ = ["Handshake", "StepMetadata", "WorkerMetadata"]


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """What a worker's blocks are."""

    facts: RankFacts


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """What the workers are to do in a step; with ``weights`` they may begin."""

    orders: WorkerOrders
    weights: bytes


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """What workers are done with."""

    results: Results

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up what two workers are done with."""
        self._add(other)
        return self

    @guarded(Log("kvtier.vllm"), lambda: None)
    def _add(self, other: Any) -> None:
        self.results.add(other.results)
