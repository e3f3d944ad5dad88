"""Alerts on harm that users feel or will feel; a full cache is not harm.

Rules
-----
* Every expression is false on an idle node and on one that has just started.
* Where one condition would raise false alarms, an alert has two: an effect and its cause, or a
  share and a minimum number of events.
* ``critical`` pages at once; ``warning`` needs action today; ``info`` can wait, because nobody
  waits longer than without kvtier.
* An alert that looks back over hours requires that the process has run for as long. If Prometheus
  was down when a process restarted, its counters would seem not to have moved.
* Each has a section in the runbook, a test case in which it fires, and a similar one in which it
  does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.source import vllm
from deploy.source.query import RULE
from deploy.source.recording import FIRST_TOKEN_OF_ALL, FOUND_SHARE
from kvtier.observe.daemon_metrics import (
    BACKGROUND_FAULTS,
    CERTIFICATE_NOT_AFTER,
    CERTIFICATE_NOT_BEFORE,
    DECISIONS,
    GUARDED,
    LOOKUP_BLOCKS,
    LOOKUP_SECONDS,
    LOOP_SILENT_SECONDS,
    LOST_SECONDS,
    MISS_BLOCKS,
    MISSED_BLOCKS,
    ORDERED_TOKENS,
    PINS,
    QUARANTINED_BLOCKS,
    READY,
    REGRET_SECONDS,
    SAVED_SECONDS,
    SECRET_REFUSED,
    SSD_WRITE_BUDGET_STATE,
    SSD_WRITTEN_BYTES,
    TIER_CAPACITY_BYTES,
    TIER_STATE,
    TRANSFER_BYTES,
    TRANSFER_QUEUE_SECONDS,
    UNLOADED_TOKENS,
)
from kvtier.observe.engine_metrics import (
    ATTACHED,
    REQUESTS_LOADING,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    RESTORE_STALL_SECONDS,
)
from kvtier.observe.metrics import BUILD, REFUSED_SAMPLES, Counter, Metric

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


_SHORT, _HOUR = RULE.over("15m"), RULE.over("1h")
_LONG, _DAY = RULE.over("6h"), RULE.over("1d")

_WORTH_A_LOOK = 0.01
"""Seconds per second: 36 s an hour. Less is noise in two predictions."""

_STARTS_MAX = 2
"""Restarts in an hour; an operator who tries settings needs no more."""

_DOWN_SHARE = 0.2
"""Share of all daemons. Other nodes' engines can absorb the work of fewer."""

_FAULTS_LEAST = 3
"""Faults in an hour: excludes a disk that was full for a moment."""

_LOADS_LEAST = 20
"""Loads, or lookups, in a quarter of an hour; a share of fewer says little."""

_READS_LEAST = 100
"""Blocks in a quarter of an hour."""

_WAIT_MAX_S = 1.0
"""Mean queueing time of a block. The last block of a load waits about twice as long, and a load is
abandoned after five seconds."""

_EVICTED_LEAST = 0.1
"""Misses of evicted blocks per second: 90 in a quarter of an hour."""

_WEAR_LEAST_BYTES = 1e11
"""Bytes written in a day. A small server drive (480 GB, 0.3 writes per day) is rated higher."""

_DAMAGE = ("checksum", "header", "length")
"""Miss reasons that mean that a stored block differs from what was written."""


def _down(marker: Metric) -> str:
    """Return targets that do not answer and exposed ``marker`` when they last did.

    So jobs may have any name, and a pod that was moved is not missed at its old address.
    """
    return f"up == 0\nand on (job, instance)\nlast_over_time({RULE.series(marker)}[1d])"


def _happened(metric: Counter, least: int, over: str = "", **labels: tuple[str, ...]) -> str:
    """Return the count of the last hour, summed ``over`` a label, if it is at least ``least``.

    Prometheus does not count what was there at a process's first scrape as an increase.
    """
    grown, counted = _HOUR.increase(metric, "", **labels), RULE.series(metric, "", **labels)
    if over:
        grown, counted = _sum(over, grown), _sum(over, counted)
    return (
        f"{grown} >= {least}\n"
        f"or {counted} >= {least}\n"
        "and on (job, instance) process_start_time_seconds > time() - 3600"
    )


def _has_run(seconds: int) -> str:
    return f"and on (job, instance) process_start_time_seconds < time() - {seconds}"


def _sum(label: str, expr: str) -> str:
    return f"sum without ({label}) ({expr})"


