"""Recording rules: common metrics under common names, from the metrics of all engines.

Theory
------
kvtier's own engines and vLLM use different metrics for the same thing. No target has both, so
``or`` of the two has one series per target; for several engines in one vLLM it is the sum.

Rules
-----
* Names are ``level:metric:operation``. The level lists the labels that are kept; ``instance``
  stands for those of the target.
* ``without`` instead of ``by`` keeps the labels that a cluster adds.
* The parts of each ratio are recorded too: an average over nodes divides sums, not ratios.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.source import vllm
from deploy.source.query import RULE, labelled, ratio
from kvtier.observe.daemon_metrics import (
    ASKED_TOKENS,
    EVICTED_BLOCKS,
    FOUND_TOKENS,
    LOST_SECONDS,
    SAVED_SECONDS,
    TIER_USED_BYTES,
    TRANSFER_SECONDS,
)
from kvtier.observe.engine_metrics import (
    COPY_SECONDS,
    PROMPT_TOKENS,
    RESTORE_STALL_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)
from kvtier.observe.metrics import Histogram

__all__ = ["FIRST_TOKEN_OF_ALL", "FOUND_SHARE", "RECORDINGS", "Recording"]


@dataclass(frozen=True, slots=True)
class Recording:
    """One rule, and the common name of what it records."""

    record: str
    known_as: str
    expr: str


@dataclass(frozen=True, slots=True)
class _Time:
    """A histogram, its labels to keep, and the ``route`` for one that has no such label."""

    metric: Histogram
    keep: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    route: str = ""

    def mean(self) -> str:
        return self._labelled(RULE.mean(self.metric, self.keep, **self.labels))

    def quantile(self, share: float) -> str:
        return self._labelled(RULE.quantile(share, self.metric, self.keep, **self.labels))

    def _labelled(self, expr: str) -> str:
        return labelled(expr, "route", self.route) if self.route else expr


def _either(*exprs: str) -> str:
    return "\nor\n".join(exprs)


def _tokens() -> Iterator[Recording]:
    """Yield the rules of cached tokens, computed tokens, and the share of cached tokens."""
    cached, cached_in_vllm = (
        ("gpu", "cpu", "ssd", "remote"),
        ("local_cache_hit", "external_kv_transfer"),
    )
    hits, misses, shares = [], [], []
    for metric, over, found, computed in (
        (PROMPT_TOKENS, "source", cached, "computed"),
        (vllm.PROMPT_TOKENS, "source, engine", cached_in_vllm, "local_compute"),
    ):
        hit, miss = (
            f"sum without ({over}) ({RULE.rate(metric, source=source)})"
            for source in (found, computed)
        )
        hits.append(hit)
        misses.append(miss)
        shares.append(ratio(hit, f"sum without ({over}) ({RULE.rate(metric)})"))
    prefix = "instance:kvtier_prefix_cache"
    yield Recording(f"{prefix}_hit_tokens:rate5m", "hit tokens", _either(*hits))
    yield Recording(f"{prefix}_miss_tokens:rate5m", "miss tokens", _either(*misses))
    yield Recording(f"{prefix}_hit:ratio_rate5m", "prefix cache hit rate", _either(*shares))


def _times(record: str, known_as: str, *where: _Time) -> Iterator[Recording]:
    """Yield the rules of average, P95 and P99 of histograms that have no series in common."""
    averages = (each.mean() for each in where)
    yield Recording(f"{record}:avg_rate5m", f"{known_as}, average", _either(*averages))
    for percent in (95, 99):
        quantiles = (each.quantile(percent / 100) for each in where)
        yield Recording(
            f"{record}:p{percent}_rate5m", f"{known_as}, P{percent}", _either(*quantiles)
        )


_SAVED = f"sum without (tier) ({RULE.rate(SAVED_SECONDS)})"
_LOST = f"sum without (tier) ({RULE.rate(LOST_SECONDS)})"
_LONG = RULE.over("15m")

FOUND_SHARE = Recording(
    "instance:kvtier_found_tokens:ratio_rate15m",
    "hit rate of the tiers below the GPU",
    ratio(f"sum without (tier) ({_LONG.rate(FOUND_TOKENS)})", _LONG.rate(ASKED_TOKENS)),
)
"""Per daemon, for engines of every kind."""

_WAITED, _FIRST_TOKENS = (
    f"sum({_LONG.rate(TIME_TO_FIRST_TOKEN_SECONDS, part)}"
    f" or {_LONG.rate(vllm.TIME_TO_FIRST_TOKEN_SECONDS, part)})"
    for part in ("sum", "count")
)

FIRST_TOKEN_OF_ALL = Recording(
    "fleet:time_to_first_token_seconds:avg_rate15m",
    "TTFT of all engines, kvtier's own and vLLM's",
    ratio(_WAITED, _FIRST_TOKENS),
)
"""Over all nodes, because daemon and engine are different targets."""

RECORDINGS: Sequence[Recording] = (
    *_tokens(),
    FOUND_SHARE,
    *_times(
        "instance:kvtier_time_to_first_token_seconds",
        "TTFT",
        _Time(TIME_TO_FIRST_TOKEN_SECONDS, "without (source)"),
        _Time(vllm.TIME_TO_FIRST_TOKEN_SECONDS, "without (engine)"),
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
        _Time(COPY_SECONDS, "without ()", {"route": ("cpu_to_gpu",)}),
        _Time(vllm.LOAD_SECONDS, "without (engine)", route="cpu_to_gpu"),
        _Time(TRANSFER_SECONDS, "without ()", {"route": ("ssd_to_cpu", "remote_to_cpu")}),
    ),
    *_times(
        "instance_route:kvtier_offload_write_seconds",
        "offload write latency",
        _Time(COPY_SECONDS, "without ()", {"route": ("gpu_to_cpu",)}),
        _Time(vllm.STORE_SECONDS, "without (engine)", route="gpu_to_cpu"),
        _Time(TRANSFER_SECONDS, "without ()", {"route": ("cpu_to_ssd", "cpu_to_remote")}),
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
        "time to first token saved, net, seconds per second",
        f"{_SAVED}\n-\n{_LOST}",
    ),
)
"""In the order of the page that lists them."""
