"""The engine dashboard: kvtier's own engines and vLLM."""

from deploy.source import vllm
from deploy.source.board import Board, Kind, Panel, Query, Section
from deploy.source.query import BOARD, ratio
from kvtier.observe.daemon_metrics import (
    READY,
)
from kvtier.observe.engine_metrics import (
    ATTACHED,
    COPY_SECONDS,
    DECODE_TOKENS,
    GENERATED_TOKENS,
    INTER_TOKEN_SECONDS,
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
from kvtier.observe.metrics import Histogram

__all__ = ["ENGINE"]

_CACHED = ("gpu", "cpu", "ssd", "remote")


def _percentiles(metric: Histogram) -> tuple[Query, ...]:
    return tuple(
        Query(BOARD.quantile(share, metric, "by (le)"), f"P{share * 100:.0f}")
        for share in (0.5, 0.95, 0.99)
    )


_USERS = Section(
    "Latency",
    (
        Panel(
            title="Time to first token",
            description="From the arrival of a request to its first token.",
            queries=_percentiles(TIME_TO_FIRST_TOKEN_SECONDS),
            unit="s",
        ),
        Panel(
            title="Time to first token, by source",
            description="Mean, by the slowest source of the prompt's KV below the GPU.",
            queries=(Query(BOARD.mean(TIME_TO_FIRST_TOKEN_SECONDS, "by (source)"), "{{source}}"),),
            unit="s",
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="First tokens, by source",
            description="Requests per second.",
            queries=(
                Query(
                    f"sum by (source) ({BOARD.rate(TIME_TO_FIRST_TOKEN_SECONDS, 'count')})",
                    "{{source}}",
                ),
            ),
            unit="reqps",
            kind=Kind.STACK,
        ),
        Panel(
            title="Time between tokens",
            description="Time between tokens of an answer.",
            queries=_percentiles(INTER_TOKEN_SECONDS),
            unit="s",
        ),
        Panel(
            title="Time between tokens by source, P95",
            description="By source of the prompt's KV. All should be similar: restores must not "
            "slow down requests that are decoding.",
            queries=(
                Query(BOARD.quantile(0.95, INTER_TOKEN_SECONDS, "by (le, source)"), "{{source}}"),
            ),
            unit="s",
        ),
        Panel(
            title="Finished requests",
            description="By outcome; refused requests never reached the engine.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(REQUESTS)})", "{{outcome}}"),),
            unit="reqps",
            kind=Kind.STACK,
        ),
    ),
)