_SAVED, _LOST = (_sum("tier", _SHORT.rate(metric)) for metric in (SAVED_SECONDS, LOST_SECONDS))
_REGRET = _sum("taken", _SHORT.rate(REGRET_SECONDS))
_EVICTED = _sum("fate", _SHORT.rate(MISSED_BLOCKS, fate="evicted"))
_STORED = _sum("route, outcome", _LONG.increase(TRANSFER_BYTES, route="gpu_to_cpu"))
_RESTORED = _sum("route, outcome", _LONG.increase(TRANSFER_BYTES, route="cpu_to_gpu"))
_WRITTEN = _sum("kind", _DAY.increase(SSD_WRITTEN_BYTES))
# The largest of the day, because a tier that was detached since has none.
_CAPACITY = _sum("tier", f"max_over_time({RULE.series(TIER_CAPACITY_BYTES, tier='ssd')}[1d])")
_READ_BACK = _sum("route, outcome", _DAY.increase(TRANSFER_BYTES, route="ssd_to_cpu"))
_UNLOADED = _sum("reason", _SHORT.rate(UNLOADED_TOKENS, reason=("late", "failed")))
_LOADS = _sum(
    "reason", _SHORT.increase(DECISIONS, reason=("all", "part", "split", "limit", "always"))
)
_READ = ("ssd_to_cpu", "remote_to_cpu")
_WAITED = _SHORT.mean(TRANSFER_QUEUE_SECONDS, "without ()", route=_READ)
_READS = _SHORT.increase(TRANSFER_QUEUE_SECONDS, "count", route=_READ)
_ASKED, _NOT_ANSWERED = (
    _sum("outcome, engine", _SHORT.increase(vllm.LOOKUPS, outcome=outcome))
    for outcome in (("hit", "miss", "failed"), "failed")
)
_NOT_COME = _sum("engine", _SHORT.increase(vllm.MISSING_BLOCKS))
_COPIES = _sum("engine", _SHORT.increase(vllm.LOAD_SECONDS, "count"))
_STALL = _sum("waits_for", _SHORT.rate(RESTORE_STALL_SECONDS))
_AT_ONCE = " + ".join(
    f"avg_over_time({RULE.series(metric)}[15m])"
    for metric in (REQUESTS_WAITING, REQUESTS_LOADING, REQUESTS_RUNNING)
)

# A target that never answered is only identified by its job; it has ten minutes to start.
_UP = 'up{job="kvtier"}'
_DOWN = f"{_down(PINS)}\nor max_over_time({_UP}[10m]) == 0 and {_UP} offset 10m == 0"
_DAEMONS = f"up and on (job, instance) last_over_time({RULE.series(PINS)}[1d]) or {_UP}"

_EXPIRES, _BEGAN = map(RULE.series, (CERTIFICATE_NOT_AFTER, CERTIFICATE_NOT_BEFORE))

_NODE = "{{ $labels.instance }}"
_TIER = "{{ $labels.tier }}"

