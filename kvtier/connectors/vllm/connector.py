"""The class that vLLM loads; each hook delegates to the scheduler half or the worker half.

vLLM creates one instance for its scheduler and one for each worker. A failing hook is logged, and
returns what it would return for an empty cache. Imports vLLM.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtier.client import OwnTier
from kvtier.connectors.kit.copies import BlockCopier
from kvtier.connectors.kit.guard import guarded
from kvtier.connectors.vllm.block_identity import KeySpaceResolver, RankReport, adapter_of
from kvtier.connectors.vllm.engine_state import own_tier
from kvtier.connectors.vllm.jobs import StepJobs, WorkerReports
from kvtier.connectors.vllm.kv_events import KvEvents
from kvtier.connectors.vllm.messages import (
    Handshake,
    KvtierMetrics,
    KvtierStats,
    StepMetadata,
    WorkerMetadata,
    hit_sources,
)
from kvtier.connectors.vllm.plugin import register
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.setup import ConnectorSetup
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.connectors.vllm_common.observability import join_log, join_traces
from kvtier.connectors.vllm_common.settings import read_settings
from kvtier.core.layout import KVLayout
from kvtier.errors import ConfigError
from kvtier.observe.log import Log

__all__ = ["KvtierConnector"]

_log = Log("kvtier.vllm")

_open = partial(guarded, _log)
"""Makes a hook return the given default instead of raising into vLLM."""

_FOREIGN = RankReport(None, "MultiConnector has passed on another connector's handshake")
"""MultiConnector passes the first connector's handshake on to all."""

register()  # MultiConnector finds the classes of connector stats by registered names


