"""The alerts: on harm that somebody feels, or will; a full cache is no harm.

Rules
-----
* Every expression is false for a node that is idle, and for one that was just started.
* Two conditions where one would cry wolf: an effect, and that it comes from here.
* ``critical`` is for now, ``warning`` for today, ``info`` for whoever mends kvtier.
* Each has a section in the runbook, a case in which it fires and one, as near as may be, in which
  it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.source.query import RULE
from deploy.source.recording import FIRST_TOKEN_OF_ALL, FOUND_SHARE
from kvtier.observe.metric import Metric
from kvtier.observe.table import (
    ATTACHED,
    BACKGROUND_FAULTS,
    BUILD,
    GUARDED,
    LOOKUP_BLOCKS,
    LOOKUP_SECONDS,
    LOST_SECONDS,
    MISSED_BLOCKS,
    ORDERED_TOKENS,
    PINS,
    QUARANTINED_BLOCKS,
    READY,
    REFUSED_SAMPLES,
    REGRET_SECONDS,
    REQUESTS_RUNNING,
    RESTORE_STALL_SECONDS,
    SAVED_SECONDS,
    SSD_WRITE_BUDGET_STATE,
    SSD_WRITTEN_BYTES,
    TIER_CAPACITY_BYTES,
    TIER_STATE,
    TRANSFER_BYTES,
    UNLOADED_TOKENS,
)

__all__ = ["ALERTS", "Alert"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert; ``hold`` is how long its expression must be true."""

    name: str
    severity: str
    hold: str
    summary: str
    description: str
    expr: str


_SHORT, _LONG, _DAY = RULE.over("15m"), RULE.over("6h"), RULE.over("1d")

_WORTH_A_LOOK = 0.01
"""Seconds a second: 36 s an hour. Less is noise of two predictions."""

_STARTS_MAX = 2
"""In an hour, beside the first: an operator who tries settings needs no more."""


def _down(marker: Metric) -> str:
    """Return targets that do not answer and had ``marker`` when they last did.

    So no job has to have a certain name, and a pod that was moved is not missed where it was.
    """
    return f"up == 0\nand on (job, instance)\nlast_over_time({RULE.series(marker)}[1d])"


def _sum(label: str, expr: str) -> str:
    return f"sum without ({label}) ({expr})"


_SAVED, _LOST = (_sum("tier", _SHORT.rate(metric)) for metric in (SAVED_SECONDS, LOST_SECONDS))
_REGRET = _sum("taken", _SHORT.rate(REGRET_SECONDS))
_EVICTED = _sum("fate", _SHORT.rate(MISSED_BLOCKS, fate="evicted"))
_STORED = _sum("route, outcome", _LONG.increase(TRANSFER_BYTES, route="gpu_to_cpu"))
_RESTORED = _sum("route, outcome", _LONG.increase(TRANSFER_BYTES, route="cpu_to_gpu"))
_WRITTEN = _sum("kind", _DAY.increase(SSD_WRITTEN_BYTES))
# The largest of the day: a tier that was taken off since has none.
_CAPACITY = _sum("tier", f"max_over_time({RULE.series(TIER_CAPACITY_BYTES, tier='ssd')}[1d])")
_READ_BACK = _sum("route, outcome", _DAY.increase(TRANSFER_BYTES, route="ssd_to_cpu"))
_UNLOADED = _sum("reason", _SHORT.rate(UNLOADED_TOKENS, reason=("late", "failed")))
_STALL = _sum("waits_for", _SHORT.rate(RESTORE_STALL_SECONDS))

_NODE = "{{ $labels.instance }}"
_TIER = "{{ $labels.tier }}"

