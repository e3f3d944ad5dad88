"""The class that vLLM loads: its hooks, each one line to the half that it is for.

vLLM makes one for its scheduler and one for each worker, and says which. What goes wrong in a hook
is logged, and vLLM is told what it would be told if there were nothing in the cache.
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
from kvtier.connectors.vllm.engine_state import own_tier
from kvtier.connectors.vllm.jobs import RankReport, StepJobs, WorkerReports
from kvtier.connectors.vllm.key_spaces import KeySpaceResolver
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
"""Has a hook return what is given where it would raise into vLLM."""

_FOREIGN = RankReport(None, "MultiConnector has passed on another connector's handshake")
"""It passes on that of the first one that has any, to all."""

register()  # MultiConnector looks for the classes of what it counts by their short names


def _nothing() -> None:
    """Return nothing."""


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there to be checked
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._site: ConnectorSetup | None = None
        self._facts: RankReport | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._pool: Any = None
        self._events: KvEvents | None = None
        self._reports = WorkerReports()
        self._copies: BlockCopier | None = None
        self._start: KeySpaceResolver | None = None
        self._are_workers_told = False
        self._is_reset = False
        self._prepare(role)

    @property
    def requires_kv_delivery(self) -> bool:
        """Say that a block that is not stored is no loss."""
        return False

    # Worker half

    @_open(_nothing)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors, and say what they are."""
        if self._site is not None:
            self._facts, self._copies = self._site.describe(kv_caches)

    @_open(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half what this worker's blocks are."""
        return None if self._facts is None else Handshake(self._facts)

    @_open(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        metadata = self._get_connector_metadata()
        try:
            if self._worker is None and metadata.weights:
                self._begin_worker(metadata.weights)
        finally:
            if self._worker is None:
                self._reports.refuse([*metadata.orders.loads, *metadata.orders.stores])
        if self._worker is not None:
            self._worker.load(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before vLLM computes with them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are offered whole."""

    def wait_for_save(self) -> None:
        """Do nothing: with speculative decoding only the last rank of a pipeline calls it."""

    @_open(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin the stores of this step, and tell which requests' loads are over."""
        self._store()
        return None, self._reports.take_received()

    @_open(_nothing)
    def _store(self) -> None:
        if self._worker is not None:
            self._worker.store(self._get_connector_metadata().orders)

    @_open(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks did not come."""
        return self._reports.take_missing()

    @_open(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler half what is done."""
        results = self._reports.take_results(self._get_connector_metadata().orders.step)
        return None if results is None else WorkerMetadata(results)

    # Scheduler half

    @_open(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the workers' blocks are, and begin."""
        if self._start is not None:
            told = [metadata[rank] for rank in sorted(metadata)]
            self._start.tell([getattr(each, "facts", _FOREIGN) for each in told])
            self._begin()

    def _begin(self) -> None:
        """Begin, if all is known now that has to be."""
        if self._site is None or self._start is None or not (spaces := self._start.take_spaces()):
            return
        ratio, layout = self._start.num_engine_blocks, spaces[0].layout
        self._events = self._site.open_events(spaces, ratio)
        news = self._events.news if self._events else None
        tell_own = partial(self._own_tier, ratio)
        self._scheduler = self._site.scheduler_half(spaces, ratio, news, tell_own)
        self._scheduler.bind(self._pool)
        if self._is_reset:
            self._scheduler.reset()
        self._scheduler.start()
        _log.info(
            "vLLM's blocks are offered to the daemon and loaded from it",
            model=self._site.model_name,
            layout=f"{layout.name} {layout.version}",
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = gpu_block_pool

    @_open(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Hear of a request."""
        if self._scheduler is None:
            self._begin()
        if self._start is not None and request.lora_request:
            self._start.adapters.note(request.lora_request)  # before anybody asks, as well
        if self._scheduler is None or self._start is None:
            return
        if request.lora_request:
            self._start.adapters.ask(request)
        else:
            self._scheduler.add(request)

    @_open(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tell how many tokens more are held."""
        if self._scheduler is None or self._start is None:
            return 0, False
        if self._start.adapters.is_open(request.request_id):
            return None, False
        if adapter := self._start.adapters.take(request.request_id):
            self._scheduler.add(request, adapter)
        num_tokens = self._scheduler.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    @_open(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order a load."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @_open(lambda: StepMetadata(StepJobs(), b""))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return this step's orders."""
        self._offer(scheduler_output)
        if self._scheduler is None or self._start is None:
            return StepMetadata(StepJobs(), b"")
        self._are_workers_told = True
        return StepMetadata(self._scheduler.take_orders(), self._start.weights)

    @_open(_nothing)
    def _offer(self, scheduler_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.offer(scheduler_output)

    @_open(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers are done with."""
        told = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and told is not None:
            self._scheduler.take(told.results)

    @_open(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of a request; its blocks may be freed, those under a store have a reference."""
        if self._start is not None:
            self._start.adapters.forget(request.request_id)
        if self._scheduler is not None:
            self._scheduler.finish(request)
        return False, None

    @_open(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Have vLLM go on with steps while a store has blocks of its pool, or there is news.

        Also without any request at the start: by a first one the workers hear that they may begin,
        and by those up to the first session vLLM's metrics.
        """
        if self._scheduler is None:
            return False
        if not self._are_workers_told or self._scheduler.is_joining:
            return True
        if self._events is not None and self._events.news.is_waiting:
            return True
        return self._scheduler.has_pending_stores

    @_open(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Have vLLM wait for a store that gives blocks back, rather than preempt a request."""
        return self._scheduler is not None and self._scheduler.frees_blocks_soon

    @_open(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return what routers are to hear of the daemon's tiers."""
        return self._events.take(self._pool) if self._events else ()

    @_open(lambda: True)
    def reset_cache(self) -> bool | None:
        """Have all that was stored before forgotten, or never loaded again where that takes longer.

        True all the same: vLLM takes another answer for a fault, of its sleep for instance.
        """
        self._is_reset = True  # where nothing has begun yet, that comes first
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @_open(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Tell which tiers the tokens of a load come from."""
        if self._scheduler is None:
            return {}
        return hit_sources(self._scheduler.sources(request.request_id, num_external_tokens))

    # Both, and the process that serves vLLM's metrics

    @_open(_nothing)
    def get_kv_connector_stats(self) -> KvtierStats | None:
        """Tell what was counted since the last step."""
        half = self._scheduler or self._worker
        counts = half.take_counts() if half else None
        return KvtierStats.of(counts) if counts else None

    @classmethod
    @_open(KvtierStats)
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        """Return what came from another process as stats again."""
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
        """Return our metrics in vLLM's Prometheus."""
        return KvtierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_open(_nothing)
    def shutdown(self) -> None:
        """End the sessions."""
        for part in (self._scheduler, self._worker, self._start):
            if part is not None:
                _open(_nothing)(part.close)()  # whatever becomes of the others

    @_open(_nothing)
    def _prepare(self, role: KVConnectorRole) -> None:
        """Read the settings, and begin to find out what the model is."""
        join_log()
        # A block that does not come is computed. vLLM's default is to fail the request, and its
        # scheduler reads this right after it has made us.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        try:
            settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        except ConfigError as error:  # vLLM goes on without us
            if role == KVConnectorRole.SCHEDULER:  # once is enough
                _log.error("vLLM's blocks are not cached", reason=error)
        else:
            self._site = ConnectorSetup(self._vllm_config, self._kv_cache_config, settings)
            if role == KVConnectorRole.SCHEDULER:
                self._start = self._site.start()
        join_traces(self._vllm_config)

    def _begin_worker(self, weights: bytes) -> None:
        """Begin where blocks are served; where no thread is to be had the next step tries again."""
        if self._site is not None and self._facts is not None and self._copies is not None:
            half = self._site.worker_half(self._facts, weights, self._copies, self._reports)
            self._worker, self._facts = half, None

    @_open(lambda: OwnTier(0, 0, 0, 0))
    def _own_tier(self, ratio: int, layout: KVLayout, rank: int) -> OwnTier:
        half = None if rank else self._scheduler  # a request's tokens are told once
        return own_tier(self._pool, layout, ratio, half.hit_tokens if half else None)
