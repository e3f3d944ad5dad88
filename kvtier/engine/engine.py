"""The engine: requests in, tokens out, one step at a time.

Synchronous and without a thread of its own (see ``runner``): every call except ``check_request``
must come from one thread, and the time is an argument.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.core.identity import KeySpace, chain_root, tenant_digest
from kvtier.core.layout import KVLayout, paged_layout
from kvtier.core.plan import StepSample
from kvtier.core.residency import TierName
from kvtier.engine.attention import AttentionBatch, Span
from kvtier.engine.model import LoadedModel, key_space
from kvtier.engine.pool import BlockPool, PoolCounts, PoolDropped, PoolShape
from kvtier.engine.port import KVPort
from kvtier.engine.request import (
    Deliver,
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    RequestRefused,
)
from kvtier.engine.sampler import make_generator, sample
from kvtier.engine.scheduler import ScheduledChunk, Scheduler
from kvtier.engine.sequence import (
    BlockChain,
    Phase,
    RequestTiming,
    Sequence,
    StallTimes,
    TokenSources,
)
from kvtier.engine.settings import EngineSettings
from kvtier.errors import StartError
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["Engine", "EngineSnapshot", "block_layout", "create_pool"]

_log = Log("kvtier.engine")

_REPORTS_MAX = 1024
"""Step measurements kept for ``take_reports``; the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's monotonic counters and its gauges."""

    prompt_tokens_by_tier: dict[TierName, int]
    computed_prompt_tokens: int
    num_prefill_tokens: int
    """Tokens computed in prefill chunks, including recomputation after a preemption."""
    num_decode_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_stores_skipped: int
    stall_seconds: dict[str, float]
    """Time in which nothing could be computed, by cause: see ``StallTimes``."""
    num_waiting: int
    num_loading: int
    num_running: int
    pool_blocks: PoolCounts
    block_bytes: int


def block_layout(loaded: LoadedModel, settings: EngineSettings) -> KVLayout:
    """Return the layout of a block outside the GPU."""
    return paged_layout(
        block_tokens=settings.block_tokens,
        engine_block_tokens=settings.engine_block_tokens,
        num_layers=loaded.num_layers,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype_name,
        dtype_bytes=loaded.dtype.itemsize,
    )


def create_pool(loaded: LoadedModel, settings: EngineSettings) -> BlockPool:
    """Allocate a model's pool, for the engine and its port to share.

    Raises StartError if the device has not enough memory.
    """
    shape = PoolShape(
        loaded.num_layers,
        settings.engine_block_tokens,
        loaded.num_kv_heads,
        loaded.head_dim,
        loaded.dtype,
    )
    num_blocks = settings.num_blocks(shape.block_bytes)
    device = str(loaded.model.device)
    try:
        return BlockPool(shape, num_blocks, device=device, is_poisoned=settings.is_poisoned)
    except RuntimeError as error:  # there is no narrower type for all devices
        raise StartError(
            "engine.pool",
            f"cannot allocate {num_blocks * shape.block_bytes >> 20} MiB on {device}",
            "lower it or free memory there",
        ) from error


