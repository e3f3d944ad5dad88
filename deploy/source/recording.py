"""The recording rules: the names that operators know from the field, made from kvtier's rows.

Rules
-----
* Named ``level:metric:operation``. The level is which labels stay beside those of the target, which
  ``instance`` stands for.
* ``without`` and not ``by``, so that the labels that a cluster adds stay.
* What a ratio was made of is recorded too: an average over nodes divides sums, not ratios.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.source.query import RULE, ratio
from kvtier.observe.metric import Histogram
from kvtier.observe.table import (
    ASKED_TOKENS,
    COPY_SECONDS,
    EVICTED_BLOCKS,
    FOUND_TOKENS,
    LOST_SECONDS,
    PROMPT_TOKENS,
    RESTORE_STALL_SECONDS,
    SAVED_SECONDS,
    TIER_USED_BYTES,
    TIME_TO_FIRST_TOKEN_SECONDS,
    TRANSFER_SECONDS,
)

__all__ = ["FIRST_TOKEN_OF_ALL", "FOUND_SHARE", "RECORDINGS", "Recording"]


@dataclass(frozen=True, slots=True)
class Recording:
    """One rule, and what operators call what it records."""

    record: str
    known_as: str
    expr: str


def _tokens() -> Iterator[Recording]:
    hit = RULE.rate(PROMPT_TOKENS, source=("gpu", "cpu", "ssd", "remote"))
    miss = RULE.rate(PROMPT_TOKENS, source="computed")
    prefix = "instance:kvtier_prefix_cache"
    yield Recording(f"{prefix}_hit_tokens:rate5m", "hit tokens", f"sum without (source) ({hit})")
    yield Recording(f"{prefix}_miss_tokens:rate5m", "miss tokens", f"sum without (source) ({miss})")
    yield Recording(
        f"{prefix}_hit:ratio_rate5m",
        "prefix cache hit rate",
        ratio(
            f"sum without (source) ({hit})", f"sum without (source) ({RULE.rate(PROMPT_TOKENS)})"
        ),
    )


def _times(
    record: str, known_as: str, keep: str, *where: tuple[Histogram, Mapping[str, tuple[str, ...]]]
) -> Iterator[Recording]:
    """Yield average, P95 and P99 of histograms that have no series in common."""
    averages = [RULE.mean(metric, keep, **labels) for metric, labels in where]
    yield Recording(f"{record}:avg_rate5m", f"{known_as}, average", "\nor\n".join(averages))
    for percent in (95, 99):
        exprs = [RULE.quantile(percent / 100, metric, keep, **labels) for metric, labels in where]
        yield Recording(
            f"{record}:p{percent}_rate5m", f"{known_as}, P{percent}", "\nor\n".join(exprs)
        )


_SAVED = f"sum without (tier) ({RULE.rate(SAVED_SECONDS)})"
_LOST = f"sum without (tier) ({RULE.rate(LOST_SECONDS)})"
_LONG = RULE.over("15m")

FOUND_SHARE = Recording(
    "instance:kvtier_found_tokens:ratio_rate15m",
    "hit rate of the tiers below the GPU",
    ratio(f"sum without (tier) ({_LONG.rate(FOUND_TOKENS)})", _LONG.rate(ASKED_TOKENS)),
)
"""By daemon, for engines of every kind."""

_OF_ALL = '{{__name__=~"(kvtier_|vllm:)time_to_first_token_seconds_{part}"}}[15m]'

FIRST_TOKEN_OF_ALL = Recording(
    "fleet:time_to_first_token_seconds:avg_rate15m",
    "TTFT of all engines, kvtier's own and vLLM's",
    ratio(*(f"sum(rate({_OF_ALL.format(part=part)}))" for part in ("sum", "count"))),
)
"""What users feel; daemon and engine are different targets, so it is not told by node."""

RECORDINGS: Sequence[Recording] = (
    *_tokens(),
    FOUND_SHARE,
    *_times(
        "instance:kvtier_time_to_first_token_seconds",
        "TTFT",
        "without (source)",
        (TIME_TO_FIRST_TOKEN_SECONDS, {}),
    ),
    FIRST_TOKEN_OF_ALL,
    Recording(
        "instance:kvtier_gpu_kv_bytes:sum",
        "GPU KV bytes",
        f"sum without (tier) ({RULE.series(TIER_USED_BYTES, tier='gpu')})",
    ),
    Recording(
        "instance:kvtier_cpu_kv_bytes:sum",
        "CPU KV bytes",
        f"sum without (tier) ({RULE.series(TIER_USED_BYTES, tier='cpu')})",
    ),
    *_times(
        "instance_route:kvtier_offload_read_seconds",
        "offload read latency",
        "without ()",
        (COPY_SECONDS, {"route": ("cpu_to_gpu",)}),
        (TRANSFER_SECONDS, {"route": ("ssd_to_cpu", "remote_to_cpu")}),
    ),
    *_times(
        "instance_route:kvtier_offload_write_seconds",
        "offload write latency",
        "without ()",
        (COPY_SECONDS, {"route": ("gpu_to_cpu",)}),
        (TRANSFER_SECONDS, {"route": ("cpu_to_ssd", "cpu_to_remote")}),
    ),
    Recording(
        "instance_tier:kvtier_evicted_blocks:increase5m",
        "eviction count",
        f"sum without (reason) ({RULE.increase(EVICTED_BLOCKS)})",
    ),
    Recording(
        "instance:kvtier_restore_stall_seconds:rate5m",
        "GPU stall due to KV restore, share of time",
        f"sum without (waits_for) ({RULE.rate(RESTORE_STALL_SECONDS)})",
    ),
    Recording(
        "instance:kvtier_saved_seconds:rate5m",
        "time to first token saved, net, seconds a second",
        f"{_SAVED}\n-\n{_LOST}",
    ),
)
"""In the order of the page that lists them."""
