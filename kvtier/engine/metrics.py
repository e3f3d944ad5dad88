"""The engine's Prometheus metrics."""

from prometheus_client import CollectorRegistry

from kvtier.core.plan import StepSample
from kvtier.core.residency import TierName
from kvtier.engine.engine import EngineSnapshot
from kvtier.engine.request import Usage
from kvtier.observe.daemon_metrics import (
    READY,
    TransferRoute,
)
from kvtier.observe.engine_metrics import (
    ATTACHED,
    COPY_SECONDS,
    DECODE_TOKENS,
    ENGINE_METRICS,
    GENERATED_TOKENS,
    INTER_TOKEN_SECONDS,
    POOL_BLOCKS,
    POOL_BYTES,
    PREEMPTIONS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    REQUESTS_LOADING,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    RESTORE_STALL_SECONDS,
    SKIPPED_BLOCKS,
    STEP_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)
from kvtier.observe.metrics import Metrics

__all__ = ["EngineMetrics"]


class EngineMetrics:
    """Counts requests as the HTTP server sees them, and exports the engine's snapshots.

    An ``Observer`` of the HTTP server; ``update`` must be called from one thread.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.metrics = Metrics(ENGINE_METRICS, registry)
        self._last: EngineSnapshot | None = None

    def first_token(self, seconds: float, usage: Usage) -> None:
        """Record the time to first token, by the slowest source of the prompt's KV."""
        self.metrics.observe(TIME_TO_FIRST_TOKEN_SECONDS, seconds, source=_slowest_source(usage))

    def token_gap(self, seconds: float, usage: Usage) -> None:
        """Record the time between two tokens, by the slowest source of the prompt's KV."""
        self.metrics.observe(INTER_TOKEN_SECONDS, seconds, source=_slowest_source(usage))

    def finished(self, outcome: str) -> None:
        """Count the end of a request."""
        self.metrics.add(REQUESTS, outcome=outcome)

    def copied(self, route: TransferRoute, seconds: float) -> None:
        """Record the copy of one block."""
        self.metrics.observe(COPY_SECONDS, seconds, route=route)

    def update(
        self,
        snapshot: EngineSnapshot,
        steps: list[StepSample],
        *,
        is_ready: bool,
        is_attached: bool,
    ) -> None:
        """Update gauges and counters from a snapshot, and record the steps since the last one."""
        metrics, last = self.metrics, self._last
        for tier in TierName:
            before = last.prompt_tokens_by_tier.get(tier, 0) if last else 0
            tokens = snapshot.prompt_tokens_by_tier.get(tier, 0)
            metrics.add(PROMPT_TOKENS, tokens - before, source=tier)
        computed = snapshot.computed_prompt_tokens
        before = last.computed_prompt_tokens if last else 0
        metrics.add(PROMPT_TOKENS, computed - before, source="computed")
        for counter, name in (
            (PREFILL_TOKENS, "num_prefill_tokens"),
            (DECODE_TOKENS, "num_decode_tokens"),
            (GENERATED_TOKENS, "num_generated_tokens"),
            (PREEMPTIONS, "num_preemptions"),
            (SKIPPED_BLOCKS, "num_stores_skipped"),
        ):
            before = getattr(last, name) if last else 0
            metrics.add(counter, getattr(snapshot, name) - before)
        for waited, seconds in snapshot.stall_seconds.items():
            before_s = last.stall_seconds.get(waited, 0.0) if last else 0.0
            metrics.add(RESTORE_STALL_SECONDS, seconds - before_s, waits_for=waited)
        for step in steps:
            metrics.observe(STEP_SECONDS, step.seconds)
        metrics.set(REQUESTS_WAITING, snapshot.num_waiting)
        metrics.set(REQUESTS_LOADING, snapshot.num_loading)
        metrics.set(REQUESTS_RUNNING, snapshot.num_running)
        for state in dict(POOL_BLOCKS.labels)["state"]:
            num_blocks = getattr(snapshot.pool_blocks, state)
            metrics.set(POOL_BLOCKS, num_blocks, state=state)
            metrics.set(POOL_BYTES, num_blocks * snapshot.block_bytes, state=state)
        metrics.set(READY, is_ready)
        metrics.set(ATTACHED, is_attached)
        self._last = snapshot


def _slowest_source(usage: Usage) -> str:
    """Return the slowest tier below the GPU that served a prompt, else gpu, else computed."""
    served = [tier for tier in TierName if usage.tier_tokens[tier]]
    return served[-1] if served else "computed"
