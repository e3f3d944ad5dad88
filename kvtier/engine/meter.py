"""What an engine tells Prometheus."""

from prometheus_client import CollectorRegistry

from kvtier.core.cost.sample import StepSample
from kvtier.core.residency import TierName
from kvtier.engine.engine import EngineSnapshot
from kvtier.engine.request import Usage
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import (
    DECODE_TOKENS,
    ENGINE_METRICS,
    GENERATED_TOKENS,
    INTER_TOKEN_SECONDS,
    POOL_BLOCKS,
    PREEMPTIONS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    READY,
    REQUESTS,
    REQUESTS_LOADING,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    STEP_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)

__all__ = ["EngineMeter"]


class EngineMeter:
    """Counts requests as the HTTP server sees them, and what the engine's snapshots say.

    An ``Observer`` of the HTTP server; ``update`` belongs to one thread.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.metrics = Metrics(ENGINE_METRICS, registry)
        self._last: EngineSnapshot | None = None

    def first_token(self, seconds: float, usage: Usage) -> None:
        """Note the time to first token, by the slowest source of the prompt's KV."""
        self.metrics.observe(TIME_TO_FIRST_TOKEN_SECONDS, seconds, source=_slowest_source(usage))

    def token_gap(self, seconds: float) -> None:
        """Note the time between two tokens."""
        self.metrics.observe(INTER_TOKEN_SECONDS, seconds)

    def finished(self, outcome: str) -> None:
        """Note the end of a request."""
        self.metrics.add(REQUESTS, outcome=outcome)

    def update(self, snapshot: EngineSnapshot, steps: list[StepSample], *, is_ready: bool) -> None:
        """Bring gauges and counters up to a snapshot, and note the steps since the last one."""
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
        ):
            before = getattr(last, name) if last else 0
            metrics.add(counter, getattr(snapshot, name) - before)
        for step in steps:
            metrics.observe(STEP_SECONDS, step.seconds)
        metrics.set(REQUESTS_WAITING, snapshot.num_waiting)
        metrics.set(REQUESTS_LOADING, snapshot.num_loading)
        metrics.set(REQUESTS_RUNNING, snapshot.num_running)
        metrics.set(POOL_BLOCKS, snapshot.pool_blocks.used, state="used")
        metrics.set(POOL_BLOCKS, snapshot.pool_blocks.cached, state="cached")
        metrics.set(POOL_BLOCKS, snapshot.pool_blocks.free, state="free")
        metrics.set(READY, is_ready)
        self._last = snapshot


def _slowest_source(usage: Usage) -> str:
    """Return the slowest tier below the GPU that served a prompt, else gpu, else computed."""
    tokens = usage.tier_tokens
    for tier in (TierName.REMOTE, TierName.SSD, TierName.CPU, TierName.GPU):
        if getattr(tokens, tier):
            return tier
    return "computed"