_TOKENS = Section(
    "Tokens",
    (
        Panel(
            title="Prompt tokens by source",
            description="Tokens by the tier that supplied them, and tokens computed.",
            queries=(Query(f"sum by (source) ({BOARD.rate(PROMPT_TOKENS)})", "{{source}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
        ),
        Panel(
            title="Prefix cache hit rate",
            description="Share of prompt tokens that were not computed, including hits in the GPU "
            "tier.",
            queries=(
                Query(
                    ratio(
                        f"sum({BOARD.rate(PROMPT_TOKENS, source=_CACHED)})",
                        f"sum({BOARD.rate(PROMPT_TOKENS)})",
                    ),
                    "hit rate",
                ),
            ),
            unit="percentunit",
            max=1,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="Tokens computed and generated",
            description="prefill: prompt tokens, including recomputation after a preemption; "
            "decode: computed one at a time; generated: tokens of answers.",
            queries=(
                Query(f"sum({BOARD.rate(PREFILL_TOKENS)})", "prefill"),
                Query(f"sum({BOARD.rate(DECODE_TOKENS)})", "decode"),
                Query(f"sum({BOARD.rate(GENERATED_TOKENS)})", "generated"),
            ),
            unit="si:tok/s",
        ),
    ),
)

_CACHE = Section(
    "Cost of the cache",
    (
        Panel(
            title="Stalls",
            description="Share of time with requests but nothing computed, because all waited for "
            "blocks or for a lookup. Sum over engines.",
            queries=(
                Query(f"sum by (waits_for) ({BOARD.rate(RESTORE_STALL_SECONDS)})", "{{waits_for}}"),
            ),
            unit="percentunit",
            kind=Kind.STACK,
            thresholds=((0.1, "red"),),
            alert="KvtierRestoreStall",
        ),
        Panel(
            title="Copy time of a block, P95",
            description="Between the pool and the CPU tier.",
            queries=(Query(BOARD.quantile(0.95, COPY_SECONDS, "by (le, route)"), "{{route}}"),),
            unit="s",
        ),
        Panel(
            title="Skipped blocks, and engines without a daemon",
            description="Full blocks per second that were not offered because too many stores were "
            "open, and engines that compute everything.",
            queries=(
                Query(f"sum({BOARD.rate(SKIPPED_BLOCKS)})", "blocks skipped"),
                Query(f"sum(1 - {BOARD.series(ATTACHED)})", "without a daemon"),
            ),
            unit="short",
            alert="KvtierEngineDetached",
        ),
    ),
)

_LOAD = Section(
    "Load",
    (
        Panel(
            title="Requests in progress",
            description="loading: waiting for blocks.",
            queries=(
                Query(f"sum({BOARD.series(REQUESTS_RUNNING)})", "running"),
                Query(f"sum({BOARD.series(REQUESTS_LOADING)})", "loading"),
                Query(f"sum({BOARD.series(REQUESTS_WAITING)})", "waiting"),
            ),
            unit="short",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="KV pool",
            description="used: by a request or transfer; cached: can be reused without another "
            "tier.",
            queries=(Query(f"sum by (state) ({BOARD.series(POOL_BYTES)})", "{{state}}"),),
            unit="bytes",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Step time",
            description="Prefill and decode in one step.",
            queries=_percentiles(STEP_SECONDS),
            unit="s",
            span=6,
        ),
        Panel(
            title="Preemptions, and ready engines",
            description="Requests per second that lost their blocks and started again: the pool is "
            "too small for the concurrent requests.",
            queries=(
                Query(f"sum({BOARD.rate(PREEMPTIONS)})", "preemptions"),
                Query(f"sum({BOARD.series(READY)} and {BOARD.series(REQUESTS_RUNNING)})", "ready"),
            ),
            unit="short",
            span=6,
            alert="KvtierNotReady",
        ),
    ),
)

_WITHOUT = (
    f"(1 - {BOARD.series(vllm.ATTACHED)})"
    f" and on (job, instance, engine) {BOARD.increase(vllm.GENERATED_TOKENS)} > 0"
)
_COMPUTED, _EXTERNAL = (
    f"sum({BOARD.rate(vllm.PROMPT_TOKENS, source=source)})"
    for source in ("local_compute", "external_kv_transfer")
)

_VLLM = Section(
    "vLLM",
    (
        Panel(
            title="vLLM: time to first token",
            description="From the arrival of a request to its first token. vLLM does not report it "
            "by source.",
            queries=_percentiles(vllm.TIME_TO_FIRST_TOKEN_SECONDS),
            unit="s",
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="vLLM: prompt tokens by source",
            description="gpu: vLLM's own cache; tokens promised by kvtier, by tier; tokens "
            "computed.",
            queries=(Query(f"sum by (source) ({vllm.prompt_tokens(BOARD)})", "{{source}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
        ),
        Panel(
            title="vLLM: hit rate",
            description="all: share of prompt tokens that were not computed; kvtier: the same for "
            "tokens missing in vLLM's own cache.",
            queries=(
                Query(f"1 - {ratio(_COMPUTED, f'sum({BOARD.rate(vllm.PROMPT_TOKENS)})')}", "all"),
                Query(ratio(_EXTERNAL, f"({_EXTERNAL} + {_COMPUTED})"), "kvtier"),
            ),
            unit="percentunit",
            max=1,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="vLLM: lookups",
            description="hit; miss: nothing found, or not worth restoring; failed: no answer in "
            "time; empty: the daemon has nothing of this model and was not asked.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(vllm.LOOKUPS)})", "{{outcome}}"),),
            unit="reqps",
            kind=Kind.STACK,
            alert="KvtierVllmLookupsFail",
        ),
        Panel(
            title="vLLM: lookup time",
            description="Includes promotion of blocks to the CPU tier; other requests are computed "
            "meanwhile.",
            queries=_percentiles(vllm.LOOKUP_SECONDS),
            unit="s",
            alert="KvtierVllmLookupsFail",
        ),
        Panel(
            title="vLLM: offered and missing blocks",
            description="Offered: kept; refused: not worth keeping, or no room; failed: no answer "
            "in time. Missing: promised but not arrived. Each worker counts its own.",
            queries=(
                Query(f"sum by (outcome) ({BOARD.rate(vllm.STORE_BLOCKS)})", "{{outcome}}"),
                Query(f"sum({BOARD.rate(vllm.MISSING_BLOCKS)})", "missing"),
            ),
            unit="short",
            alert="KvtierVllmBlocksMissing",
        ),
        Panel(
            title="vLLM: copy time of a request's blocks, P95",
            description="Between vLLM's KV cache and the CPU tier, per worker.",
            queries=(
                Query(BOARD.quantile(0.95, vllm.LOAD_SECONDS, "by (le)"), "load"),
                Query(BOARD.quantile(0.95, vllm.STORE_SECONDS, "by (le)"), "store"),
            ),
            unit="s",
        ),
        Panel(
            title="vLLM: bytes loaded and staged",
            description="Copied from the CPU tier into vLLM's KV cache; staged: with an extra "
            "copy, because the memory is not registered with the device. For stores see *Tiers*.",
            queries=(
                Query(f"sum({BOARD.rate(vllm.LOAD_BYTES)})", "loaded"),
                Query(f"sum({BOARD.rate(vllm.STAGED_BYTES)})", "staged"),
            ),
            unit="Bps",
        ),
        Panel(
            title="vLLM: with and without a daemon",
            description="Attached as of the last step; and serving requests without a daemon.",
            queries=(
                Query(f"sum({BOARD.series(vllm.ATTACHED)})", "attached"),
                Query(f"sum({_WITHOUT})", "without a daemon"),
            ),
            unit="short",
            alert="KvtierVllmDetached",
        ),
    ),
)

ENGINE = Board(
    "engine",
    "kvtier / Engine",
    "kvtier's own engines and vLLM: latency, tokens, and the cost of the cache.",
    (_USERS, _TOKENS, _CACHE, _LOAD, _VLLM),
)
"""For administrators of the engines."""
