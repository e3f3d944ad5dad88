"""Definitions of the daemon's metrics. Those of engines are in ``engine_metrics``.

Rules
-----
* ``kvtier_<noun>_<unit>[_total]``, base units: seconds and bytes.
* Each label's values are a closed set, given here; never a hash, a request, a client or a model.
  The number of series is therefore known before the first request.
* ``docs/operations/metrics.md`` is written from both; a test compares them.
"""

from enum import StrEnum

from kvtier.core.fate import Fate
from kvtier.core.plan import PlanReason
from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, TierName
from kvtier.observe.metrics import (
    BUILD,
    REFUSED_SAMPLES,
    TRANSFER_BUCKETS,
    Counter,
    Gauge,
    Histogram,
    Metric,
)

__all__ = [
    "ABSENT_TOKENS",
    "ACTUAL_SECONDS",
    "ADMISSION_BLOCKS",
    "ANNOUNCED_REQUESTS",
    "ASKED_TOKENS",
    "BACKGROUND_FAULTS",
    "BREAKER_STATE",
    "CERTIFICATE_NOT_AFTER",
    "CERTIFICATE_NOT_BEFORE",
    "DAEMON_METRICS",
    "DECISIONS",
    "DEMOTED_BLOCKS",
    "DROPPED_BLOCKS",
    "EVICTED_BLOCKS",
    "FOUND_TOKENS",
    "GATE_SHARE",
    "GUARDED",
    "LEASES",
    "LEFT_TOKENS",
    "LOADED_TOKENS",
    "LOOKUP_BLOCKS",
    "LOOKUP_SECONDS",
    "LOOP_SILENT_SECONDS",
    "LOST_SECONDS",
    "MISSED_BLOCKS",
    "MISS_BLOCKS",
    "ORDERED_TOKENS",
    "PINS",
    "POLICY_SECONDS",
    "PREDICTED_SECONDS",
    "PREFETCHED_BLOCKS",
    "PREFILL_TOKENS_PER_SECOND",
    "PROBED_LOOKUPS",
    "QUARANTINED_BLOCKS",
    "READY",
    "REFUSED_BLOCKS",
    "REGRET_SECONDS",
    "REMEMBERED_BLOCKS",
    "RESTORE_BYTES_PER_SECOND",
    "RETAINED_BYTES",
    "SAVED_MEASURED_SECONDS",
    "SAVED_SECONDS",
    "SCRUBBED_BYTES",
    "SECRET_REFUSED",
    "SESSIONS",
    "SSD_DIRECT_IO",
    "SSD_READ_ONLY",
    "SSD_WRITE_BUDGET_BYTES",
    "SSD_WRITE_BUDGET_LEFT_BYTES",
    "SSD_WRITE_BUDGET_STATE",
    "SSD_WRITTEN_BYTES",
    "TIER_BLOCKS",
    "TIER_CAPACITY_BYTES",
    "TIER_STATE",
    "TIER_UP",
    "TIER_USED_BYTES",
    "TRANSFER_BYTES",
    "TRANSFER_QUEUE_SECONDS",
    "TRANSFER_ROUTES",
    "TRANSFER_SECONDS",
    "UNLOADED_TOKENS",
    "TransferRoute",
    "route_of",
]


class TransferRoute(StrEnum):
    """The routes that engines copy over."""

    GPU_TO_CPU = "gpu_to_cpu"
    CPU_TO_GPU = "cpu_to_gpu"


def route_of(tier: TierName, *, is_read: bool) -> str:
    """Return the route of reads from a tier, or of writes to it: ``ssd_to_cpu``, ``cpu_to_ssd``.

    Engines read the CPU tier and write to it; the daemon does that with all slower ones.
    """
    if tier is TierName.CPU:
        return TransferRoute.CPU_TO_GPU if is_read else TransferRoute.GPU_TO_CPU
    return f"{tier}_to_cpu" if is_read else f"cpu_to_{tier}"


TRANSFER_ROUTES = tuple(
    route_of(tier, is_read=is_read) for tier in LOWER_TIERS for is_read in (False, True)
)
"""All routes, as metric labels."""