def _nothing() -> None:
    """Return nothing."""


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there to be checked
    """kvtier's connector for vLLM; has a scheduler half or a worker half, depending on ``role``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup: ConnectorSetup | None = None
        self._facts: RankReport | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._pool: Any = None
        self._events: KvEvents | None = None
        self._reports = WorkerReports()
        self._copies: BlockCopier | None = None
        self._resolver: KeySpaceResolver | None = None
        self._are_workers_told = False
        self._is_reset = False
        self._prepare(role)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: vLLM need not wait for stores."""
        return False

    # Worker half

    @_open(_nothing)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Accept the KV tensors, and describe their blocks."""
        if self._setup is not None:
            self._facts, self._copies = self._setup.describe(kv_caches)

    @_open(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the description of this worker's blocks for the scheduler half."""
        return None if self._facts is None else Handshake(self._facts)

    @_open(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step."""
        metadata = self._get_connector_metadata()
        try:
            if self._worker is None and metadata.weights:
                self._begin_worker(metadata.weights)
        finally:
            if self._worker is None:
                self._reports.refuse([*metadata.jobs.loads, *metadata.jobs.stores])
        if self._worker is not None:
            self._worker.load(metadata.jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads complete before vLLM computes with them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored whole."""

    def wait_for_save(self) -> None:
        """Do nothing: with speculative decoding only a pipeline's last rank calls this hook."""

    @_open(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the stores of this step, and return the requests whose loads have ended."""
        self._store()
        return None, self._reports.take_received()

    @_open(_nothing)
    def _store(self) -> None:
        if self._worker is not None:
            self._worker.store(self._get_connector_metadata().jobs)

    @_open(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        return self._reports.take_missing()

    @_open(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this worker's results for the scheduler half."""
        results = self._reports.take_results(self._get_connector_metadata().jobs.step)
        return None if results is None else WorkerMetadata(results)

    # Scheduler half

    @_open(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Accept the descriptions of the workers' blocks, and start."""
        if self._resolver is not None:
            handshakes = [metadata[rank] for rank in sorted(metadata)]
            self._resolver.set_ranks([getattr(each, "facts", _FOREIGN) for each in handshakes])
            self._begin()

    def _begin(self) -> None:
        """Start the scheduler half once the key spaces are known."""
        if self._setup is None or self._resolver is None:
            return
        spaces = self._resolver.take_spaces()
        if not spaces:
            return
        ratio, layout = self._resolver.num_engine_blocks, spaces[0].layout
        self._events = self._setup.open_events(spaces, ratio)
        router_feed = self._events.router_feed if self._events else None
        tell_own = partial(self._own_tier, ratio)
        self._scheduler = self._setup.scheduler_half(spaces, ratio, router_feed, tell_own)
        self._scheduler.bind(self._pool)
        if self._is_reset:
            self._scheduler.reset()
        self._scheduler.start()
        _log.info(
            "vLLM's blocks are offered to the daemon and loaded from it",
            model=self._setup.model_name,
            layout=f"{layout.name} {layout.version}",
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Accept vLLM's block pool."""
        self._pool = gpu_block_pool

    @_open(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Track a new request."""
        if self._scheduler is None:
            self._begin()
        if self._resolver is not None and request.lora_request:
            self._resolver.adapters.note(adapter_of(request.lora_request))
        if self._scheduler is None or self._resolver is None:
            return
        if request.lora_request:
            self._resolver.adapters.ask(request.request_id, adapter_of(request.lora_request))
        else:
            self._scheduler.add(request)

    @_open(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many more tokens are held; None: vLLM should ask again."""
        if self._scheduler is None or self._resolver is None:
            return 0, False
        if self._resolver.adapters.is_pending(request.request_id):
            return None, False
        if adapter := self._resolver.adapters.take(request.request_id):
            self._scheduler.add(request, adapter)
        num_tokens = self._scheduler.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    @_open(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load of a request."""
        if self._scheduler is not None:
            self._scheduler.start_load(request, blocks.get_block_ids()[0], num_external_tokens)

    @_open(lambda: StepMetadata(StepJobs(), b""))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the workers' jobs of this step."""
        self._offer(scheduler_output)
        if self._scheduler is None or self._resolver is None:
            return StepMetadata(StepJobs(), b"")
        self._are_workers_told = True
        return StepMetadata(self._scheduler.take_jobs(), self._resolver.weights)

    @_open(_nothing)
    def _offer(self, scheduler_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.start_stores(scheduler_output)

    @_open(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Accept the workers' results."""
        metadata = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and metadata is not None:
            self._scheduler.take_results(metadata.results)

    @_open(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request. vLLM may free its blocks; those being stored are referenced."""
        if self._resolver is not None:
            self._resolver.adapters.forget(request.request_id)
        if self._scheduler is not None:
            self._scheduler.finish(request)
        return False, None

    @_open(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Make vLLM run steps while a store has blocks of its pool, or events are waiting.

        Also at the start, without requests: the first step tells the workers that they may start,
        and steps until the first session update vLLM's metrics.
        """
        if self._scheduler is None:
            return False
        if not self._are_workers_told or self._scheduler.is_joining:
            return True
        if self._events is not None and self._events.router_feed.is_waiting:
            return True
        return self._scheduler.has_pending_stores

    @_open(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Make vLLM wait for a store that will free blocks, instead of preempting a request."""
        return self._scheduler is not None and self._scheduler.frees_blocks_soon

    @_open(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return KV events about the daemon's tiers."""
        return self._events.take(self._pool) if self._events else ()

    @_open(lambda: True)
    def reset_cache(self) -> bool | None:
        """Drop all blocks stored so far; until that is complete, none is loaded.

        Always returns True: vLLM treats anything else as an error, for example of its sleep mode.
        """
        self._is_reset = True  # applied when the scheduler half starts
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @_open(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return the number of tokens of a load by source."""
        if self._scheduler is None:
            return {}
        return hit_sources(self._scheduler.sources(request.request_id, num_external_tokens))

    # Both halves, and the process that serves vLLM's metrics

    @_open(_nothing)
    def get_kv_connector_stats(self) -> KvtierStats | None:
        """Return the counts since the last step."""
        half = self._scheduler or self._worker
        counts = half.take_counts() if half else None
        return KvtierStats.of(counts) if counts else None

    @classmethod
    @_open(KvtierStats)
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        """Return stats received from another process."""
        return KvtierStats.of(data)

    @classmethod
    @_open(_nothing)
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvtierMetrics | None:
        """Return kvtier's metrics for vLLM's Prometheus."""
        return KvtierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_open(_nothing)
    def shutdown(self) -> None:
        """End the sessions."""
        for part in (self._scheduler, self._worker, self._resolver):
            if part is not None:
                _open(_nothing)(part.close)()  # even if another one fails

    @_open(_nothing)
    def _prepare(self, role: KVConnectorRole) -> None:
        """Read the settings, and start resolving the key spaces."""
        join_log()
        # A block that is not loaded is computed. vLLM's default is to fail the request; its
        # scheduler reads this right after it has created the connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        try:
            settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        except ConfigError as error:  # vLLM runs without kvtier
            if role == KVConnectorRole.SCHEDULER:  # log it once, not in each worker
                _log.error("vLLM's blocks are not cached", reason=error)
        else:
            self._setup = ConnectorSetup(self._vllm_config, self._kv_cache_config, settings)
            if role == KVConnectorRole.SCHEDULER:
                self._resolver = self._setup.resolver()
        join_traces(self._vllm_config)

    def _begin_worker(self, weights: bytes) -> None:
        """Start the worker half; if no thread can be started the next step tries again."""
        if self._setup is not None and self._facts is not None and self._copies is not None:
            half = self._setup.worker_half(self._facts, weights, self._copies, self._reports)
            self._worker, self._facts = half, None

    @_open(lambda: OwnTier(0, 0, 0, 0))
    def _own_tier(self, ratio: int, layout: KVLayout, rank: int) -> OwnTier:
        half = None if rank else self._scheduler  # a request's tokens are counted for one rank
        return own_tier(self._pool, layout, ratio, half.hit_tokens if half else None)
