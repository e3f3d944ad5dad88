"""The connector's counters, which vLLM exports to Prometheus and writes to its log.

Theory
------
The threads of each half add to its counters. vLLM takes them once a step, adds up those of the
workers and the scheduler half, and passes them to the process that serves ``/metrics``. They travel
as plain names, labels and numbers.

Blocks are kvtier's, of 64 tokens or more. Each worker counts its own share, so that a block stored
by two workers counts as two.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from kvtier.core.residency import LOWER_TIERS, TierName

__all__ = [
    "ATTACHED",
    "HIT_TOKENS",
    "LOAD_BYTES",
    "LOAD_SECONDS",
    "LOOKUPS",
    "LOOKUP_SECONDS",
    "MISSING_BLOCKS",
    "ROWS",
    "STAGED_BYTES",
    "STORE_BLOCKS",
    "STORE_SECONDS",
    "Counts",
    "Row",
    "StatCounters",
    "StatKind",
    "add_up",
    "split_by_tier",
    "summary",
]

_SAMPLES_MAX = 1000
"""Samples of one duration between two steps or two log lines; later ones are dropped."""

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class StatKind(StrEnum):
    """How two values of one row are combined."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. ``title`` is its name in vLLM's log, with braces for the label."""

    name: str
    kind: StatKind
    title: str
    text: str
    label: str = ""
    values: Sequence[str] = ("",)
    buckets: Sequence[float] = ()


ATTACHED = Row(
    "vllm:kvtier_attached",
    StatKind.GAUGE,
    "Attached",
    "1 while there is a session with the daemon, as of vLLM's last step.",
)
HIT_TOKENS = Row(
    "vllm:kvtier_hit_tokens",
    StatKind.COUNTER,
    "Tokens from {}",
    "Prompt tokens whose load was started, by the tier they were in. Includes those of missing "
    "blocks.",
    "tier",
    tuple(tier.value for tier in LOWER_TIERS),
)
LOOKUPS = Row(
    "vllm:kvtier_lookups",
    StatKind.COUNTER,
    "Lookups {}",
    "Lookups by outcome: hit, blocks are loaded; miss, none are found or loading does not pay; "
    "failed, no answer in time; empty, the daemon is known to be empty and was not asked.",
    "outcome",
    ("hit", "miss", "failed", "empty"),
)
LOOKUP_SECONDS = Row(
    "vllm:kvtier_lookup_seconds",
    StatKind.HISTOGRAM,
    "lookup",
    "Duration of a lookup, including promotion to the CPU tier. vLLM computes other requests "
    "meanwhile.",
    buckets=_SECONDS,
)
LOAD_BYTES = Row(
    "vllm:kvtier_load_bytes",
    StatKind.COUNTER,
    "Bytes loaded",
    "Bytes copied from the CPU tier into vLLM's KV cache.",
)
LOAD_SECONDS = Row(
    "vllm:kvtier_load_seconds",
    StatKind.HISTOGRAM,
    "load",
    "Duration of the copy for one request.",
    buckets=_SECONDS,
)
STAGED_BYTES = Row(
    "vllm:kvtier_staged_bytes",
    StatKind.COUNTER,
    "Bytes staged",
    "Bytes copied through a staging buffer, because their part of the CPU tier is not "
    "registered with the device.",
)
MISSING_BLOCKS = Row(
    "vllm:kvtier_missing_blocks",
    StatKind.COUNTER,
    "Blocks missing",
    "Blocks that were reported as hits but not loaded; vLLM computed them.",
)
STORE_BLOCKS = Row(
    "vllm:kvtier_store_blocks",
    StatKind.COUNTER,
    "Blocks {}",
    "Blocks offered, by outcome: kept, the daemon has them; refused, storing does not pay or "
    "there is no room; failed, no answer in time.",
    "outcome",
    ("kept", "refused", "failed"),
)
STORE_SECONDS = Row(
    "vllm:kvtier_store_seconds",
    StatKind.HISTOGRAM,
    "store",
    "Duration of a store, including the copy. vLLM does not wait for it.",
    buckets=_SECONDS,
)

ROWS: Mapping[str, Row] = {
    row.name: row
    for row in (
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
    )
}
"""All rows by name, in the order of vLLM's log line."""

Counts = dict[str, dict[str, list[float]]]
"""By name and label: a counter's sum, a gauge's last value, a histogram's samples."""


class StatCounters:
    """Counts since they were last taken. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def add(self, row: Row, value: float = 1, label: str = "") -> None:
        """Add to a counter, set a gauge, or record a duration."""
        if not value and row.kind is StatKind.COUNTER:
            return
        with self._lock:
            add_up(self._counts, {row.name: {label: [value]}})

    def take(self) -> Counts:
        """Return the counts, and start again from zero."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts


def add_up(counts: Counts, others: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Add later counts to ``counts``; unknown rows are ignored."""
    for name, by_label in others.items():
        row = ROWS.get(name)
        if row is None:
            continue
        mine = counts.setdefault(name, {})
        for label, values in by_label.items():
            before = mine.setdefault(label, [])
            if row.kind is StatKind.HISTOGRAM:
                before += values[: _SAMPLES_MAX - len(before)]
            elif row.kind is StatKind.COUNTER:
                mine[label] = [sum(before) + sum(values)]
            else:
                mine[label] = list(values)


def summary(counts: Counts) -> dict[str, int | float]:
    """Return the figures of a log line: sums, and means and maxima in ms."""
    figures: dict[str, int | float] = {}
    for row in ROWS.values():
        for label, values in sorted(counts.get(row.name, {}).items()):
            if row.kind is StatKind.HISTOGRAM:
                figures[f"Avg {row.title} (ms)"] = round(fmean(values) * 1e3, 1)
                figures[f"Max {row.title} (ms)"] = round(max(values) * 1e3, 1)
            else:
                figures[row.title.format(label)] = round(values[-1])
    return figures


def split_by_tier(
    tiers: Sequence[TierName], num_tokens: int, block_tokens: int
) -> dict[TierName, int]:
    """Split the tokens of a load by the tier of each block.

    The load ends with its last block; vLLM may have some tokens of the first block itself.
    """
    split: dict[TierName, int] = {}
    left = num_tokens
    for tier in reversed(tiers):
        share = min(left, block_tokens)
        if share:
            split[tier] = split.get(tier, 0) + share
        left -= share
    return split
