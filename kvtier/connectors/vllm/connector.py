"""The class that vLLM loads: its hooks, each one line to the half that it is for.

vLLM makes one for its scheduler and one for each worker, and says which. What goes wrong in a hook
is logged, and vLLM is told what it would be told if there were nothing in the cache.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtier.client import Client, ClientDeadlines
from kvtier.connectors.vllm.identity import block_ratio, model_config, weights_fingerprint
from kvtier.connectors.vllm.order import Orders, RankFacts, Results
from kvtier.connectors.vllm.pages import Pages
from kvtier.connectors.vllm.release import (
    check_release,
    instruction_set,
    layout_name,
    release,
)
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.observe.log import Log

__all__ = ["KvtierConnector"]

_log = Log("kvtier.vllm")

_DEADLINES = ClientDeadlines(lookup_s=0.25, load_s=5.0, store_s=5.0, reconnect_s=1.0)

_Hook = TypeVar("_Hook", bound=Callable[..., Any])

check_release()


def _open(otherwise: Callable[[], object]) -> Callable[[_Hook], _Hook]:
    """Have a hook return ``otherwise()`` where it would raise into vLLM."""

    def decorate(hook: _Hook) -> _Hook:
        @wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                _log.exception("a hook of the connector failed", hook=hook.__name__)
                return otherwise()

        return cast("_Hook", guarded)

    return decorate


def _nothing() -> None:
    """Return nothing."""


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    orders: Orders


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    facts: RankFacts


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    results: Results

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up what two workers are done with."""
        self.results.add(other.results)
        return self


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there to be checked
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._socket_path = Path(self._kv_transfer_config.get_from_extra_config("socket", ""))
        # A block that does not come is computed. vLLM's default is to fail the request, and its
        # scheduler reads this right after it has made us.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._facts: RankFacts | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._pool: Any = None
        self._num_workers = vllm_config.parallel_config.world_size

    @property
    def requires_kv_delivery(self) -> bool:
        """Say that a block that is not stored is no loss."""
        return False

    # Worker half

    @_open(_nothing)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors, and say what they are."""
        try:
            pages, self._facts = self._describe(kv_caches)
        except (ValueError, KeyError, OSError) as error:
            self._facts = RankFacts(None, refusal=str(error))
            _log.error("vLLM's blocks are not cached", reason=error)
            return
        assert self._facts.space is not None
        client = self._client(self._facts.space, "worker")
        self._worker = WorkerHalf(client, pages)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half what this worker's blocks are."""
        return None if self._facts is None else _Handshake(self._facts)

    @_open(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before vLLM computes with them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are offered whole."""

    @_open(_nothing)
    def wait_for_save(self) -> None:
        """Begin the stores of this step."""
        if self._worker is not None:
            self._worker.store(self._get_connector_metadata().orders)

    def get_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Tell which requests' loads are over."""
        return None, self._worker.take_received() if self._worker else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks did not come."""
        return self._worker.take_missing() if self._worker else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler half what is done."""
        results = self._worker.take_results() if self._worker else None
        return None if results is None else _WorkerMetadata(results)

    # Scheduler half

    @_open(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the workers' blocks are, and begin."""
        ranks = [metadata[rank].facts for rank in sorted(metadata)]
        space = ranks[0].space if len(ranks) == 1 else None
        if space is None:
            refusals = "; ".join(rank.refusal for rank in ranks if rank.refusal)
            reason = refusals or f"{len(ranks)} workers are not served yet"
            _log.error("vLLM's blocks are not cached", reason=reason)
            return
        client = self._client(space, "scheduler")
        tokens = space.layout.block_tokens
        ratio = ranks[0].num_engine_blocks
        self._scheduler = SchedulerHalf(client, space.digest, tokens, ratio)
        self._scheduler.bind(self._pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = gpu_block_pool

    @_open(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Hear of a request."""
        if self._scheduler is not None:
            self._scheduler.add(request)

    @_open(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tell how many tokens more are held."""
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    @_open(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order a load."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return this step's orders."""
        self._offer(scheduler_output)
        return _Metadata(self._scheduler.take_orders() if self._scheduler else Orders())

    @_open(_nothing)
    def _offer(self, scheduler_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.offer(scheduler_output)

    @_open(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers are done with."""
        if self._scheduler is None:
            return
        told = connector_output.kv_connector_worker_meta
        if told is not None:
            self._scheduler.take(told.results, self._num_workers)
        self._scheduler.note_end()

    @_open(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of a request; its blocks may be freed, those under a store have a reference."""
        if self._scheduler is not None:
            self._scheduler.finish(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Have vLLM go on with steps while a store has blocks of its pool."""
        return self._scheduler is not None and self._scheduler.num_open_stores > 0

    def take_events(self) -> Iterable[Any]:
        """Return no events."""
        return ()

    @_open(_nothing)
    def shutdown(self) -> None:
        """End the sessions."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def _client(self, space: KeySpace, half: str) -> Client:
        name = f"vllm {Path(self._vllm_config.model_config.model).name} {half}"
        client = Client(self._socket_path, space, name, deadlines=_DEADLINES)
        client.start()
        return client

    def _describe(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[Pages, RankFacts]:
        """Return this worker's pages, and what they are. Raises ValueError for what they cannot."""
        config = self._vllm_config
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(f"the model has {len(groups)} groups of KV, and one is served")
        pages = Pages(kv_caches)
        name, tensor = next(iter(kv_caches.items()))
        layer = config.compilation_config.static_forward_context[name]
        spec = groups[0].kv_cache_spec
        ratio = block_ratio(spec.block_size)
        shapes = "x".join(map(str, tensor.shape[1:]))
        backend, isa = layer.attn_backend.get_name(), instruction_set(config, spec)
        layout = KVLayout(
            name=f"vllm-{layout_name(config).lower()}",
            version=1,
            block_tokens=ratio * spec.block_size,
            block_bytes=ratio * pages.block_bytes,
            dtype=str(tensor.dtype).removeprefix("torch."),
            detail=f"{ratio}x(layer={pages.num_layers},page={shapes}),{backend},{isa}",
        )
        parallel = config.parallel_config
        space = KeySpace(
            weights=weights_fingerprint(Path(config.model_config.model)),
            model_config=model_config(config.model_config.hf_config),
            layout=layout,
            compute_dtype=str(config.model_config.dtype).removeprefix("torch."),
            engine=f"vllm {'.'.join(map(str, release()))} {type(spec).__name__}",
            codec=str(config.cache_config.cache_dtype),
            parallel_size=parallel.world_size,
            parallel_rank=parallel.rank,
        )
        return pages, RankFacts(space, ratio)
