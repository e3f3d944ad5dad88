"""The class that vLLM loads as a secondary tier. Imports vLLM.

Until the weights are fingerprinted, on a thread, and the daemon is attached, the tier is empty:
lookups miss, and jobs fail at once.
"""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client import Client
from kvtier.connectors.kit.guard import guarded
from kvtier.connectors.kit.weights import FileDigests, WeightsFingerprint, began_ns, record_path
from kvtier.connectors.vllm_common.observability import join_log
from kvtier.connectors.vllm_common.settings import Settings, read_settings, traits_of, why_kept
from kvtier.connectors.vllm_tier.identity import ModelFacts, chunk_layout
from kvtier.connectors.vllm_tier.requests import ChunkAnswer, Requests
from kvtier.connectors.vllm_tier.transfers import ChunkTransfers, Ended
from kvtier.core.layout import KVLayout
from kvtier.core.request import RequestTraits
from kvtier.errors import ConfigError
from kvtier.observe.log import Log

__all__ = ["KvtierTier", "chunk_ids", "names_from", "result"]

_log = Log("kvtier.vllm")

_DRAIN_S = 5.0
"""vLLM drains before it empties its CPU tier: running jobs get this long to succeed."""

_CLOSE_S = 1.0

_POLL_S = 0.5
"""Interval of checks for a shutdown while waiting."""

_REPORT_S = 60.0
"""Time for workers to report their pages after the weights are read."""

_RESULTS: Mapping[ChunkAnswer, LookupResult] = {
    ChunkAnswer.HIT: LookupResult.HIT,
    ChunkAnswer.MISS: LookupResult.MISS,
    ChunkAnswer.LATER: LookupResult.RETRY,
}

_open = partial(guarded, _log)


@dataclass(frozen=True, slots=True)
class _Parts:
    client: Client
    requests: Requests
    transfers: ChunkTransfers


class KvtierTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there to be checked
    """kvtier's daemon as a tier behind vLLM's CPU tier."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        model: ModelFacts | str | None = None,
        **settings: object,
    ) -> None:
        """Start looking for the daemon.

        ``settings`` are the user's, with the same keys as those of ``KvtierConnector``. ``model``
        comes from ``KvtierOffloadingConnector``; it may be the reason why the model is not served.
        """
        detector = () if backpressure_detector is None else (backpressure_detector,)  # from 0.32 on
        join_log()
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        self._parts: _Parts | None = None
        self._failed: list[Ended] = []
        self._opening = threading.Lock()
        self._is_closed = False
        self._digests = FileDigests(record_path())
        self._block_tokens = 0
        try:
            checked = _read_settings(settings)
            facts = _served(model)
            layout = chunk_layout(offloading_spec.config, _row_bytes(primary_kv_view))
            self._block_tokens = layout.block_tokens
            begin = partial(self._begin, checked, facts, layout, primary_kv_view)
            threading.Thread(target=begin, name="kvtier-open", daemon=True).start()
        except Exception as error:  # whatever the configuration contains, vLLM must start
            self._refuse(str(error) or type(error).__name__)

    @_open(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, context: Any) -> LookupResult:
        """Return whether to load a chunk, or that it is not known yet."""
        if self._parts is None:
            return LookupResult.MISS
        return _RESULTS[self._parts.requests.ask(context.req_id, key)]

    @_open(lambda: None)
    def submit_store(self, job_metadata: Any) -> None:
        """Start a store."""
        if not self._submit(job_metadata, is_load=False):
            self._failed.append(Ended(job_metadata.job_id, is_load=False))

    @_open(lambda: None)
    def submit_load(self, job_metadata: Any) -> None:
        """Start a load."""
        if not self._submit(job_metadata, is_load=True):
            self._failed.append(Ended(job_metadata.job_id, is_load=True))

    @_open(tuple)
    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended, each once."""
        ended, self._failed = self._failed, []
        return [result(each) for each in (*ended, *self._take_ended())]

    @_open(lambda: None)
    def touch(self, keys: Collection[bytes], context: Any) -> None:
        """Take the names of all chunks of a request; vLLM touches them before 0.32."""
        if self._parts is not None:
            self._parts.requests.learn(context.req_id, keys)

    @_open(RequestOffloadingContext)
    def on_new_request(self, context: Any) -> RequestOffloadingContext:
        """Track a request, and have vLLM offer all its chunks, even those that vLLM has itself.

        The daemon usually has them already. But blocks are useless without the front of their
        prompt, and the daemon may have started after vLLM stored it, or have lost it since.
        """
        parts = self._parts
        if parts is None or not parts.client.is_attached:
            return RequestOffloadingContext()
        names = partial(names_from, context, self._block_tokens)
        parts.requests.add(context.req_id, _traits(context), names)
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    @_open(lambda: None)
    def on_request_finished(self, context: Any) -> None:
        """Stop tracking a request."""
        if self._parts is not None:
            self._parts.requests.finish(context.req_id)

    @_open(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Start the lookups that this step needs."""
        if self._parts is not None:
            self._parts.requests.end_step()

    @_open(lambda: None)
    def drain_jobs(self) -> None:
        """Wait a few seconds for every job to end; the rest fail."""
        if self._parts is not None:
            self._parts.transfers.drain(_DRAIN_S)

    @_open(lambda: None)
    def shutdown(self) -> None:
        """End the session, and release vLLM's memory."""
        with self._opening:
            self._is_closed = True
            self._digests.end()
            parts, self._parts = self._parts, None
        if parts is not None:
            parts.requests.close()
            parts.transfers.close(_CLOSE_S)
            parts.client.close()

    @_open(lambda: False)
    def _submit(self, job: Any, *, is_load: bool) -> bool:
        parts = self._parts
        if parts is None:
            return False
        chunks = list(zip(job.keys, chunk_ids(job), strict=True))
        order = parts.requests.order(job.job_id, job.req_context.req_id, chunks)
        begin = parts.transfers.load if is_load else parts.transfers.store
        begin(order, len(chunks))
        return True

    @_open(tuple)
    def _take_ended(self) -> Sequence[Ended]:
        if self._parts is None:
            return ()
        ended = self._parts.transfers.take_ended()
        self._forget(ended)
        return ended

    @_open(lambda: None)
    def _forget(self, ended: Iterable[Ended]) -> None:
        """Answer chunks that were not loaded as misses: vLLM would ask for them forever."""
        assert self._parts is not None
        for each in ended:
            if each.missing:
                self._parts.requests.forget(each.request_id, each.missing)

    @_open(lambda: None)
    def _begin(
        self, settings: Settings, model: ModelFacts, layout: KVLayout, chunks: memoryview
    ) -> None:
        """Fingerprint the weights, which may take minutes, then look for the daemon."""
        fingerprint = WeightsFingerprint(model.find_files, began_ns(), self._digests)
        fingerprint.start()
        while not fingerprint.wait(_POLL_S):
            if self._is_closed:
                return
        if fingerprint.refusal:
            self._refuse(fingerprint.refusal)
            return
        try:
            pages = self._await_pages(model)
        except ValueError as error:
            self._refuse(error)
            return
        space = model.space(fingerprint.weights, layout, pages)
        with self._opening:
            if self._is_closed:
                return
            name = f"vllm {model.name} tier"
            client = Client(
                settings.socket, space, name, deadlines=settings.deadlines, drop=why_kept
            )
            client.start()
            requests, transfers = Requests(client, space.digest), ChunkTransfers(client, chunks)
            self._parts = _Parts(client, requests, transfers)
        _log.info(
            "chunks of vLLM's CPU tier are offered to the daemon and loaded from it",
            model=model.name,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
        )

    def _await_pages(self, model: ModelFacts) -> str:
        """Wait for the workers' reports. Raises ValueError if they cannot report, or do not."""
        ends_s = time.monotonic() + _REPORT_S
        while not self._is_closed and time.monotonic() < ends_s:
            with suppress(TimeoutError):
                return model.pages.result(_POLL_S)
        raise ValueError("vLLM's workers did not report the format of their pages")

    def _refuse(self, reason: object) -> None:
        """Log why the tier is empty, unless vLLM has shut down."""
        if not self._is_closed:
            _log.error("vLLM's chunks are not cached", reason=reason)


def _read_settings(settings: Mapping[str, object]) -> Settings:
    if "only" in settings:
        raise ConfigError("only", "a tier always stores and loads", "leave it out")
    return read_settings(settings)


def _served(model: ModelFacts | str | None) -> ModelFacts:
    """Return the facts of a model that is served. Raises ValueError with the reason otherwise."""
    match model:
        case ModelFacts():
            return model
        case None:
            raise ValueError(
                "vLLM's OffloadingConnector does not tell a tier what the model is:"
                " use KvtierOffloadingConnector of kvtier.connectors.vllm_tier in its place"
            )
        case reason:
            raise ValueError(reason)


def _row_bytes(chunks: memoryview) -> int:
    assert chunks.strides is not None, "vLLM's CPU tier has a row for each chunk"
    return chunks.strides[0]


def _traits(context: Any) -> RequestTraits:
    """Return a request's traits; a tier does not know the length of its prompt."""
    return traits_of(
        SimpleNamespace(
            request_id=context.req_id,
            num_tokens=0,
            kv_transfer_params=context.kv_transfer_params,
        )
    )


def chunk_ids(job: Any) -> list[int]:
    """Return a job's chunks of vLLM's CPU tier, in the order of its keys."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # 0.28
    return [int(each) for each in ids]


def names_from(context: Any, block_tokens: int, first: int) -> Sequence[bytes]:
    """Return the known names of a request's chunks from position ``first`` on.

    Since 0.32 a request's context has them, in order, with the token where each one ends. Before
    that vLLM touches all of them whenever it looks for hits, and this returns none.
    """
    positions: dict[bytes, int] = getattr(context, "_offload_key_positions", {})
    names: list[bytes] = []
    for name, end_token in reversed(positions.items()):
        if end_token <= first * block_tokens:
            break
        names.append(name)
    is_next = bool(names) and positions[names[-1]] == (first + 1) * block_tokens
    return names[::-1] if is_next else ()


def result(ended: Ended) -> Any:
    """Return vLLM's result object for an ended job."""
    more: dict[str, Any] = {}
    if "transfer_bytes" in JobResult.__dataclass_fields__:  # from 0.32 on
        more["transfer_bytes"] = ended.num_bytes
    names = ended.names if ended.is_load and not ended.is_whole else ()
    return JobResult(
        job_id=ended.job,
        success=ended.is_whole,
        successful_keys=names or None,
        transfer_time=ended.seconds,
        **more,
    )
