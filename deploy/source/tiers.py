"""The tiers dashboard: health, contents and transfers."""

from deploy.source.board import Board, Kind, Panel, Query, Section
from deploy.source.query import BOARD, ratio
from kvtier.observe.daemon_metrics import (
    ADMISSION_BLOCKS,
    BACKGROUND_FAULTS,
    BREAKER_STATE,
    CERTIFICATE_NOT_AFTER,
    DEMOTED_BLOCKS,
    DROPPED_BLOCKS,
    EVICTED_BLOCKS,
    LEASES,
    MISS_BLOCKS,
    PINS,
    PREFETCHED_BLOCKS,
    QUARANTINED_BLOCKS,
    REFUSED_BLOCKS,
    RETAINED_BYTES,
    SCRUBBED_BYTES,
    SECRET_REFUSED,
    SESSIONS,
    SSD_DIRECT_IO,
    SSD_READ_ONLY,
    SSD_WRITE_BUDGET_BYTES,
    SSD_WRITE_BUDGET_LEFT_BYTES,
    SSD_WRITE_BUDGET_STATE,
    SSD_WRITTEN_BYTES,
    TIER_BLOCKS,
    TIER_CAPACITY_BYTES,
    TIER_STATE,
    TIER_USED_BYTES,
    TRANSFER_BYTES,
    TRANSFER_QUEUE_SECONDS,
    TRANSFER_SECONDS,
)
from kvtier.observe.engine_metrics import (
    COPY_SECONDS,
)
from kvtier.observe.metrics import REFUSED_SAMPLES

__all__ = ["TIERS"]

_STATE = Section(
    "Health",
    (
        Panel(
            title="State",
            description="Nodes in each state. `out`: not used until it answers; `degraded`: serves "
            "with limits; `drained` (read, not written) and `detached` (not used): set by an "
            "operator; `off`: by configuration.",
            queries=(
                Query(
                    f"sum by (tier, state) ({BOARD.series(TIER_STATE)}) > 0", "{{tier}} {{state}}"
                ),
            ),
            unit="short",
            kind=Kind.STATES,
            span=8,
            alert="KvtierTierOut",
        ),
        Panel(
            title="Breaker",
            description="Circuit breaker of each tier. closed: calls pass; open: none pass; "
            "half open: one test call passes.",
            queries=(
                Query(
                    f"sum by (tier, state) ({BOARD.series(BREAKER_STATE)}) > 0",
                    "{{tier}} {{state}}",
                ),
            ),
            unit="short",
            kind=Kind.STATES,
            span=6,
            alert="KvtierTierOut",
        ),
        Panel(
            title="Drives",
            description="Nodes whose drive is read-only for lack of space, whose write budget "
            "is used up, and that use direct I/O.",
            queries=(
                Query(f"sum({BOARD.series(SSD_READ_ONLY)})", "read-only"),
                Query(
                    f"sum({BOARD.series(SSD_WRITE_BUDGET_STATE, state='used_up')})",
                    "budget used up",
                ),
                Query(f"sum({BOARD.series(SSD_DIRECT_IO)})", "direct I/O"),
            ),
            unit="short",
            kind=Kind.STATES,
            span=6,
            alert="KvtierWriteBudgetUsedUp",
        ),
        Panel(
            title="Faults in an hour",
            description="Exceptions in background tasks, and metric samples without a series.",
            queries=(
                Query(f"sum({BOARD.in_an_hour(BACKGROUND_FAULTS)})", "background"),
                Query(f"sum({BOARD.in_an_hour(REFUSED_SAMPLES)})", "samples"),
            ),
            unit="short",
            kind=Kind.STATES,
            span=4,
            thresholds=((1, "red"),),
            alert="KvtierBackgroundFaults",
        ),
    ),
)

