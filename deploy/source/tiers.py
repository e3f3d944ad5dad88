"""The tiers: how they are, what they hold, and what moves between them."""

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
    "How they are",
    (
        Panel(
            title="State",
            description="Nodes in each state. `out` is left alone until it answers; `degraded` "
            "serves, but not all of what it is for; `drained` (read and not written) and "
            "`detached` (not used) are by an operator, `off` by configuration.",
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
            description="What stands before a tier: closed, calls go through; open, none does; "
            "half open, a probe does.",
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
            description="Nodes whose drive takes no writes for want of space, whose write budget "
            "is used up, and that go around the page cache.",
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
            title="Faults, in an hour",
            description="Exceptions in tasks that nobody waits for, and samples without a series.",
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
    "What they hold",
    (
        Panel(
            title="Used",
            description="Bytes allocated, padding and headers included. Full is how a cache should "
            "be.",
            queries=(Query(f"sum by (tier) ({BOARD.series(TIER_USED_BYTES)})", "{{tier}}"),),
            unit="bytes",
        ),
        Panel(
            title="Used of the capacity",
            description="No alert hangs on this. A remote tier has no capacity of its own.",
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
            description="Blocks that a tier would serve.",
            queries=(Query(f"sum by (tier) ({BOARD.series(TIER_BLOCKS)})", "{{tier}}"),),
            unit="short",
        ),
        Panel(
            title="Offered blocks, by answer",
            description="What the tiers said to blocks that were offered to them.",
            queries=(Query(BOARD.known(ADMISSION_BLOCKS, "outcome"), "{{outcome}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Not taken, by rule",
            description="worth and budget are choices; full is a way that was too narrow.",
            queries=(Query(f"sum by (rule) ({BOARD.rate(REFUSED_BLOCKS)})", "{{rule}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Evicted, and demoted before",
            description="Blocks that left a tier, and those written to a slower one before. "
            "Harm is only what is asked for again: see missed blocks on the decisions page.",
            queries=(
                Query(f"sum by (tier) ({BOARD.rate(EVICTED_BLOCKS)})", "{{tier}}"),
                Query(f"sum by (tier) ({BOARD.rate(DEMOTED_BLOCKS)})", "to {{tier}}"),
            ),
            unit="si:blocks/s",
            span=6,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="Evicted, by reason",
            description="capacity: room for others; expired: too old; corrupt: failed a check; "
            "lost: its tier went away; dropped: by an operator.",
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
    "What moves",
    (
        Panel(
            title="Bytes by route",
            description="Transfers that were completed.",
            queries=(
                Query(
                    f"sum by (route) ({BOARD.rate(TRANSFER_BYTES, outcome='complete')})",
                    "{{route}}",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Time of a transfer, P95",
            description="Between the CPU tier and the slower ones, without the wait before it.",
            queries=(Query(BOARD.quantile(0.95, TRANSFER_SECONDS, "by (le, route)"), "{{route}}"),),
            unit="s",
            alert="KvtierLoadsFail",
        ),
        Panel(
            title="Wait before it, P95",
            description="Time that a block waited for the start of its transfer. Where it is longer"
            " than the transfer, the tier is the bottleneck.",
            queries=(
                Query(BOARD.quantile(0.95, TRANSFER_QUEUE_SECONDS, "by (le, route)"), "{{route}}"),
            ),
            unit="s",
            alert="KvtierReadsWait",
        ),
        Panel(
            title="Time to copy a block, P95",
            description="Between an engine's pool and the CPU tier, as kvtier's own engines do it.",
            queries=(Query(BOARD.quantile(0.95, COPY_SECONDS, "by (le, route)"), "{{route}}"),),
            unit="s",
        ),
        Panel(
            title="Bytes that did not arrive",
            description="Transfers that failed, came too late, or were not wanted any more.",
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
            title="Blocks that a tier should have served",
            description="checksum, header, length and identity stay at zero on sound hardware.",
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
            title="Written, by what for",
            description="moved: to keep blocks when their segment is reclaimed. The sum over blocks"
            " is the write amplification.",
            queries=(Query(f"sum by (kind) ({BOARD.rate(SSD_WRITTEN_BYTES)})", "{{kind}}"),),
            unit="Bps",
            kind=Kind.STACK,
            span=6,
            alert="KvtierSsdWear",
        ),
        Panel(
            title="Write budget",
            description="Bytes that may be written now, and in a day. Both are 0 without a budget.",
            queries=(
                Query(f"sum({BOARD.series(SSD_WRITE_BUDGET_LEFT_BYTES)})", "left"),
                Query(f"sum({BOARD.series(SSD_WRITE_BUDGET_BYTES)})", "a day"),
            ),
            unit="bytes",
            span=6,
            alert="KvtierWriteBudgetUsedUp",
        ),
        Panel(
            title="Verified unasked",
            description="What the scrub reads whenever no request waits for the drive.",
            queries=(Query(f"sum({BOARD.rate(SCRUBBED_BYTES)})", "scrubbed"),),
            unit="Bps",
            span=6,
        ),
        Panel(
            title="Damaged blocks, in an hour",
            description="Found by a read, a scrub or fsck, or by an engine that copied them, and "
            "taken out of service.",
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
    "Who holds on to what",
    (
        Panel(
            title="Pins and leases",
            description="Both are 0 when nobody asks for anything.",
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
            description="Engines attached, by the way that bytes go.",
            queries=(Query(f"sum by (transport) ({BOARD.series(SESSIONS)})", "{{transport}}"),),
            unit="short",
            span=6,
            alert="KvtierEngineDetached",
        ),
        Panel(
            title="Kept on request",
            description="Bytes of the CPU tier that pins, priorities, times to live and waiting "
            "requests keep.",
            queries=(Query(f"sum({BOARD.series(RETAINED_BYTES)})", "retained"),),
            unit="bytes",
            span=6,
        ),
        Panel(
            title="Brought up before they were asked for",
            description="Blocks that came into the CPU tier for requests that wait, and for warm.",
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
            title="Certificates in force",
            description="Time until the first of all daemons' expires: that of the operators' port,"
            " and the authority of the remote tier.",
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
            title="Secrets refused",
            description="Daemons and engines in whose file lies what cannot be used.",
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
    "How the tiers are, what they hold, and what moves between them.",
    (_STATE, _CONTENTS, _WAYS, _DRIVE, _HOLDS, _SECRETS),
)
"""For whoever looks after memory, drives and servers."""
