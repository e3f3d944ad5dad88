"""The alerts: on harm that somebody feels, or will; a full cache is no harm.

Rules
-----
* Every expression is false for a node that is idle, and for one that was just started.
* Two conditions where one would cry wolf: an effect, and that it comes from here; or a share, and
  that it is one of more than a few.
* ``critical`` is for now, and wakes; ``warning`` for today; ``info`` for the next look at kvtier:
  nobody waits longer for it than without.
* What looks back over hours asks that the process has run for as long. Where Prometheus was away
  when one began anew, a counter may seem to have stood still.
* Each has a section in the runbook, a case in which it fires and one, as near as may be, in which
  it does not.
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
"""Seconds a second: 36 s an hour. Less is noise of two predictions."""

_STARTS_MAX = 2
"""In an hour, beside the first: an operator who tries settings needs no more."""

_DOWN_SHARE = 0.2
"""Of all daemons: the others' engines have room to spare for the work of fewer."""

_FAULTS_LEAST = 3
"""In an hour: a task that fails again and again, not a disk that was full for a moment."""

_LOADS_LEAST = 20
"""In a quarter of an hour; of fewer, a share says little. So it is of lookups."""

_READS_LEAST = 100
"""Blocks in a quarter of an hour."""

_WAIT_MAX_S = 1.0
"""Of a block for its turn. The last one of a load waits for about twice as long, and a load is
given up after five."""

_EVICTED_LEAST = 0.1
"""Blocks a second that had been evicted: 90 in a quarter of an hour."""

_WEAR_LEAST_BYTES = 1e11
"""In a day. A small drive for servers (480 GB, to be written 0.3 times a day) is made for more."""

_DAMAGE = ("checksum", "header", "length")
"""Why a block was not served, where something was there and is not what was written."""


def _down(marker: Metric) -> str:
    """Return targets that do not answer and had ``marker`` when they last did.

    So no job has to have a certain name, and a pod that was moved is not missed where it was.
    """
    return f"up == 0\nand on (job, instance)\nlast_over_time({RULE.series(marker)}[1d])"