ALERTS: Sequence[Alert] = (
    Alert(
        "KvtierDaemonsDown",
        "critical",
        "5m",
        "Many kvtier daemons are down",
        "{{ $value | humanizePercentage }} of all daemons do not answer. Their engines compute "
        "every prompt in full, and may be overloaded.",
        f"count({_DOWN}) / count({_DAEMONS}) > {_DOWN_SHARE}\nand count({_DOWN}) > 1",
    ),
    Alert(
        "KvtierDaemonDown",
        "warning",
        "5m",
        f"The kvtier daemon at {_NODE} is down",
        "It does not answer. Its engines compute every prompt in full.",
        _DOWN,
    ),
    Alert(
        "KvtierEngineDown",
        "critical",
        "5m",
        f"The engine at {_NODE} is down",
        "It does not answer, and its requests fail. The daemon keeps its blocks.",
        _down(REQUESTS_RUNNING),
    ),
    Alert(
        "KvtierLoopStuck",
        "warning",
        "2m",
        f"The event loop of the kvtier daemon at {_NODE} is stuck",
        "It has not moved for {{ $value | humanizeDuration }}, and nothing has restarted the "
        "daemon. Its engines get no answer, and compute every prompt in full.",
        # From this value on /healthz fails too, and a supervisor has two minutes to act.
        f"{RULE.series(LOOP_SILENT_SECONDS)} > 10",
    ),
    Alert(
        "KvtierRestarts",
        "warning",
        "0m",
        f"{_NODE} restarts repeatedly",
        "It was restarted {{ $value }} times within an hour. Each start of a daemon empties the CPU"
        " tier.",
        f"changes(process_start_time_seconds[1h]) > {_STARTS_MAX}\n"
        f"and on (job, instance)\nlast_over_time({RULE.series(BUILD)}[1h])",
    ),
    Alert(
        "KvtierNotReady",
        "warning",
        "10m",
        f"{_NODE} is up but not ready",
        "It has been starting or stopping for ten minutes, which normally takes seconds.",
        f"{RULE.series(READY)} == 0",
    ),
    Alert(
        "KvtierEngineDetached",
        "warning",
        "10m",
        f"The engine at {_NODE} is not attached to a daemon",
        "It computes every prompt in full.",
        f"{RULE.series(ATTACHED)} == 0",
    ),
    Alert(
        "KvtierVllmDetached",
        "warning",
        "10m",
        f"vLLM at {_NODE} serves requests without a kvtier daemon",
        "It computes every prompt in full.",
        # The metric is as of its last step: an idle vLLM may be attached by now.
        f"{RULE.series(vllm.ATTACHED)} == 0\nand {RULE.increase(vllm.GENERATED_TOKENS)} > 0",
    ),
    Alert(
        "KvtierVllmLookupsFail",
        "warning",
        "15m",
        f"Lookups of vLLM at {_NODE} time out",
        "{{ $value | humanizePercentage }} of its lookups get no answer in time. Those requests"
        " wait, and are then computed in full.",
        f"{_NOT_ANSWERED} / {_ASKED} > 0.2\nand {_ASKED} >= {_LOADS_LEAST}",
    ),
    Alert(
        "KvtierVllmBlocksMissing",
        "warning",
        "15m",
        f"Blocks promised to vLLM at {_NODE} do not arrive",
        "{{ $value | humanize }} blocks within a quarter of an hour, more than one per load. Their"
        " requests waited, and were computed anyway.",
        # Both count per worker, so the ratio does not depend on their number.
        f"{_NOT_COME} > {_COPIES}\nand {_NOT_COME} >= {_LOADS_LEAST}",
    ),
    Alert(
        "KvtierTierOut",
        "warning",
        "5m",
        f"The {_TIER} tier at {_NODE} is out",
        "It is not used. Its blocks are misses, and engines compute them.",
        f"{RULE.series(TIER_STATE, state='out')} == 1",
    ),
    Alert(
        "KvtierTierDegraded",
        "warning",
        "30m",
        f"The {_TIER} tier at {_NODE} is degraded",
        "It is read-only for lack of space, its server rejects writes, or it has less memory than"
        " configured.",
        f"{RULE.series(TIER_STATE, state='degraded')} == 1",
    ),
    Alert(
        "KvtierTierGuarded",
        "info",
        "1h",
        f"Restoring from the {_TIER} tier at {_NODE} does not pay off",
        "The guard kept it closed for {{ $value | humanizePercentage }} of the last hour.",
        f"avg_over_time({RULE.series(GUARDED)}[1h]) > 0.5",
    ),
    Alert(
        "KvtierEvictionStorm",
        "warning",
        "15m",
        f"Blocks at {_NODE} are evicted before they are reused, and users wait longer",
        "{{ $value | humanizePercentage }} of the requested blocks had been evicted. Within an "
        "hour, the hit rate fell by a fifth and the time to first token rose by a fifth.",
        f"{_EVICTED} / {_sum('outcome, tier', _SHORT.rate(LOOKUP_BLOCKS))} > 0.1\n"
        f"and {_EVICTED} > {_EVICTED_LEAST}\n"
        f"and {FOUND_SHARE.record} < 0.8 * ({FOUND_SHARE.record} offset 1h)\n"
        f"and on () {FIRST_TOKEN_OF_ALL.record}"
        f" > 1.2 * ({FIRST_TOKEN_OF_ALL.record} offset 1h)",
    ),
    Alert(
        "KvtierRestoresSlowerThanRecompute",
        "warning",
        "15m",
        f"Restoring at {_NODE} costs more time than it saves",
        "{{ $value | humanizeDuration }} are lost per second, more than is saved.",
        f"{_LOST} > {_SAVED}\nand {_LOST} > {_WORTH_A_LOOK}",
    ),
    Alert(
        "KvtierWrongDecisions",
        "info",
        "30m",
        f"Restore decisions at {_NODE} are often wrong",
        "The other path would have saved {{ $value | humanizeDuration }} more per second, over half"
        " of what is saved.",
        f"{_REGRET} > 0.5 * {_SAVED}\nand {_REGRET} > {_WORTH_A_LOOK}",
    ),
    Alert(
        "KvtierLoadsFail",
        "warning",
        "15m",
        f"Loads at {_NODE} arrive late or fail",
        "Engines waited for {{ $value | humanizePercentage }} of the ordered tokens in vain, and"
        " computed them.",
        f"{_UNLOADED} / {_SHORT.rate(ORDERED_TOKENS)} > 0.2\nand {_LOADS} >= {_LOADS_LEAST}",
    ),
    Alert(
        "KvtierReadsWait",
        "warning",
        "15m",
        f"Reads at {_NODE} queue on {{{{ $labels.route }}}}",
        "Blocks wait {{ $value | humanizeDuration }} on average before they are read. The tier is"
        " overloaded, and loads will be late.",
        f"{_WAITED} > {_WAIT_MAX_S:g}\nand {_READS} >= {_READS_LEAST}",
    ),
    Alert(
        "KvtierRestoreStall",
        "warning",
        "15m",
        f"The engine at {_NODE} stalls while it waits for blocks",
        "For {{ $value | humanizePercentage }} of the time it had requests but computed nothing.",
        # With a single request there is nothing else to compute; that is no harm if it pays off.
        f"{_STALL} > 0.1\nand {_AT_ONCE} > 2",
    ),
    Alert(
        "KvtierStoresWithoutLoads",
        "info",
        "1h",
        f"Blocks stored at {_NODE} are never loaded",
        "{{ $value | humanize1024 }}B were stored in six hours, and less than a thousandth loaded.",
        f"{_STORED} > 1e9\nand {_RESTORED} < 0.001 * {_STORED}\n"
        f"and {RULE.series(READY)} offset 6h == 1\n{_has_run(6 * 3600)}",
    ),
    Alert(
        "KvtierWriteBudgetUsedUp",
        "info",
        "30m",
        f"The SSD write budget at {_NODE} is used up",
        "Blocks that the CPU tier evicts are lost until the budget has grown again.",
        f"{RULE.series(SSD_WRITE_BUDGET_STATE, state='used_up')} == 1",
    ),
    Alert(
        "KvtierSsdWear",
        "warning",
        "1h",
        f"The drive at {_NODE} wears out for little benefit",
        "{{ $value | humanize1024 }}B were written in a day: more than the tier's capacity, and ten"
        " times what was read back.",
        f"{_WRITTEN} > {_CAPACITY}\nand {_WRITTEN} > 10 * {_READ_BACK}\n"
        f"and {_WRITTEN} > {_WEAR_LEAST_BYTES:g}\n{_has_run(24 * 3600)}",
    ),
    Alert(
        "KvtierCorruptionFound",
        "warning",
        "0m",
        f"Damaged blocks in the {_TIER} tier at {_NODE}",
        "{{ $value | humanize }} within an hour. None was served. Hardware or another process "
        "damages data.",
        f"{_happened(QUARANTINED_BLOCKS, 1)}\n"
        f"or {_happened(MISS_BLOCKS, 1, over='reason', reason=_DAMAGE)}",
    ),
    Alert(
        "KvtierPinsAtIdle",
        "warning",
        "5m",
        f"Blocks at {_NODE} stay pinned on an idle node",
        "{{ $value | humanize }} blocks were pinned for 15 minutes; leases last seconds.",
        f"min_over_time({RULE.series(PINS)}[15m]) > 0\n"
        f"and {_SHORT.increase(LOOKUP_SECONDS, 'count')} == 0",
    ),
    Alert(
        "KvtierBackgroundFaults",
        "warning",
        "0m",
        f"The background task {{{{ $labels.task }}}} at {_NODE} raises exceptions",
        "{{ $value | humanize }} within an hour. The task continues, but its work may not be done.",
        _happened(BACKGROUND_FAULTS, _FAULTS_LEAST),
    ),
    Alert(
        "KvtierCertificateExpires",
        "warning",
        "1h",
        f"The {{{{ $labels.secret }}}} of {_NODE} is about to expire",
        "It expires in {{ $value | humanizeDuration }} and was not renewed. Then operators cannot"
        " connect, or the daemon cannot connect to the remote tier.",
        # For short-lived certificates the last quarter: they are normally renewed before that.
        f"{_EXPIRES} - time() < 14 * 86400\n"
        f"and {_EXPIRES} - time() < ({_EXPIRES} - {_BEGAN}) / 4\n"
        f"and {_EXPIRES} > 0",
    ),
    Alert(
        "KvtierSecretRefused",
        "warning",
        "15m",
        f"The new {{{{ $labels.secret }}}} at {_NODE} is invalid",
        "The previous one stays in use, even if it was meant to be revoked.",
        f"{RULE.series(SECRET_REFUSED)} == 1",
    ),
    Alert(
        "KvtierSamplesRefused",
        "info",
        "0m",
        f"Metrics of {_NODE} are incomplete",
        "{{ $value | humanize }} samples matched no series and were dropped: a bug in kvtier.",
        _happened(REFUSED_SAMPLES, 1),
    ),
)
"""Ordered by impact on users."""
