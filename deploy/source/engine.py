"""kvtier's own engines, and vLLM."""

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
    "What users feel",
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
            description="Requests a second.",
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
            description="Of an answer.",
            queries=_percentiles(INTER_TOKEN_SECONDS),
            unit="s",
        ),
        Panel(
            title="Time between tokens, P95 by source",
            description="By where the prompt came from. All should be alike: a restore must not "
            "slow those who are being answered.",
            queries=(
                Query(BOARD.quantile(0.95, INTER_TOKEN_SECONDS, "by (le, source)"), "{{source}}"),
            ),
            unit="s",
        ),
        Panel(
            title="Requests that ended",
            description="By how; refused ones never reached the engine.",
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
            description="What each tier supplied first, and what had to be computed.",
            queries=(Query(f"sum by (source) ({BOARD.rate(PROMPT_TOKENS)})", "{{source}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
        ),
        Panel(
            title="Prefix cache hit rate",
            description="Share of prompt tokens that were not computed, the GPU's own cache "
            "included.",
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
            title="Computed and answered",
            description="prefill: computed as part of a prompt, again after a preemption too; "
            "decode: one at a time; generated: of answers.",
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
    "What the cache costs an engine",
    (
        Panel(
            title="Standing still",
            description="Share of time with requests and nothing computed, since all waited for "
            "their blocks, or to hear whether there are any. A sum over engines.",
            queries=(
                Query(f"sum by (waits_for) ({BOARD.rate(RESTORE_STALL_SECONDS)})", "{{waits_for}}"),
            ),
            unit="percentunit",
            kind=Kind.STACK,
            thresholds=((0.1, "red"),),
            alert="KvtierRestoreStall",
        ),
        Panel(
            title="Copying a block",
            description="Between the pool and the CPU tier, P95.",
            queries=(Query(BOARD.quantile(0.95, COPY_SECONDS, "by (le, route)"), "{{route}}"),),
            unit="s",
        ),
        Panel(
            title="Blocks skipped, and engines without a daemon",
            description="Full blocks that were not offered because too many stores were open, each"
            " second, and engines that compute everything.",
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
            title="Requests now",
            description="loading: their blocks are on their way.",
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
            description="used: by a request or a transfer; cached: found again without any tier.",
            queries=(Query(f"sum by (state) ({BOARD.series(POOL_BYTES)})", "{{state}}"),),
            unit="bytes",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Time of a step",
            description="Prefill and decode together.",
            queries=_percentiles(STEP_SECONDS),
            unit="s",
            span=6,
        ),
        Panel(
            title="Preemptions, and engines ready",
            description="Requests that lost their blocks and began again, in each second: the pool "
            "is too small for what runs at once.",
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
            description="From the arrival of a request to its first token. vLLM does not tell it by"
            " source.",
            queries=_percentiles(vllm.TIME_TO_FIRST_TOKEN_SECONDS),
            unit="s",
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="vLLM: prompt tokens by source",
            description="gpu: its own cache; what kvtier promised, by tier; what was computed.",
            queries=(Query(f"sum by (source) ({vllm.prompt_tokens(BOARD)})", "{{source}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
        ),
        Panel(
            title="vLLM: hit rate",
            description="all: share of prompt tokens that were not computed; kvtier: the same of "
            "those that vLLM's own cache lacked.",
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
            description="hit; miss, nothing is there or it would not pay; failed, no answer came "
            "in time; empty, the daemon has nothing of this model and was not asked.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(vllm.LOOKUPS)})", "{{outcome}}"),),
            unit="reqps",
            kind=Kind.STACK,
            alert="KvtierVllmLookupsFail",
        ),
        Panel(
            title="vLLM: time of a lookup",
            description="With bringing blocks up to the CPU tier; other requests are computed "
            "meanwhile.",
            queries=_percentiles(vllm.LOOKUP_SECONDS),
            unit="s",
            alert="KvtierVllmLookupsFail",
        ),
        Panel(
            title="vLLM: blocks offered, and missing",
            description="Offered: kept; refused, it would not pay or there was no room; failed, no "
            "answer came in time. Missing: promised, and did not come. Each worker counts its own.",
            queries=(
                Query(f"sum by (outcome) ({BOARD.rate(vllm.STORE_BLOCKS)})", "{{outcome}}"),
                Query(f"sum({BOARD.rate(vllm.MISSING_BLOCKS)})", "missing"),
            ),
            unit="short",
            alert="KvtierVllmBlocksMissing",
        ),
        Panel(
            title="vLLM: copying a request's blocks",
            description="P95 of what a worker takes, between vLLM's KV cache and the CPU tier.",
            queries=(
                Query(BOARD.quantile(0.95, vllm.LOAD_SECONDS, "by (le)"), "load"),
                Query(BOARD.quantile(0.95, vllm.STORE_SECONDS, "by (le)"), "store"),
            ),
            unit="s",
        ),
        Panel(
            title="vLLM: bytes loaded, and staged",
            description="From the CPU tier into vLLM's KV cache; staged: copied once more, since "
            "the device does not know the memory. What it stores: see *Tiers*.",
            queries=(
                Query(f"sum({BOARD.rate(vllm.LOAD_BYTES)})", "loaded"),
                Query(f"sum({BOARD.rate(vllm.STAGED_BYTES)})", "staged"),
            ),
            unit="Bps",
        ),
        Panel(
            title="vLLM: with a daemon, and without",
            description="Attached, as of its last step; and those that answer and are not.",
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
    "kvtier's own engines, and vLLM: what users feel, and what the cache does for it.",
    (_USERS, _TOKENS, _CACHE, _LOAD, _VLLM),
)
"""For whoever runs the engines."""
