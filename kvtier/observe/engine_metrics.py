"""Definitions of an engine's metrics, by the rules in ``daemon_metrics``."""

from kvtier.core.residency import TierName
from kvtier.observe.daemon_metrics import READY, SECRET_REFUSED, TransferRoute
from kvtier.observe.metrics import (
    BUILD,
    REFUSED_SAMPLES,
    TRANSFER_BUCKETS,
    Counter,
    Gauge,
    Histogram,
    table_of,
)

__all__ = [
    "ATTACHED",
    "COPY_SECONDS",
    "DECODE_TOKENS",
    "ENGINE_METRICS",
    "GENERATED_TOKENS",
    "INTER_TOKEN_SECONDS",
    "POOL_BLOCKS",
    "POOL_BYTES",
    "PREEMPTIONS",
    "PREFILL_TOKENS",
    "PROMPT_TOKENS",
    "REQUESTS",
    "REQUESTS_LOADING",
    "REQUESTS_RUNNING",
    "REQUESTS_WAITING",
    "RESTORE_STALL_SECONDS",
    "SKIPPED_BLOCKS",
    "STEP_SECONDS",
    "TIME_TO_FIRST_TOKEN_SECONDS",
]

# From a cached prompt on a GPU (5 ms) to a long one on a CPU (a minute).
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# People read at about 20 ms per token; above half a second an answer looks stuck.
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)

_SOURCE = ("source", (*(tier.value for tier in TierName), "computed"))
_COPY = ("route", (TransferRoute.GPU_TO_CPU.value, TransferRoute.CPU_TO_GPU.value))
"""Transfers made by engines."""

PROMPT_TOKENS = Counter(
    "kvtier_prompt_tokens_total", "Prompt tokens, by the source of their KV.", (_SOURCE,)
)
GENERATED_TOKENS = Counter("kvtier_generated_tokens_total", "Generated tokens.")
PREFILL_TOKENS = Counter(
    "kvtier_prefill_tokens_total",
    "Prompt tokens computed, including those recomputed after a preemption.",
)
DECODE_TOKENS = Counter("kvtier_decode_tokens_total", "Tokens computed one at a time.")
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "kvtier_time_to_first_token_seconds",
    "Time from the arrival of a request to its first token, by the slowest source of its prompt's"
    " KV below the GPU; gpu if the GPU tier held all but the last tokens, computed if no tier "
    "helped.",
    (_SOURCE,),
    buckets=_FIRST_TOKEN_BUCKETS,
)
INTER_TOKEN_SECONDS = Histogram(
    "kvtier_inter_token_seconds",
    "Time between two tokens of an answer, by the source of its prompt's KV, as for "
    "kvtier_time_to_first_token_seconds.",
    (_SOURCE,),
    buckets=_STEP_BUCKETS,
)
STEP_SECONDS = Histogram("kvtier_step_seconds", "Time of one engine step.", buckets=_STEP_BUCKETS)
REQUESTS = Counter(
    "kvtier_requests_total",
    "Finished requests, by the outcome; refused requests never reached the engine.",
    (("outcome", ("stop", "length", "abort", "error", "refused")),),
)
PREEMPTIONS = Counter(
    "kvtier_preemptions_total",
    "Requests that lost their blocks to earlier ones and were restarted.",
)
RESTORE_STALL_SECONDS = Counter(
    "kvtier_restore_stall_seconds_total",
    "Time in which the engine had requests but computed nothing, because all of them waited for a"
    " load or, if there was none, for a lookup.",
    (("waits_for", ("load", "lookup")),),
)
COPY_SECONDS = Histogram(
    "kvtier_copy_seconds",
    "Time to copy one block between the engine's pool and the CPU tier.",
    (_COPY,),
    buckets=TRANSFER_BUCKETS,
)
SKIPPED_BLOCKS = Counter(
    "kvtier_skipped_blocks_total",
    "Full blocks that were not offered to the tiers, because too many stores were in progress.",
)
ATTACHED = Gauge("kvtier_attached", "1 while the engine has a session with a daemon.")
POOL_BLOCKS = Gauge(
    "kvtier_pool_blocks",
    "Blocks of the engine's pool: used by a request or a transfer, cached, or free.",
    (("state", ("used", "cached", "free")),),
)
POOL_BYTES = Gauge(
    "kvtier_pool_bytes",
    "Bytes of the engine's pool, by the state of the block.",
    POOL_BLOCKS.labels,
)
REQUESTS_WAITING = Gauge("kvtier_requests_waiting", "Requests that have not started.")
REQUESTS_RUNNING = Gauge("kvtier_requests_running", "Requests being computed.")
REQUESTS_LOADING = Gauge("kvtier_requests_loading", "Requests whose blocks are being loaded.")

ENGINE_METRICS = table_of(vars(), SECRET_REFUSED, BUILD, READY, REFUSED_SAMPLES)
"""All metrics that an engine exposes."""
