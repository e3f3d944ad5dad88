"""The class that vLLM loads: its hooks, each one line to the half that it is for.

vLLM makes one for its scheduler and one for each worker, and says which. What goes wrong in a hook
is logged, and vLLM is told what it would be told if there were nothing in the cache.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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

from kvtier.client import Client, OwnTier
from kvtier.client.watch import Hear
from kvtier.connectors.guard import guarded
from kvtier.connectors.vllm.identity.description import describe
from kvtier.connectors.vllm.log import join_log
from kvtier.connectors.vllm.metrics import KvtierMetrics, KvtierStats, hit_sources
from kvtier.connectors.vllm.order import Orders, RankFacts, Results
from kvtier.connectors.vllm.plugin import register
from kvtier.connectors.vllm.pool import own_tier
from kvtier.connectors.vllm.refusal import refusal
from kvtier.connectors.vllm.release import check_release, local_model
from kvtier.connectors.vllm.reports import Reports
from kvtier.connectors.vllm.routers.events import Events, open_events
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.connectors.vllm.settings import Settings, read_settings
from kvtier.connectors.vllm.start import Start
from kvtier.connectors.vllm.transfer.copies import Copies, open_copies
from kvtier.connectors.vllm.transfer.pages import Pages
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.errors import ConfigError
from kvtier.observe.log import Log
from kvtier.transfer.shm import Pin

__all__ = ["KvtierConnector"]

_log = Log("kvtier.vllm")

_open = partial(guarded, _log)
"""Has a hook return what is given where it would raise into vLLM."""

_FOREIGN = RankFacts(None, "MultiConnector has passed on another connector's handshake")
"""It passes on that of the first one that has any, to all."""

check_release()
register()  # MultiConnector looks for the classes of what it counts by their short names


def _nothing() -> None:
    """Return nothing."""


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    orders: Orders
    weights: bytes


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    facts: RankFacts


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    results: Results

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up what two workers are done with."""
        self._add(other)
        return self

    @_open(_nothing)
    def _add(self, other: Any) -> None:
        self.results.add(other.results)


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there to be checked
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings: Settings | None = None
        self._facts: RankFacts | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._pool: Any = None
        self._events: Events | None = None
        self._reports = Reports()
        self._copies: Copies | None = None
        self._start: Start | None = None
        self._are_workers_told = False
        self._prepare(role)

    @property
    def requires_kv_delivery(self) -> bool:
        """Say that a block that is not stored is no loss."""
        return False

    # Worker half

    @_open(_nothing)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors, and say what they are."""
        config, blocks = self._vllm_config, self._kv_cache_config
        if self._settings is None:
            return
        if refused := refusal(config, blocks):
            self._facts = RankFacts(None, refused)
            return
        try:
            pages = Pages(kv_caches, blocks.num_blocks)
            facts = RankFacts(describe(config, blocks, kv_caches, pages))
            self._copies = open_copies(pages)
            self._facts = facts
        except (ValueError, KeyError, OSError, AttributeError) as error:
            self._facts = RankFacts(None, str(error))  # the scheduler half says it

    @_open(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half what this worker's blocks are."""
        return None if self._facts is None else _Handshake(self._facts)

    @_open(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        metadata = self._get_connector_metadata()
        try:
            if self._worker is None and self._facts is not None and metadata.weights:
                self._worker = self._begin_worker(self._facts, metadata.weights)
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
        return None if results is None else _WorkerMetadata(results)

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
        if self._start is None or not (spaces := self._start.take_spaces()):
            return
        space = spaces[0]
        tokens, ratio = space.layout.block_tokens, self._start.num_engine_blocks
        self._events = open_events(
            self._vllm_config, self._kv_cache_config, tokens, ratio, len(spaces)
        )
        ranks = [
            Rank(self._asking_client(each, number, ratio), each.digest)
            for number, each in enumerate(spaces)
        ]
        assert self._settings is not None
        self._scheduler = SchedulerHalf(ranks, tokens, ratio, self._settings.role)
        self._scheduler.news = self._events.news if self._events else None
        self._scheduler.bind(self._pool)
        for rank in ranks:
            rank.client.start()
        _log.info(
            "vLLM's blocks are offered to the daemon and loaded from it",
            socket=self._settings.socket,
            model=Path(self._vllm_config.model_config.model).name,
            layout=f"{space.layout.name} {space.layout.version}",
            block_tokens=tokens,
            block_bytes=space.layout.block_bytes,
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

    @_open(lambda: _Metadata(Orders(), b""))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return this step's orders."""
        self._offer(scheduler_output)
        if self._scheduler is None or self._start is None:
            return _Metadata(Orders(), b"")
        self._are_workers_told = True
        return _Metadata(self._scheduler.take_orders(), self._start.weights)

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
        self._settings = self._read_settings(role)
        if role == KVConnectorRole.SCHEDULER and self._settings is not None:
            config, blocks = self._vllm_config, self._kv_cache_config
            self._start = Start(lambda: local_model(config), refusal(config, blocks))

    def _read_settings(self, role: KVConnectorRole) -> Settings | None:
        """Read what the user says; where that makes no sense, vLLM goes on without us."""
        try:
            return read_settings(self._kv_transfer_config.kv_connector_extra_config)
        except ConfigError as error:
            if role == KVConnectorRole.SCHEDULER:  # once is enough
                _log.error("vLLM's blocks are not cached", reason=error)
            return None

    def _begin_worker(self, facts: RankFacts, weights: bytes) -> WorkerHalf | None:
        """Return the worker half, now that the scheduler half has begun."""
        if facts.blocks is None or self._copies is None:
            return None
        space = facts.blocks.space(weights)
        rank = facts.blocks.parallel_rank
        client = self._client(space, "worker", rank, pin=self._copies.arena)
        client.start()  # raises where no thread is to be had, and the next step tries again
        self._facts = None
        return WorkerHalf(client, self._copies, rank, self._reports)

    def _asking_client(self, space: KeySpace, rank: int, ratio: int) -> Client:
        hear = self._events.news.hear(rank) if self._events else None
        own = partial(self._own_tier, space.layout, rank, ratio)
        return self._client(space, "scheduler", rank, hear=hear, own_tier=own)

    @_open(lambda: OwnTier(0, 0, 0, 0))
    def _own_tier(self, layout: KVLayout, rank: int, ratio: int) -> OwnTier:
        half = None if rank else self._scheduler  # a request's tokens are told once
        return own_tier(self._pool, layout, ratio, half.hit_tokens if half else None)

    def _client(
        self,
        space: KeySpace,
        half: str,
        rank: int,
        *,
        hear: Hear | None = None,
        own_tier: Callable[[], OwnTier] | None = None,
        pin: Pin | None = None,
    ) -> Client:
        name = f"vllm {Path(self._vllm_config.model_config.model).name} {half}"
        assert self._settings is not None
        socket, deadlines = self._settings.socket, self._settings.deadlines
        return Client(
            socket,
            space,
            name,
            deadlines=deadlines,
            own_tier=own_tier,
            rank=rank,
            watch=hear,
            pin=pin,
        )
