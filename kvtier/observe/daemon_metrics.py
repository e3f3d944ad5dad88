"""Definitions of the daemon's metrics. Those of engines are in ``engine_metrics``.

Rules
-----
* ``kvtier_<noun>_<unit>[_total]``, base units: seconds and bytes.
* Each label has a closed set of values, never a hash, request, client or model. So the number of
  series is fixed.
* ``docs/operations/metrics.md`` is generated from both; a test compares them.
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
    table_of,
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

    Engines read and write the CPU tier; the daemon reads and writes all slower tiers.
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
"""Transfers made by the daemon."""
_RESTORES_ALL = frozenset({PlanReason.ALL, PlanReason.ALWAYS, PlanReason.NOTHING})
"""Decisions that leave no found token to the engine."""

ASKED_TOKENS = Counter(
    "kvtier_asked_tokens_total",
    "Tokens of full blocks that engines looked up: found plus absent. If several ranks serve a "
    "request, tokens and seconds are counted once; blocks and bytes are counted by each rank.",
)
FOUND_TOKENS = Counter(
    "kvtier_found_tokens_total",
    "Tokens that were cached, or just being stored, by the tier that would serve them.",
    (_LOWER,),
)
ABSENT_TOKENS = Counter("kvtier_absent_tokens_total", "Tokens looked up that no tier could serve.")
LEFT_TOKENS = Counter(
    "kvtier_left_tokens_total",
    "Found tokens that the engine should compute anyway, by the reason for the decision. Found "
    "minus left is what engines may order.",
    (("reason", tuple(r.value for r in PlanReason if r not in _RESTORES_ALL)),),
)
ORDERED_TOKENS = Counter(
    "kvtier_ordered_tokens_total",
    "Tokens of finished loads: loaded plus unloaded. Tokens that were found, not left and not "
    "ordered were never requested again, for example because the request was cancelled.",
)
LOADED_TOKENS = Counter(
    "kvtier_loaded_tokens_total",
    "Ordered tokens that were delivered to an engine and verified, by the tier they came from.",
    (_LOWER,),
)
UNLOADED_TOKENS = Counter(
    "kvtier_unloaded_tokens_total",
    "Ordered tokens that were not delivered, by the reason that ended the load: gone since the "
    "lookup (absent, identity), no space in the CPU tier, deadline exceeded (late), failed, or no"
    " longer wanted (released), for example after a cancel or because the engine computed them "
    "meanwhile.",
    (("reason", ("absent", "identity", "no_room", "late", "failed", "released")),),
)
LOOKUP_BLOCKS = Counter(
    "kvtier_lookup_blocks_total",
    "Blocks looked up, by the result and the tier that would serve them.",
    (("outcome", ("hit", "pending", "miss")), ("tier", (*_LOWER[1], "none"))),
)
LOOKUP_SECONDS = Histogram(
    "kvtier_lookup_seconds",
    "Time of a lookup in the daemon, of any length.",
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
    "Time of a transfer from start to end, without the time in the queue.",
    (_TRANSFER,),
    buckets=TRANSFER_BUCKETS,
)
TRANSFER_QUEUE_SECONDS = Histogram(
    "kvtier_transfer_queue_seconds",
    "Time that a block waited for its transfer to start.",
    (_TRANSFER,),
    buckets=TRANSFER_BUCKETS,
)
TRANSFER_BYTES = Counter(
    "kvtier_transfer_bytes_total",
    "Bytes of finished transfers, by the outcome. Copies to and from the GPU are made by the "
    "engines: to the GPU counts what they were handed, from the GPU what they stored.",
    (_ROUTE, ("outcome", ("complete", "failed", "late", "cancelled"))),
)
ADMISSION_BLOCKS = Counter(
    "kvtier_admission_blocks_total",
    "Blocks offered to a tier, by its answer.",
    (_LOWER, ("outcome", ("admitted", "rejected", "throttled", "present"))),
)
EVICTED_BLOCKS = Counter(
    "kvtier_evicted_blocks_total",
    "Blocks that left a tier, by the reason: space for others, expired, failed verification, or a"
    " lost tier.",
    (_LOWER, ("reason", ("capacity", "expired", "corrupt", "lost"))),
)
DROPPED_BLOCKS = Counter("kvtier_dropped_blocks_total", "Blocks dropped by an operator.", (_LOWER,))
TIER_USED_BYTES = Gauge(
    "kvtier_tier_used_bytes",
    "Bytes allocated in a tier, including padding and headers; for the GPU tier, as reported by "
    "attached engines.",
    (_TIER,),
)
TIER_CAPACITY_BYTES = Gauge(
    "kvtier_tier_capacity_bytes",
    "Bytes that a tier may allocate; 0 if the server decides.",
    (_TIER,),
)
TIER_BLOCKS = Gauge("kvtier_tier_blocks", "Blocks that a tier would serve.", (_TIER,))
TIER_UP = Gauge(
    "kvtier_tier_up", "1 while a tier answers, 0 while it is off or failing.", (_LOWER,)
)
TIER_STATE = Gauge(
    "kvtier_tier_state",
    "1 for the current state of a tier: up; degraded, it works only in part, for example on a "
    "read-only disk; out, it fails and is skipped; drained or detached, by an operator; off, by "
    "configuration.",
    (_LOWER, ("state", ("up", "degraded", "out", "drained", "detached", "off"))),
)
BREAKER_STATE = Gauge(
    "kvtier_breaker_state",
    "1 for the state of a tier's circuit breaker: closed, calls pass; open, calls are refused; "
    "half_open, a trial call passes. All are 0 for a tier that is off.",
    (_SLOW, ("state", ("closed", "open", "half_open"))),
)
QUARANTINED_BLOCKS = Counter(
    "kvtier_quarantined_blocks_total",
    "Blocks found damaged by a read, a scrub or fsck, and taken out of service.",
    (_SLOW,),
)
SCRUBBED_BYTES = Counter(
    "kvtier_scrubbed_bytes_total", "Bytes of the SSD tier verified in the background."
)
SSD_WRITTEN_BYTES = Counter(
    "kvtier_ssd_written_bytes_total",
    "Bytes written to the drive: offered blocks, relocated blocks, and metadata. Write "
    "amplification is their sum divided by blocks.",
    (("kind", ("blocks", "moved", "metadata")),),
)
SSD_READ_ONLY = Gauge(
    "kvtier_ssd_read_only", "1 while the volume is full and nothing is written to it."
)
SSD_DIRECT_IO = Gauge("kvtier_ssd_direct_io", "1 if the page cache is bypassed.")
SSD_WRITE_BUDGET_BYTES = Gauge(
    "kvtier_ssd_write_budget_bytes", "Bytes that may be written per day; 0 without a budget."
)
SSD_WRITE_BUDGET_LEFT_BYTES = Gauge(
    "kvtier_ssd_write_budget_left_bytes", "Bytes of the write budget that may be written now."
)
SSD_WRITE_BUDGET_STATE = Gauge(
    "kvtier_ssd_write_budget_state",
    "1 for the state of the write budget: unlimited; left; short, fewer blocks are written to "
    "make it last; used_up, blocks are refused.",
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
    "Blocks written to a slower tier because the CPU tier is about to evict them.",
    (_SLOW,),
)
BACKGROUND_FAULTS = Counter(
    "kvtier_background_faults_total",
    "Exceptions in background tasks; each was logged, and the task continues.",
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
    "Blocks that were looked up and not served, by what had happened to them.",
    (("fate", tuple(fate.value for fate in Fate)),),
)
REFUSED_BLOCKS = Counter(
    "kvtier_refused_blocks_total",
    "Offered blocks that a tier refused, by the rule that refused them.",
    (_LOWER, ("rule", ("worth", "depth", "budget", "second_use", "full"))),
)
DECISIONS = Counter(
    "kvtier_decisions_total",
    "Requests for which blocks could have been restored, by the reason for the decision.",
    (("reason", tuple(reason.value for reason in PlanReason)),),
)
PREDICTED_SECONDS = Counter(
    "kvtier_predicted_seconds_total",
    "Predicted times of requests with a known outcome: of the restore, and to the first token.",
    (("of", ("restore", "first_token")),),
)
ACTUAL_SECONDS = Counter(
    "kvtier_actual_seconds_total",
    "Measured times of the same requests.",
    (("of", ("restore", "first_token")),),
)
SAVED_SECONDS = Counter(
    "kvtier_saved_seconds_total",
    "Time to first token that restoring saved compared with computing, by the tier of the blocks."
    " The time to compute was measured for the same prompt if possible, and predicted otherwise.",
    (_LOWER,),
)
SAVED_MEASURED_SECONDS = Counter(
    "kvtier_saved_measured_seconds_total",
    "The part of kvtier_saved_seconds_total with a measured time to compute the same prompt.",
    (_LOWER,),
)
LOST_SECONDS = Counter(
    "kvtier_lost_seconds_total",
    "Time to first token that restoring cost when computing would have been faster.",
    (_LOWER,),
)
REGRET_SECONDS = Counter(
    "kvtier_regret_seconds_total",
    "Time that the better choice would have saved, as far as it is known afterwards, by the "
    "choice that was made.",
    (("taken", ("restore", "recompute")),),
)
GUARDED = Gauge(
    "kvtier_tier_guarded",
    "1 while a tier is skipped because restoring from it did not pay off.",
    (_LOWER,),
)
RESTORE_BYTES_PER_SECOND = Gauge(
    "kvtier_restore_bytes_per_second",
    "Bandwidth that the cost model expects of a route, for a single transfer.",
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
    "kvtier_remembered_blocks", "Blocks whose use is tracked, whether they are cached or not."
)
RETAINED_BYTES = Gauge(
    "kvtier_retained_bytes",
    "Bytes of the CPU tier protected by pins, priorities, TTLs and announced requests.",
)
GATE_SHARE = Gauge(
    "kvtier_gate_share",
    "Share of the blocks leaving the CPU tier that is currently written to the SSD.",
)
ANNOUNCED_REQUESTS = Counter(
    "kvtier_announced_requests_total", "Requests that were announced before they were scheduled."
)
PREFETCHED_BLOCKS = Counter(
    "kvtier_prefetched_blocks_total",
    "Blocks promoted to the CPU tier before they were requested, by the reason.",
    (("reason", ("announced", "warm")),),
)
LEASES = Gauge("kvtier_leases", "Leases held by clients.")
PINS = Gauge("kvtier_pins", "Blocks protected from eviction; 0 when the node is idle.")
SESSIONS = Gauge(
    "kvtier_sessions",
    "Attached clients, by transport.",
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
    "Unix time when the certificate in use expires; 0 without one. For rpc.tls_cert the first of "
    "its chain to expire, for remote.tls_ca the last.",
    (_CERTIFICATE,),
)
CERTIFICATE_NOT_BEFORE = Gauge(
    "kvtier_certificate_not_before_timestamp_seconds",
    "Unix time from which the certificate in use is valid.",
    (_CERTIFICATE,),
)
SECRET_REFUSED = Gauge(
    "kvtier_secret_refused",
    "1 while the file of a secret is invalid and its previous value is in use.",
    (("secret", (*_CERTIFICATE[1], "rpc_token", "remote_url", "seal_keys", "api_keys")),),
)
DAEMON_METRICS = table_of(vars(), BUILD, REFUSED_SAMPLES)
"""All metrics that the daemon exposes."""