def _happened(metric: Counter, least: int, over: str = "", **labels: tuple[str, ...]) -> str:
    """Return what was counted within an hour, as a sum ``over`` a label, if it is so much.

    To Prometheus a count that was there at a process's first scrape is no increase.
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
# The largest of the day: a tier that was taken off since has none.
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

# Of one that never answered only the job says what it is; it has ten minutes to start.
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
        "Many of kvtier's daemons do not answer",
        "{{ $value | humanizePercentage }} of them: their engines compute every prompt in full, and"
        " may be too few for that.",
        f"count({_DOWN}) / count({_DAEMONS}) > {_DOWN_SHARE}\nand count({_DOWN}) > 1",
    ),
    Alert(
        "KvtierDaemonDown",
        "warning",
        "5m",
        f"kvtier's daemon at {_NODE} does not answer",
        "Its engines go on and compute every prompt in full.",
        _DOWN,
    ),
    Alert(
        "KvtierEngineDown",
        "critical",
        "5m",
        f"The engine at {_NODE} does not answer",
        "Its requests fail. The daemon keeps its blocks.",
        _down(REQUESTS_RUNNING),
    ),
    Alert(
        "KvtierLoopStuck",
        "warning",
        "2m",
        f"The loop of kvtier's daemon at {_NODE} stands still",
        "For {{ $value | humanizeDuration }}, and nobody has restarted it. Its engines get no"
        " answer, and compute every prompt in full.",
        # From here on /healthz says so too, and what watches it has two minutes to act.
        f"{RULE.series(LOOP_SILENT_SECONDS)} > 10",
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
        "KvtierVllmDetached",
        "warning",
        "10m",
        f"vLLM at {_NODE} answers requests, and has no daemon",
        "It computes every prompt in full.",
        # What it says is of its last step: without one it may have a daemon by now.
        f"{RULE.series(vllm.ATTACHED)} == 0\nand {RULE.increase(vllm.GENERATED_TOKENS)} > 0",
    ),
    Alert(
        "KvtierVllmLookupsFail",
        "warning",
        "15m",
        f"vLLM at {_NODE} asks what is kept, and gets no answer in time",
        "{{ $value | humanizePercentage }} of its lookups: those requests wait, and are computed in"
        " full.",
        f"{_NOT_ANSWERED} / {_ASKED} > 0.2\nand {_ASKED} >= {_LOADS_LEAST}",
    ),
    Alert(
        "KvtierVllmBlocksMissing",
        "warning",
        "15m",
        f"vLLM at {_NODE} is promised blocks that do not come",
        "{{ $value | humanize }} within a quarter of an hour, more than one for each load: their"
        " requests waited, and were computed nevertheless.",
        # Both count for each worker, so it is the same for one and for eight of them.
        f"{_NOT_COME} > {_COPIES}\nand {_NOT_COME} >= {_LOADS_LEAST}",
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
        "info",
        "1h",
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
        "{{ $value | humanizeDuration }} lost in each second, more than is saved.",
        f"{_LOST} > {_SAVED}\nand {_LOST} > {_WORTH_A_LOOK}",
    ),
    Alert(
        "KvtierWrongDecisions",
        "info",
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
        f"{_UNLOADED} / {_SHORT.rate(ORDERED_TOKENS)} > 0.2\nand {_LOADS} >= {_LOADS_LEAST}",
    ),
    Alert(
        "KvtierReadsWait",
        "warning",
        "15m",
        f"Blocks at {_NODE} wait for their turn on {{{{ $labels.route }}}}",
        "{{ $value | humanizeDuration }} on average, before they are read at all: the tier has more"
        " to do than it can, and loads will be too late.",
        f"{_WAITED} > {_WAIT_MAX_S:g}\nand {_READS} >= {_READS_LEAST}",
    ),
    Alert(
        "KvtierRestoreStall",
        "warning",
        "15m",
        f"The engine at {_NODE} stands still while it waits for its cache",
        "{{ $value | humanizePercentage }} of the time it had requests and computed nothing.",
        # One request alone has nobody to be computed meanwhile; that is no harm if it pays.
        f"{_STALL} > 0.1\nand {_AT_ONCE} > 2",
    ),
    Alert(
        "KvtierStoresWithoutLoads",
        "info",
        "1h",
        f"Engines store at {_NODE} and nothing comes back",
        "{{ $value | humanize1024 }}B stored in six hours, and not a thousandth of it loaded.",
        f"{_STORED} > 1e9\nand {_RESTORED} < 0.001 * {_STORED}\n"
        f"and {RULE.series(READY)} offset 6h == 1\n{_has_run(6 * 3600)}",
    ),
    Alert(
        "KvtierWriteBudgetUsedUp",
        "info",
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
        f"{_WRITTEN} > {_CAPACITY}\nand {_WRITTEN} > 10 * {_READ_BACK}\n"
        f"and {_WRITTEN} > {_WEAR_LEAST_BYTES:g}\n{_has_run(24 * 3600)}",
    ),
    Alert(
        "KvtierCorruptionFound",
        "warning",
        "0m",
        f"Damaged blocks in the {_TIER} tier at {_NODE}",
        "{{ $value | humanize }} within an hour. None was served; something below damages bytes.",
        f"{_happened(QUARANTINED_BLOCKS, 1)}\n"
        f"or {_happened(MISS_BLOCKS, 1, over='reason', reason=_DAMAGE)}",
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
        _happened(BACKGROUND_FAULTS, _FAULTS_LEAST),
    ),
    Alert(
        "KvtierCertificateExpires",
        "warning",
        "1h",
        f"The {{{{ $labels.secret }}}} of {_NODE} expires, and nobody has renewed it",
        "In {{ $value | humanizeDuration }}. From then on operators get no connection, or the"
        " daemon none to the remote tier.",
        # Of one that is made for a day, or an hour, the last quarter: it is renewed before that.
        f"{_EXPIRES} - time() < 14 * 86400\n"
        f"and {_EXPIRES} - time() < ({_EXPIRES} - {_BEGAN}) / 4\n"
        f"and {_EXPIRES} > 0",
    ),
    Alert(
        "KvtierSecretRefused",
        "warning",
        "15m",
        f"The {{{{ $labels.secret }}}} that lies at {_NODE} cannot be used",
        "The one of before is in force, also where it was to be withdrawn.",
        f"{RULE.series(SECRET_REFUSED)} == 1",
    ),
    Alert(
        "KvtierSamplesRefused",
        "info",
        "0m",
        f"Metrics of {_NODE} are not complete",
        "{{ $value | humanize }} samples fit no series and were left out: a bug of kvtier.",
        _happened(REFUSED_SAMPLES, 1),
    ),
)
"""Those that users feel first."""