class Engine:
    """Continuous batching of requests over one model and one pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings,
        port: KVPort,
        *,
        pool: BlockPool | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Assemble the engine. ``clock_ns`` only measures steps; it decides nothing."""
        assert port.block_tokens == settings.block_tokens, (
            "engine and port must use the same block size"
        )
        self.loaded = loaded
        self.settings = settings
        self.port = port
        self.pool = pool or create_pool(loaded, settings)
        self.key_space: KeySpace = key_space(loaded, block_layout(loaded, settings))
        self._scheduler = Scheduler(settings, self.pool, port)
        self._clock_ns = clock_ns
        self._num_tickets = 0
        self._by_tier = dict.fromkeys(TierName, 0)
        self._computed = self._num_generated = self._num_steps = 0
        self._num_prefill = self._num_decode = 0
        self._stalls = StallTimes()
        self._faults = RateLimitedLog(_log)
        self._reports: deque[StepSample] = deque(maxlen=_REPORTS_MAX)

    def check_request(self, request: EngineRequest) -> None:
        """Raise RequestRefused for a request that can never be served; from any thread."""
        limit = self.loaded.context_limit
        if not request.prompt:
            raise RequestRefused("the prompt is empty")
        if len(request.prompt) >= limit:
            raise RequestRefused(
                f"the prompt has {len(request.prompt)} tokens, and the model's limit is {limit} "
                "for prompt and answer together; shorten the prompt"
            )
        if request.max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, not {request.max_tokens}")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.loaded.vocab_size:
            raise RequestRefused(f"token ids must be from 0 to {self.loaded.vocab_size - 1}")
        longest = min(len(request.prompt) + request.max_tokens, limit)
        capacity = self.pool.num_blocks * self.pool.shape.block_tokens
        if longest > capacity:
            raise RequestRefused(
                f"prompt and answer take up to {longest} tokens, but the pool holds {capacity}; "
                "lower max_tokens or raise engine.pool"
            )

    def submit(self, request: EngineRequest, deliver: Deliver, now_ns: int) -> None:
        """Accept a request; raises RequestRefused or QueueFull, and then delivers nothing."""
        self.check_request(request)
        scheduler = self._scheduler
        is_taken = request.request_id in scheduler.sequences
        if is_taken or scheduler.loader.has(request.request_id):
            raise RequestRefused(f"request id {request.request_id!r} is in use")
        if scheduler.num_waiting >= self.settings.max_num_waiting:
            raise QueueFull(f"too many requests are waiting ({scheduler.num_waiting})")
        tenant = tenant_digest(request.cache_salt)
        root = chain_root(self.key_space.digest, tenant)
        tokens = list(request.prompt)
        sequence = Sequence(
            request=request,
            deliver=deliver,
            arrival_ns=now_ns,
            ticket=self._num_tickets,
            tenant=tenant,
            chain=BlockChain(root, self.settings.engine_block_tokens),
            port_chain=BlockChain(root, self.settings.block_tokens),
            generator=make_generator(request.sampling),
            tokens=tokens,
            traits=request.traits(),
            sources=TokenSources(len(tokens)),
            timing=RequestTiming(now_ns, waiting_since_ns=now_ns),
        )
        sequence.chain.extend(tokens)
        sequence.port_chain.extend(tokens)
        self._num_tickets += 1
        scheduler.add(sequence)
        self._announce(sequence)

    def _announce(self, sequence: Sequence) -> None:
        """Announce a request to the port, so that the daemon knows what is coming."""
        hashes = sequence.port_chain.hashes
        if not hashes:
            return
        num_hit = self.pool.match(sequence.chain.hashes, len(sequence.chain.hashes))
        first = num_hit * self.settings.engine_block_tokens // self.settings.block_tokens
        if len(self._scheduler.sequences) == 1:
            first = len(hashes)  # a lone request starts now: its blocks are loaded, not prefetched
        self.port.announce(sequence.chain_below(), min(first, len(hashes)), sequence.traits)

    def abort(self, request_id: str) -> bool:
        """End a request at once; returns False if it is not in the engine."""
        sequence = self._scheduler.sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, FinishReason.ABORT)
        return True

    def fail_all(self, problem: str) -> None:
        """End every request with an error, after a failure outside of a batch."""
        for sequence in list(self._scheduler.sequences.values()):
            self._end(sequence, FinishReason.ERROR, error=problem)

    # Steps

    @property
    def num_waiting(self) -> int:
        """Return the number of requests waiting for admission; from any thread."""
        return self._scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do and nothing in flight in the tiers below."""
        return self._scheduler.is_idle

    def step(self, now_ns: int) -> bool:
        """Do what can be done now; returns False if only a request or port event can continue."""
        scheduler = self._scheduler
        moved = scheduler.poll(now_ns)
        moved |= scheduler.admit(now_ns)
        chunks = scheduler.plan(now_ns)
        is_stalled = not chunks and scheduler.sequences
        self._stalls.note(scheduler.loader.waits_for if is_stalled else "", now_ns)
        if not chunks:
            return moved
        start_ns = self._clock_ns()
        try:
            tokens = self._compute(chunks)
        except Exception as error:  # model code may raise anything: only its batch fails
            requests = [chunk.sequence.request_id for chunk in chunks]
            self._faults.exception("engine step failed", requests=" ".join(requests))
            for chunk in chunks:
                self._end(chunk.sequence, FinishReason.ERROR, error=f"engine step failed: {error}")
            return True
        took_ns = self._clock_ns() - start_ns
        sample = self._report(chunks, took_ns / 1e9)
        through = [chunk.sequence for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            scheduler.complete(chunk)
        for sequence, token in zip(through, tokens, strict=True):
            if sequence.phase is Phase.RUNNING:  # otherwise a receiver has ended it
                self._advance(sequence, token, now_ns + took_ns)
        self.port.note_steps((sample,), scheduler.load_before())
        return True

    @torch.inference_mode()
    def _compute(self, chunks: list[ScheduledChunk]) -> list[int]:
        """Run the model on a batch; returns a token for each sequence without tokens left."""
        token_ids: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        spans: list[Span] = []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed
            token_ids += sequence.tokens[start : start + chunk.num_tokens]
            positions += range(start, start + chunk.num_tokens)
            spans.append(Span(start, chunk.num_tokens, sequence.blocks))
            if chunk.is_last:
                ends.append(len(token_ids) - 1)
        device = self.pool.tensor.device
        output = self.loaded.model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            # Compute logits only where a token is chosen, but for at least one row.
            logits_to_keep=torch.tensor(ends or [0], device=device),
            batch=AttentionBatch(self.pool, spans),
        )
        through = [chunk.sequence for chunk in chunks if chunk.is_last]
        if not through:
            return []
        samplings = [sequence.request.sampling for sequence in through]
        return sample(output.logits[0], samplings, [sequence.generator for sequence in through])

    def _advance(self, sequence: Sequence, token: int, now_ns: int) -> None:
        """Append a token to a sequence, and end it if it is complete."""
        if not sequence.is_finished:
            self._finish(sequence, now_ns)
        sequence.append(token)
        self._num_generated += 1
        request = sequence.request
        is_end = token in self.loaded.eos_ids and not request.sampling.ignore_eos
        if is_end or token in request.stop_ids:
            self._end(sequence, FinishReason.STOP, token)
        elif (
            sequence.num_generated >= request.max_tokens
            or len(sequence.tokens) >= self.loaded.context_limit
        ):
            self._end(sequence, FinishReason.LENGTH, token)
        else:
            # The sources of the prompt are final now.
            usage = sequence.usage() if sequence.num_generated == 1 else None
            self._deliver(sequence, Output(request.request_id, (token,), usage=usage))

    def _finish(self, sequence: Sequence, first_token_ns: int | None = None) -> None:
        """Report the end of a prompt, and the outcome of its plan, to the port."""
        sequence.is_finished = True
        outcome = None
        if sequence.plan is not None and first_token_ns is not None:
            outcome = sequence.timing.outcome(
                sequence.plan.decision, sequence.sources.computed, first_token_ns
            )
        _log.debug(
            "prompt finished",
            request=sequence.request_id,
            decision=sequence.plan.decision if sequence.plan else "none",
            computed_tokens=sequence.sources.computed,
            ttft_s=outcome.ttft_s if outcome else "unknown",
        )
        self.port.finish(sequence.request_id, outcome)

    def _end(self, sequence: Sequence, finish: FinishReason, *tokens: int, error: str = "") -> None:
        self._scheduler.remove(sequence)
        if not sequence.is_finished:
            self._finish(sequence)
        for tier, count in sequence.sources.by_tier.items():
            self._by_tier[tier] += count
        self._computed += sequence.sources.computed
        output = Output(sequence.request_id, tokens, finish, sequence.usage(), error)
        self._deliver(sequence, output)

    def _deliver(self, sequence: Sequence, output: Output) -> None:
        try:
            sequence.deliver(output)
        except Exception:  # a faulty client must not stop the others
            self._faults.exception("output receiver failed", request=sequence.request_id)
            if output.finish is None:
                self._scheduler.remove(sequence)

    # Statistics

    def _report(self, chunks: list[ScheduledChunk], seconds: float) -> StepSample:
        """Record a step's duration, and each prompt's share of it."""
        num_decode = sum(chunk.is_decode for chunk in chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        attended, decode_past = 0.0, 0
        for chunk in chunks:
            num_new, num_past = chunk.num_tokens, chunk.sequence.num_computed
            if chunk.is_decode:
                decode_past += num_past
            else:
                attended += num_new * (num_past + num_new / 2)
                chunk.sequence.timing.compute_s += seconds * num_new / num_tokens
        self._num_steps += 1
        self._num_prefill += num_tokens - num_decode
        self._num_decode += num_decode
        sample = StepSample(num_tokens - num_decode, num_decode, attended, decode_past, seconds)
        self._reports.append(sample)
        return sample

    def take_reports(self) -> list[StepSample]:
        """Return the steps since the last call, at most the latest thousand."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def drop_cache(self) -> PoolDropped:
        """Empty the prefix cache; blocks still in use stay with their users, but are not found."""
        return self.pool.drop()

    def check(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._scheduler.check()

    def snapshot(self) -> EngineSnapshot:
        """Return the current counters and gauges."""
        scheduler = self._scheduler
        return EngineSnapshot(
            prompt_tokens_by_tier=dict(self._by_tier),
            computed_prompt_tokens=self._computed,
            num_prefill_tokens=self._num_prefill,
            num_decode_tokens=self._num_decode,
            num_generated_tokens=self._num_generated,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_stores_skipped=scheduler.offload.num_skipped,
            stall_seconds=self._stalls.seconds(),
            num_waiting=scheduler.num_waiting,
            num_loading=scheduler.count(Phase.LOOKING, Phase.LOADING),
            num_running=scheduler.count(Phase.RUNNING),
            pool_blocks=self.pool.counts(),
            block_bytes=self.pool.shape.block_bytes,
        )