_TIER = ("tier", tuple(tier.value for tier in TierName))
_LOWER = ("tier", tuple(tier.value for tier in LOWER_TIERS))
_SLOW = ("tier", tuple(tier.value for tier in SLOW_TIERS))
_ROUTE = ("route", tuple(str(route) for route in TRANSFER_ROUTES))
_TRANSFER = ("route", tuple(route for route in _ROUTE[1] if "gpu" not in route))
"""What the daemon's threads do."""
_RESTORES_ALL = frozenset({PlanReason.ALL, PlanReason.ALWAYS, PlanReason.NOTHING})
"""Decisions that leave nothing of what was found."""

ASKED_TOKENS = Counter(
    "kvtier_asked_tokens_total",
    "Tokens of the full blocks that engines asked for: those found and those absent, together. Of "
    "a request that several ranks serve, what is told in tokens and seconds counts once; blocks "
    "and bytes are each rank's own.",
)
FOUND_TOKENS = Counter(
    "kvtier_found_tokens_total",
    "Tokens that were there, or just being stored, by the tier that would serve them.",
    (_LOWER,),
)
ABSENT_TOKENS = Counter("kvtier_absent_tokens_total", "Tokens asked for that no tier could serve.")
LEFT_TOKENS = Counter(
    "kvtier_left_tokens_total",
    "Found tokens that the decision leaves to the engine to compute, by why. Found less left is "
    "what engines may order.",
    (("reason", tuple(r.value for r in PlanReason if r not in _RESTORES_ALL)),),
)
ORDERED_TOKENS = Counter(
    "kvtier_ordered_tokens_total",
    "Tokens of loads that are over: those loaded and those unloaded, together. What is found, not "
    "left and not ordered was not asked for again: the request was cancelled, say.",
)
LOADED_TOKENS = Counter(
    "kvtier_loaded_tokens_total",
    "Ordered tokens that were handed to an engine, verified, by the tier that they came from.",
    (_LOWER,),
)
UNLOADED_TOKENS = Counter(
    "kvtier_unloaded_tokens_total",
    "Ordered tokens that were not, by why the load ended where it did: gone since the lookup "
    "(absent, identity), no room in the CPU tier, not in time, failed on the way, or no more wanted"
    " (released), as after a cancel or where the engine has computed them meanwhile.",
    (("reason", ("absent", "identity", "no_room", "late", "failed", "released")),),
)
LOOKUP_BLOCKS = Counter(
    "kvtier_lookup_blocks_total",
    "Blocks asked for, by what the lookup said and the tier that would serve them.",
    (("outcome", ("hit", "pending", "miss")), ("tier", (*_LOWER[1], "none"))),
)
LOOKUP_SECONDS = Histogram(
    "kvtier_lookup_seconds",
    "Time of one lookup in the daemon, whatever its length.",
    buckets=TRANSFER_BUCKETS,
)
_MISS_REASONS = (
    "absent",
    "identity",
    "checksum",
    "length",
    "header",
    "seal",
    "expired",
    "fault",
    "late",
)
MISS_BLOCKS = Counter(
    "kvtier_miss_blocks_total",
    "Blocks that a tier should have served and did not, by the reason.",
    (
        _LOWER,
        (
            "reason",
            _MISS_REASONS,
        ),
    ),
)
TRANSFER_SECONDS = Histogram(
    "kvtier_transfer_seconds",
    "Time of one transfer, from its start to its end, without its wait.",
    (_TRANSFER,),
    buckets=TRANSFER_BUCKETS,
)
TRANSFER_QUEUE_SECONDS = Histogram(
    "kvtier_transfer_queue_seconds",
    "Time that a block waited for the start of its transfer.",
    (_TRANSFER,),
    buckets=TRANSFER_BUCKETS,
)
TRANSFER_BYTES = Counter(
    "kvtier_transfer_bytes_total",
    "Bytes of transfers that ended, by how they ended; to and from the GPU the engines copy: what "
    "they were handed, and what they stored.",
    (_ROUTE, ("outcome", ("complete", "failed", "late", "cancelled"))),
)
ADMISSION_BLOCKS = Counter(
    "kvtier_admission_blocks_total",
    "Blocks offered to a tier, by its answer.",
    (_LOWER, ("outcome", ("admitted", "rejected", "throttled", "present"))),
)
EVICTED_BLOCKS = Counter(
    "kvtier_evicted_blocks_total",
    "Blocks that left a tier, by the reason: room for others, an expired key, a failed check, or a "
    "tier that went away.",
    (_LOWER, ("reason", ("capacity", "expired", "corrupt", "lost"))),
)
DROPPED_BLOCKS = Counter(
    "kvtier_dropped_blocks_total", "Blocks that an operator dropped.", (_LOWER,)
)
TIER_USED_BYTES = Gauge(
    "kvtier_tier_used_bytes",
    "Bytes allocated in a tier, padding and headers included; in the GPU tier, as attached engines "
    "report them.",
    (_TIER,),
)
TIER_CAPACITY_BYTES = Gauge(
    "kvtier_tier_capacity_bytes",
    "Bytes a tier may allocate; 0 where the server decides.",
    (_TIER,),
)
TIER_BLOCKS = Gauge("kvtier_tier_blocks", "Blocks that a tier would serve.", (_TIER,))
TIER_UP = Gauge(
    "kvtier_tier_up", "1 while a tier answers, 0 while it is off or failing.", (_LOWER,)
)
TIER_STATE = Gauge(
    "kvtier_tier_state",
    "1 for the state that a tier is in: up; degraded, it serves but not all of what it is for, such"
    " as a read-only disk; out, it fails and is left alone; drained or detached, by an operator; "
    "off, by configuration.",
    (_LOWER, ("state", ("up", "degraded", "out", "drained", "detached", "off"))),
)
BREAKER_STATE = Gauge(
    "kvtier_breaker_state",
    "1 for the state of what stands before a tier: closed, calls go through; open, none does; "
    "half_open, a probe does. All are 0 for a tier that is off.",
    (_SLOW, ("state", ("closed", "open", "half_open"))),
)
QUARANTINED_BLOCKS = Counter(
    "kvtier_quarantined_blocks_total",
    "Blocks found damaged, by a read, a scrub or fsck, and taken out of service.",
    (_SLOW,),
)
SCRUBBED_BYTES = Counter("kvtier_scrubbed_bytes_total", "Bytes of the SSD tier verified unasked.")
SSD_WRITTEN_BYTES = Counter(
    "kvtier_ssd_written_bytes_total",
    "Bytes written to the drive: blocks that were offered, blocks moved to keep them, and all else."
    " Write amplification is their sum by blocks.",
    (("kind", ("blocks", "moved", "metadata")),),
)
SSD_READ_ONLY = Gauge(
    "kvtier_ssd_read_only", "1 while the volume has no room and nothing is written to it."
)
SSD_DIRECT_IO = Gauge("kvtier_ssd_direct_io", "1 where the page cache is bypassed.")
SSD_WRITE_BUDGET_BYTES = Gauge(
    "kvtier_ssd_write_budget_bytes", "Bytes that may be written in a day; 0 without a budget."
)
SSD_WRITE_BUDGET_LEFT_BYTES = Gauge(
    "kvtier_ssd_write_budget_left_bytes", "Of them, bytes that may be written now."
)
SSD_WRITE_BUDGET_STATE = Gauge(
    "kvtier_ssd_write_budget_state",
    "1 for the state of the budget: unlimited, there is none; left; short, less is written than "
    "otherwise, to make it last; used_up, a block was refused and would be refused now too.",
    (("state", ("unlimited", "left", "short", "used_up")),),
)
PROBED_LOOKUPS = Counter(
    "kvtier_probed_lookups_total",
    "Lookups that ended before the prompt did, by whether the remote tier was asked for the rest "
    "and, if not, why.",
    (("outcome", ("found", "absent", "late", "too_few", "known_absent", "out", "busy")),),
)
DEMOTED_BLOCKS = Counter(
    "kvtier_demoted_blocks_total",
    "Blocks written to a slower tier because the CPU tier is about to let them go.",
    (_SLOW,),
)
BACKGROUND_FAULTS = Counter(
    "kvtier_background_faults_total",
    "Exceptions in tasks that nobody waits for; each was logged and the task goes on.",
    (
        (
            "task",
            (
                "health",
                "scrub",
                "verify",
                "gauges",
                "reserve",
                "probe",
                "learned",
                "budget",
                "systemd",
                "sockets",
                "secrets",
            ),
        ),
    ),
)
MISSED_BLOCKS = Counter(
    "kvtier_missed_blocks_total",
    "Blocks that were asked for and not served, by what had become of them.",
    (("fate", tuple(fate.value for fate in Fate)),),
)
REFUSED_BLOCKS = Counter(
    "kvtier_refused_blocks_total",
    "Offered blocks that a tier did not take, by the rule that refused them.",
    (_LOWER, ("rule", ("worth", "depth", "budget", "second_use", "full"))),
)
DECISIONS = Counter(
    "kvtier_decisions_total",
    "Requests for which something could have been restored, by what was decided and why.",
    (("reason", tuple(reason.value for reason in PlanReason)),),
)
PREDICTED_SECONDS = Counter(
    "kvtier_predicted_seconds_total",
    "What was predicted of requests whose outcome is known: the restore alone, and the time to the "
    "first token.",
    (("of", ("restore", "first_token")),),
)
ACTUAL_SECONDS = Counter(
    "kvtier_actual_seconds_total",
    "What the same requests took.",
    (("of", ("restore", "first_token")),),
)
SAVED_SECONDS = Counter(
    "kvtier_saved_seconds_total",
    "Time to first token that restoring saved against computing, by the tier the blocks came from. "
    "The time of computing was measured for the same prompt if possible, and is predicted if not.",
    (_LOWER,),
)
SAVED_MEASURED_SECONDS = Counter(
    "kvtier_saved_measured_seconds_total",
    "The part of kvtier_saved_seconds_total for which computing the same prompt was measured.",
    (_LOWER,),
)
LOST_SECONDS = Counter(
    "kvtier_lost_seconds_total",
    "Time to first token that restoring cost where computing would have been faster.",
    (_LOWER,),
)
REGRET_SECONDS = Counter(
    "kvtier_regret_seconds_total",
    "What the better road would have saved, as far as one can tell afterwards, by the road taken.",
    (("taken", ("restore", "recompute")),),
)
GUARDED = Gauge(
    "kvtier_tier_guarded",
    "1 while a tier is left alone because restoring from it did not pay.",
    (_LOWER,),
)
RESTORE_BYTES_PER_SECOND = Gauge(
    "kvtier_restore_bytes_per_second",
    "Bandwidth that the cost model expects of a route, with one transfer under way.",
    (_ROUTE,),
)
PREFILL_TOKENS_PER_SECOND = Gauge(
    "kvtier_prefill_tokens_per_second",
    "Speed of computing a prompt of 4,096 tokens, as the cost model expects it of the model that "
    "reported last.",
)
POLICY_SECONDS = Histogram(
    "kvtier_policy_seconds",
    "Time of one decision: what to restore, or what to keep.",
    buckets=TRANSFER_BUCKETS,
)
REMEMBERED_BLOCKS = Gauge(
    "kvtier_remembered_blocks", "Blocks whose use is remembered, whether they are here or not."
)
RETAINED_BYTES = Gauge(
    "kvtier_retained_bytes",
    "Bytes of the CPU tier that are kept for pins, priorities, times to live and announced "
    "requests.",
)
GATE_SHARE = Gauge(
    "kvtier_gate_share", "Share of what leaves the CPU tier that is written to the SSD now."
)
ANNOUNCED_REQUESTS = Counter(
    "kvtier_announced_requests_total", "Requests that were announced before their turn."
)
PREFETCHED_BLOCKS = Counter(
    "kvtier_prefetched_blocks_total",
    "Blocks brought into the CPU tier before they were asked for, by what for.",
    (("reason", ("announced", "warm")),),
)
LEASES = Gauge("kvtier_leases", "Leases that clients hold.")
PINS = Gauge("kvtier_pins", "Blocks protected from eviction; 0 when the node is idle.")
SESSIONS = Gauge(
    "kvtier_sessions",
    "Clients attached, by transport.",
    (("transport", ("shm",)),),
)
LOOP_SILENT_SECONDS = Gauge(
    "kvtier_loop_silent_seconds",
    "Time since the daemon's event loop last ran: up to a second if it is healthy. It keeps "
    "growing while the loop hangs, because it is not measured on the loop.",
)
READY = Gauge(
    "kvtier_ready",
    "1 while the process serves; 0 while it starts or stops, or while no client can connect.",
)
_CERTIFICATE = ("secret", ("rpc_certificate", "remote_ca"))
CERTIFICATE_NOT_AFTER = Gauge(
    "kvtier_certificate_not_after_timestamp_seconds",
    "When the certificate in force expires, since 1970; 0: there is none. Of rpc.tls_cert the first"
    " of its chain to expire, of remote.tls_ca the last.",
    (_CERTIFICATE,),
)
CERTIFICATE_NOT_BEFORE = Gauge(
    "kvtier_certificate_not_before_timestamp_seconds",
    "From when on it holds.",
    (_CERTIFICATE,),
)
SECRET_REFUSED = Gauge(
    "kvtier_secret_refused",
    "1 while what lies in a secret's file cannot be used, and what was there before is in force.",
    (("secret", (*_CERTIFICATE[1], "rpc_token", "remote_url", "seal_keys", "api_keys")),),
)
DAEMON_METRICS: tuple[Metric, ...] = (
    ASKED_TOKENS,
    FOUND_TOKENS,
    ABSENT_TOKENS,
    LEFT_TOKENS,
    ORDERED_TOKENS,
    LOADED_TOKENS,
    UNLOADED_TOKENS,
    LOOKUP_BLOCKS,
    LOOKUP_SECONDS,
    MISS_BLOCKS,
    TRANSFER_SECONDS,
    TRANSFER_QUEUE_SECONDS,
    TRANSFER_BYTES,
    ADMISSION_BLOCKS,
    EVICTED_BLOCKS,
    DROPPED_BLOCKS,
    TIER_USED_BYTES,
    TIER_CAPACITY_BYTES,
    TIER_BLOCKS,
    TIER_UP,
    TIER_STATE,
    BREAKER_STATE,
    QUARANTINED_BLOCKS,
    SCRUBBED_BYTES,
    SSD_WRITTEN_BYTES,
    SSD_READ_ONLY,
    SSD_DIRECT_IO,
    SSD_WRITE_BUDGET_BYTES,
    SSD_WRITE_BUDGET_LEFT_BYTES,
    SSD_WRITE_BUDGET_STATE,
    PROBED_LOOKUPS,
    DEMOTED_BLOCKS,
    MISSED_BLOCKS,
    REFUSED_BLOCKS,
    DECISIONS,
    PREDICTED_SECONDS,
    ACTUAL_SECONDS,
    SAVED_SECONDS,
    SAVED_MEASURED_SECONDS,
    LOST_SECONDS,
    REGRET_SECONDS,
    GUARDED,
    RESTORE_BYTES_PER_SECOND,
    PREFILL_TOKENS_PER_SECOND,
    POLICY_SECONDS,
    REMEMBERED_BLOCKS,
    RETAINED_BYTES,
    GATE_SHARE,
    ANNOUNCED_REQUESTS,
    PREFETCHED_BLOCKS,
    BACKGROUND_FAULTS,
    LEASES,
    PINS,
    SESSIONS,
    CERTIFICATE_NOT_AFTER,
    CERTIFICATE_NOT_BEFORE,
    SECRET_REFUSED,
    BUILD,
    READY,
    LOOP_SILENT_SECONDS,
    REFUSED_SAMPLES,
)
"""What the daemon exposes."""
