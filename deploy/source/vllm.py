"""Metrics of vLLM that the dashboards use, and all metrics that kvtier's connector adds.

A test compares them with recorded metrics of a real server; tests with real vLLM servers show where
a release has another name.
"""

from collections.abc import Sequence

from deploy.source.query import WITH_KVTIER, Scope, labelled
from kvtier.connectors.vllm import stats
from kvtier.connectors.vllm.stats import Row, StatKind
from kvtier.observe.metrics import Counter, Gauge, Histogram, Metric

__all__ = [
    "ATTACHED",
    "GENERATED_TOKENS",
    "HIT_TOKENS",
    "LOAD_BYTES",
    "LOAD_SECONDS",
    "LOOKUPS",
    "LOOKUP_SECONDS",
    "MISSING_BLOCKS",
    "PROMPT_TOKENS",
    "REQUESTS_RUNNING",
    "REQUESTS_WAITING",
    "ROWS",
    "STAGED_BYTES",
    "STORE_BLOCKS",
    "STORE_SECONDS",
    "TIME_TO_FIRST_TOKEN_SECONDS",
    "prompt_tokens",
    "stands_still",
]


def _labels(row: Row, kind: StatKind) -> tuple[tuple[str, tuple[str, ...]], ...]:
    assert row.kind is kind, f"{row.name} is a {row.kind}"
    return ((row.label, tuple(row.values)),) if row.label else ()


def _counter(row: Row) -> Counter:
    return Counter(f"{row.name}_total", row.text, _labels(row, StatKind.COUNTER))


def _gauge(row: Row) -> Gauge:
    return Gauge(row.name, row.text, _labels(row, StatKind.GAUGE))


def _histogram(row: Row) -> Histogram:
    labels = _labels(row, StatKind.HISTOGRAM)
    return Histogram(row.name, row.text, labels, buckets=tuple(row.buckets))


ATTACHED = _gauge(stats.ATTACHED)
HIT_TOKENS = _counter(stats.HIT_TOKENS)
LOOKUPS = _counter(stats.LOOKUPS)
LOOKUP_SECONDS = _histogram(stats.LOOKUP_SECONDS)
LOAD_BYTES = _counter(stats.LOAD_BYTES)
LOAD_SECONDS = _histogram(stats.LOAD_SECONDS)
STAGED_BYTES = _counter(stats.STAGED_BYTES)
MISSING_BLOCKS = _counter(stats.MISSING_BLOCKS)
STORE_BLOCKS = _counter(stats.STORE_BLOCKS)
STORE_SECONDS = _histogram(stats.STORE_SECONDS)

PROMPT_TOKENS = Counter(
    "vllm:prompt_tokens_by_source_total",
    "Prompt tokens, each once, by what supplied their KV.",
    (("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),),
)
GENERATED_TOKENS = Counter("vllm:generation_tokens_total", "Tokens of answers.")
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=()
)
REQUESTS_RUNNING = Gauge("vllm:num_requests_running", "Requests being computed.")
REQUESTS_WAITING = Gauge(
    "vllm:num_requests_waiting_by_reason",
    "Requests that wait: for room, or (deferred) for blocks or the answer to a lookup.",
    (("reason", ("capacity", "deferred")),),
)

ROWS: Sequence[Metric] = (
    ATTACHED,
    HIT_TOKENS,
    LOOKUPS,
    LOOKUP_SECONDS,
    LOAD_BYTES,
    LOAD_SECONDS,
    STAGED_BYTES,
    MISSING_BLOCKS,
    STORE_BLOCKS,
    STORE_SECONDS,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    TIME_TO_FIRST_TOKEN_SECONDS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
)
"""The connector's metrics first."""


def prompt_tokens(scope: Scope) -> str:
    """Return the rates of prompt tokens with the ``source`` label of kvtier's own engines.

    Tokens from below the GPU are counted by tier when they are ordered; those that do not arrive
    are also in ``computed``.
    """
    own = {"computed": "local_compute", "gpu": "local_cache_hit"}
    rates = [
        labelled(scope.rate(PROMPT_TOKENS, source=theirs), "source", ours)
        for ours, theirs in own.items()
    ]
    rates.append(labelled(scope.rate(HIT_TOKENS), "source", "$1", "tier"))
    return "\nor ".join(rates)


def stands_still(scope: Scope) -> str:
    """Return the share of samples in which all requests of an engine waited for blocks.

    vLLM does not count this time. Requests that wait for an adapter or a grammar look the same.
    """
    waits = f"({scope.series(REQUESTS_WAITING, reason='deferred')} > bool 0)"
    is_idle = f"({scope.series(REQUESTS_RUNNING)} == bool 0)"
    looks = f"{waits} * ignoring (reason) {is_idle} {WITH_KVTIER}"
    return f"avg_over_time(({looks})[{scope.window}:5s])"