_CONTENTS = Section(
    "Contents",
    (
        Panel(
            title="Used",
            description="Bytes allocated, including padding and headers. A full cache is normal.",
            queries=(Query(f"sum by (tier) ({BOARD.series(TIER_USED_BYTES)})", "{{tier}}"),),
            unit="bytes",
        ),
        Panel(
            title="Share of capacity used",
            description="No alert depends on it. A remote tier has no capacity of its own.",
            queries=(
                Query(
                    ratio(
                        f"sum by (tier) ({BOARD.series(TIER_USED_BYTES)})",
                        f"(sum by (tier) ({BOARD.series(TIER_CAPACITY_BYTES)}) > 0)",
                    ),
                    "{{tier}}",
                ),
            ),
            unit="percentunit",
            max=1,
        ),
        Panel(
            title="Blocks",
            description="Blocks that each tier can serve.",
            queries=(Query(f"sum by (tier) ({BOARD.series(TIER_BLOCKS)})", "{{tier}}"),),
            unit="short",
        ),
        Panel(
            title="Offered blocks, by outcome",
            description="Outcomes of offering blocks to the tiers.",
            queries=(Query(BOARD.known(ADMISSION_BLOCKS, "outcome"), "{{outcome}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Refused blocks, by rule",
            description="worth and budget: by choice; full: no room, or the queue was full.",
            queries=(Query(f"sum by (rule) ({BOARD.rate(REFUSED_BLOCKS)})", "{{rule}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Evicted and demoted blocks",
            description="Blocks that left a tier, and blocks written to a slower tier before that. "
            "Eviction only does harm if a block is requested again: see missed blocks in "
            "*Decisions*.",
            queries=(
                Query(f"sum by (tier) ({BOARD.rate(EVICTED_BLOCKS)})", "{{tier}}"),
                Query(f"sum by (tier) ({BOARD.rate(DEMOTED_BLOCKS)})", "to {{tier}}"),
            ),
            unit="si:blocks/s",
            span=6,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="Evicted blocks, by reason",
            description="capacity: made room for others; expired: too old; corrupt: failed "
            "verification; lost: its tier went away; dropped: by an operator.",
            queries=(
                Query(f"sum by (reason) ({BOARD.rate(EVICTED_BLOCKS)})", "{{reason}}"),
                Query(f"sum({BOARD.rate(DROPPED_BLOCKS)})", "dropped"),
            ),
            unit="si:blocks/s",
            kind=Kind.STACK,
            span=6,
        ),
    ),
)

_WAYS = Section(
    "Transfers",
    (
        Panel(
            title="Bytes by route",
            description="Bytes of completed transfers.",
            queries=(
                Query(
                    f"sum by (route) ({BOARD.rate(TRANSFER_BYTES, outcome='complete')})",
                    "{{route}}",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Transfer time, P95",
            description="Between the CPU tier and slower tiers, without queueing.",
            queries=(Query(BOARD.quantile(0.95, TRANSFER_SECONDS, "by (le, route)"), "{{route}}"),),
            unit="s",
            alert="KvtierLoadsFail",
        ),
        Panel(
            title="Queueing time, P95",
            description="Time that a block waited before its transfer started. If it exceeds the "
            "transfer time, the tier is the bottleneck.",
            queries=(
                Query(BOARD.quantile(0.95, TRANSFER_QUEUE_SECONDS, "by (le, route)"), "{{route}}"),
            ),
            unit="s",
            alert="KvtierReadsWait",
        ),
        Panel(
            title="Copy time of a block, P95",
            description="Between an engine's pool and the CPU tier, for kvtier's own engines.",
            queries=(Query(BOARD.quantile(0.95, COPY_SECONDS, "by (le, route)"), "{{route}}"),),
            unit="s",
        ),
        Panel(
            title="Wasted bytes, by outcome",
            description="Bytes of transfers that failed, were late, or were cancelled.",
            queries=(
                Query(
                    "sum by (outcome) ("
                    + BOARD.rate(TRANSFER_BYTES, outcome=("failed", "late", "cancelled"))
                    + ")",
                    "{{outcome}}",
                ),
            ),
            unit="Bps",
            kind=Kind.STACK,
            alert="KvtierLoadsFail",
        ),
        Panel(
            title="Misses despite residency, by reason",
            description="Blocks that a tier should have served. checksum, header, length and "
            "identity stay at zero on sound hardware.",
            queries=(Query(f"sum by (reason) ({BOARD.rate(MISS_BLOCKS)})", "{{reason}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            alert="KvtierCorruptionFound",
        ),
    ),
)

_DRIVE = Section(
    "The SSD tier",
    (
        Panel(
            title="Bytes written, by purpose",
            description="moved: to keep blocks when their segment is reclaimed. All kinds "
            "together, divided by blocks, are the write amplification.",
            queries=(Query(f"sum by (kind) ({BOARD.rate(SSD_WRITTEN_BYTES)})", "{{kind}}"),),
            unit="Bps",
            kind=Kind.STACK,
            span=6,
            alert="KvtierSsdWear",
        ),
        Panel(
            title="Write budget",
            description="Bytes that may be written now and per day. Both are 0 without a budget.",
            queries=(
                Query(f"sum({BOARD.series(SSD_WRITE_BUDGET_LEFT_BYTES)})", "left"),
                Query(f"sum({BOARD.series(SSD_WRITE_BUDGET_BYTES)})", "a day"),
            ),
            unit="bytes",
            span=6,
            alert="KvtierWriteBudgetUsedUp",
        ),
        Panel(
            title="Bytes scrubbed",
            description="Verified in the background while no request waits for the drive.",
            queries=(Query(f"sum({BOARD.rate(SCRUBBED_BYTES)})", "scrubbed"),),
            unit="Bps",
            span=6,
        ),
        Panel(
            title="Damaged blocks in an hour",
            description="Found by a read, a scrub, fsck, or an engine that copied them, and "
            "quarantined.",
            queries=(
                Query(f"sum by (tier) ({BOARD.in_an_hour(QUARANTINED_BLOCKS)})", "{{tier}}"),
                Query(
                    f"sum({BOARD.in_an_hour(MISS_BLOCKS, tier='cpu', reason='checksum')})", "cpu"
                ),
            ),
            unit="short",
            span=6,
            thresholds=((1, "red"),),
            alert="KvtierCorruptionFound",
        ),
    ),
)

_HOLDS = Section(
    "Pins, leases and clients",
    (
        Panel(
            title="Pins and leases",
            description="Both are 0 on an idle node.",
            queries=(
                Query(f"sum({BOARD.series(PINS)})", "pinned blocks"),
                Query(f"sum({BOARD.series(LEASES)})", "leases"),
            ),
            unit="short",
            span=6,
            alert="KvtierPinsAtIdle",
        ),
        Panel(
            title="Clients",
            description="Attached engines, by transport.",
            queries=(Query(f"sum by (transport) ({BOARD.series(SESSIONS)})", "{{transport}}"),),
            unit="short",
            span=6,
            alert="KvtierEngineDetached",
        ),
        Panel(
            title="Retained bytes",
            description="Bytes of the CPU tier kept by pins, priorities, times to live and "
            "announced requests.",
            queries=(Query(f"sum({BOARD.series(RETAINED_BYTES)})", "retained"),),
            unit="bytes",
            span=6,
        ),
        Panel(
            title="Prefetched blocks",
            description="Blocks promoted to the CPU tier for announced requests and for warm.",
            queries=(Query(f"sum by (reason) ({BOARD.rate(PREFETCHED_BLOCKS)})", "{{reason}}"),),
            unit="si:blocks/s",
            span=6,
        ),
    ),
)

_SECRETS = Section(
    "Secrets",
    (
        Panel(
            title="Certificate expiry",
            description="Time until the first certificate of any daemon expires: of the operators' "
            "port, and of the remote tier's CA.",
            queries=(
                Query(
                    f"min by (secret) (({BOARD.series(CERTIFICATE_NOT_AFTER)} > 0) - time())",
                    "{{secret}}",
                ),
            ),
            unit="s",
            span=12,
            alert="KvtierCertificateExpires",
        ),
        Panel(
            title="Invalid secrets",
            description="Daemons and engines with an invalid secret file.",
            queries=(Query(f"sum by (secret) ({BOARD.series(SECRET_REFUSED)})", "{{secret}}"),),
            unit="short",
            span=12,
            thresholds=((1, "red"),),
            alert="KvtierSecretRefused",
        ),
    ),
)

TIERS = Board(
    "tiers",
    "kvtier / Tiers",
    "Health and contents of the tiers, and transfers between them.",
    (_STATE, _CONTENTS, _WAYS, _DRIVE, _HOLDS, _SECRETS),
)
"""For administrators of memory, drives and servers."""