ALERTS: Sequence[Alert] = (
    Alert(
        "KvtierDaemonDown",
        "critical",
        "2m",
        f"kvtier's daemon at {_NODE} does not answer",
        "Its engines go on and compute every prompt in full.",
        _down(PINS),
    ),
    Alert(
        "KvtierEngineDown",
        "critical",
        "2m",
        f"The engine at {_NODE} does not answer",
        "Its requests fail. The daemon keeps its blocks.",
        _down(REQUESTS_RUNNING),
    ),
    Alert(
        "KvtierRestarts",
        "warning",
        "0m",
        f"{_NODE} starts again and again",
        "{{ $value }} times within an hour, each too short to be told as down. A start of the"
        " daemon empties the CPU tier.",
        f"changes(process_start_time_seconds[1h]) > {_STARTS_MAX}\n"
        f"and on (job, instance)\nlast_over_time({RULE.series(BUILD)}[1h])",
    ),
    Alert(
        "KvtierNotReady",
        "warning",
        "10m",
        f"{_NODE} is up and does not serve",
        "It has been starting or stopping for ten minutes; either takes seconds.",
        f"{RULE.series(READY)} == 0",
    ),
    Alert(
        "KvtierEngineDetached",
        "warning",
        "10m",
        f"The engine at {_NODE} has no daemon",
        "It computes every prompt in full.",
        f"{RULE.series(ATTACHED)} == 0",
    ),
    Alert(
        "KvtierTierOut",
        "warning",
        "5m",
        f"The {_TIER} tier at {_NODE} is out",
        "Nothing is asked of it. Its blocks are misses, and engines compute them.",
        f"{RULE.series(TIER_STATE, state='out')} == 1",
    ),
    Alert(
        "KvtierTierDegraded",
        "warning",
        "30m",
        f"The {_TIER} tier at {_NODE} serves, but not all of what it is for",
        "Read-only for want of space, refused by its server, or less memory than configured.",
        f"{RULE.series(TIER_STATE, state='degraded')} == 1",
    ),
    Alert(
        "KvtierTierGuarded",
        "warning",
        "15m",
        f"The {_TIER} tier at {_NODE} is left alone: restoring from it does not pay",
        "For {{ $value | humanizePercentage }} of the last hour.",
        f"avg_over_time({RULE.series(GUARDED)}[1h]) > 0.5",
    ),
    Alert(
        "KvtierEvictionStorm",
        "warning",
        "15m",
        f"Blocks are evicted at {_NODE} before they come back, and users wait longer",
        "{{ $value | humanizePercentage }} of the blocks asked for had been evicted; the hit rate"
        " has fallen by a fifth and the time to first token risen by a fifth within an hour.",
        f"{_EVICTED} / {_sum('outcome, tier', _SHORT.rate(LOOKUP_BLOCKS))} > 0.1\n"
        f"and {FOUND_SHARE.record} < 0.8 * ({FOUND_SHARE.record} offset 1h)\n"
        f"and on () {FIRST_TOKEN_OF_ALL.record}"
        f" > 1.2 * ({FIRST_TOKEN_OF_ALL.record} offset 1h)",
    ),
    Alert(
        "KvtierRestoresSlowerThanRecompute",
        "warning",
        "15m",
        f"Restoring at {_NODE} costs more time than it saves",
        "{{ $value | humanizeDuration }} lost in each second, more than is saved.",
        f"{_LOST} > {_SAVED}\nand {_LOST} > {_WORTH_A_LOOK}",
    ),
    Alert(
        "KvtierWrongDecisions",
        "warning",
        "30m",
        f"Decisions at {_NODE} are often wrong",
        "The better road would have saved {{ $value | humanizeDuration }} more in each second, over"
        " half of what is saved.",
        f"{_REGRET} > 0.5 * {_SAVED}\nand {_REGRET} > {_WORTH_A_LOOK}",
    ),
    Alert(
        "KvtierLoadsFail",
        "warning",
        "15m",
        f"Loads at {_NODE} come late or not at all",
        "{{ $value | humanizePercentage }} of the tokens that engines wait for: they waited, and"
        " computed them nevertheless.",
        f"{_UNLOADED} / {_SHORT.rate(ORDERED_TOKENS)} > 0.2",
    ),
    Alert(
        "KvtierRestoreStall",
        "warning",
        "15m",
        f"The engine at {_NODE} stands still while it waits for its cache",
        "{{ $value | humanizePercentage }} of the time it had requests and computed nothing.",
        f"{_STALL} > 0.1",
    ),
    Alert(
        "KvtierStoresWithoutLoads",
        "warning",
        "1h",
        f"Engines store at {_NODE} and nothing comes back",
        "{{ $value | humanize1024 }}B stored in six hours, and not a thousandth of it loaded.",
        f"{_STORED} > 1e9\nand {_RESTORED} < 0.001 * {_STORED}\n"
        f"and {RULE.series(READY)} offset 6h == 1",
    ),
    Alert(
        "KvtierWriteBudgetUsedUp",
        "warning",
        "30m",
        f"The SSD tier at {_NODE} may write nothing more",
        "Blocks that the CPU tier lets go are lost until the budget has grown again.",
        f"{RULE.series(SSD_WRITE_BUDGET_STATE, state='used_up')} == 1",
    ),
    Alert(
        "KvtierSsdWear",
        "warning",
        "1h",
        f"The drive at {_NODE} is worn for little",
        "{{ $value | humanize1024 }}B written in a day: more than the tier holds, and ten times"
        " what was read back.",
        f"{_WRITTEN} > {_CAPACITY}\nand {_WRITTEN} > 10 * {_READ_BACK}",
    ),
    Alert(
        "KvtierCorruptionFound",
        "warning",
        "0m",
        f"Damaged blocks in the {_TIER} tier at {_NODE}",
        "{{ $value | humanize }} within an hour. None was served; something below damages bytes.",
        f"{RULE.over('1h').increase(QUARANTINED_BLOCKS)} > 0",
    ),
    Alert(
        "KvtierPinsAtIdle",
        "warning",
        "5m",
        f"Blocks at {_NODE} are protected from eviction, and nobody asks for anything",
        "{{ $value | humanize }} for 15 minutes; the longest lease is of seconds.",
        f"min_over_time({RULE.series(PINS)}[15m]) > 0\n"
        f"and {_SHORT.increase(LOOKUP_SECONDS, 'count')} == 0",
    ),
    Alert(
        "KvtierBackgroundFaults",
        "warning",
        "0m",
        f"Exceptions in the daemon's {{{{ $labels.task }}}} task at {_NODE}",
        "{{ $value | humanize }} within an hour. The task goes on; its work may not be done.",
        f"{RULE.over('1h').increase(BACKGROUND_FAULTS)} > 0",
    ),
    Alert(
        "KvtierSamplesRefused",
        "info",
        "0m",
        f"Metrics of {_NODE} are not complete",
        "{{ $value | humanize }} samples fit no series and were left out: a bug of kvtier.",
        f"{RULE.over('1h').increase(REFUSED_SAMPLES)} > 0",
    ),
)
"""Those that users feel first."""
