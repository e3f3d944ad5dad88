"""What the daemon decides, what it expected of it, and what came of it."""

from deploy.source.board import Board, Kind, Panel, Query, Section
from deploy.source.query import BOARD, ratio
from kvtier.observe.daemon_metrics import (
    ACTUAL_SECONDS,
    ANNOUNCED_REQUESTS,
    DECISIONS,
    GATE_SHARE,
    GUARDED,
    LEFT_TOKENS,
    LOOKUP_BLOCKS,
    LOOKUP_SECONDS,
    LOOP_SILENT_SECONDS,
    LOST_SECONDS,
    MISSED_BLOCKS,
    ORDERED_TOKENS,
    POLICY_SECONDS,
    PREDICTED_SECONDS,
    PREFILL_TOKENS_PER_SECOND,
    PROBED_LOOKUPS,
    REGRET_SECONDS,
    REMEMBERED_BLOCKS,
    RESTORE_BYTES_PER_SECOND,
    SAVED_MEASURED_SECONDS,
    SAVED_SECONDS,
    UNLOADED_TOKENS,
)

__all__ = ["DECISIONS_BOARD"]

_DECIDED = Section(
    "What is decided",
    (
        Panel(
            title="Requests by decision",
            description="Those for which something could have been restored. all, part and split "
            "restore; cost, risk and guard compute; limit is the request's own wish.",
            queries=(Query(BOARD.known(DECISIONS, "reason"), "{{reason}}"),),
            unit="reqps",
            kind=Kind.STACK,
            span=12,
        ),
        Panel(
            title="Found, and left to compute",
            description="Tokens that were there and are computed nevertheless, by why.",
            queries=(Query(f"sum by (reason) ({BOARD.rate(LEFT_TOKENS)})", "{{reason}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
            alert="KvtierTierGuarded",
        ),
    ),
)

_OUTCOMES = Section(
    "What came of it",
    (
        Panel(
            title="Took, of what was expected",
            description="1 is a model that is right on average. Above it, restores take longer than"
            " they were thought to.",
            queries=(
                Query(
                    ratio(
                        f"sum by (of) ({BOARD.rate(ACTUAL_SECONDS)})",
                        f"sum by (of) ({BOARD.rate(PREDICTED_SECONDS)})",
                    ),
                    "{{of}}",
                ),
            ),
            unit="percentunit",
            max=3,
            alert="KvtierWrongDecisions",
        ),
        Panel(
            title="Saved and lost, each second",
            description="Time that restores saved and lost, by the tier that the blocks came from. "
            "'saved, measured' is the part for which computing the same prompt was measured.",
            queries=(
                Query(f"sum by (tier) ({BOARD.rate(SAVED_SECONDS)})", "saved, {{tier}}"),
                Query(f"sum({BOARD.rate(SAVED_MEASURED_SECONDS)})", "saved, measured"),
                Query(f"-sum by (tier) ({BOARD.rate(LOST_SECONDS)})", "lost, {{tier}}"),
            ),
            unit="s",
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="Regret, each second",
            description="What the better road would have saved, by the road that was taken.",
            queries=(Query(f"sum by (taken) ({BOARD.rate(REGRET_SECONDS)})", "took {{taken}}"),),
            unit="s",
            kind=Kind.STACK,
            alert="KvtierWrongDecisions",
        ),
    ),
)

_MISSES = Section(
    "What was not there",
    (
        Panel(
            title="Lookups, by answer",
            description="pending is being stored or read just now, and counts as found.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(LOOKUP_BLOCKS)})", "{{outcome}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
        ),
        Panel(
            title="Missed blocks, by what became of them",
            description="never_stored is new to everyone. evicted wants more memory, a larger drive"
            " or fewer bytes in them; refused_budget is the gate before the SSD.",
            queries=(Query(BOARD.known(MISSED_BLOCKS, "fate"), "{{fate}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="Ordered, and not loaded",
            description="Tokens that engines waited for, and those of them that they had to compute"
            " nevertheless, by why.",
            queries=(
                Query(f"sum({BOARD.rate(ORDERED_TOKENS)})", "ordered"),
                Query(f"sum by (reason) ({BOARD.rate(UNLOADED_TOKENS)})", "{{reason}}"),
            ),
            unit="si:tok/s",
            alert="KvtierLoadsFail",
        ),
    ),
)

_BELIEFS = Section(
    "What is believed",
    (
        Panel(
            title="Bandwidth of each route",
            description="As the cost model expects it, with one transfer under way; per node.",
            queries=(
                Query(
                    f"avg by (route) ({BOARD.series(RESTORE_BYTES_PER_SECOND)} > 0)", "{{route}}"
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Speed of computing a prompt",
            description="Of 4,096 tokens, as the cost model expects it of the model that reported "
            "last.",
            queries=(
                Query(f"avg({BOARD.series(PREFILL_TOKENS_PER_SECOND)} > 0)", "mean of the nodes"),
            ),
            unit="si:tok/s",
        ),
        Panel(
            title="Tiers left alone",
            description="Nodes on which restoring from a tier lately took longer than computing.",
            queries=(Query(f"sum by (tier) ({BOARD.series(GUARDED)})", "{{tier}}"),),
            unit="short",
            thresholds=((1, "orange"),),
            alert="KvtierTierGuarded",
        ),
        Panel(
            title="Gate before the SSD",
            description="Share of what leaves the CPU tier that is written. A write budget that "
            "runs low lowers it.",
            queries=(Query(f"avg({BOARD.series(GATE_SHARE)})", "mean of the nodes"),),
            unit="percentunit",
            max=1,
            alert="KvtierWriteBudgetUsedUp",
        ),
        Panel(
            title="Blocks remembered",
            description="Whose use is known, whether they are here or not: what eviction learns "
            "from.",
            queries=(Query(f"sum({BOARD.series(REMEMBERED_BLOCKS)})", "remembered"),),
            unit="short",
        ),
        Panel(
            title="Announced requests",
            description="Requests that engines told of before their turn.",
            queries=(Query(f"sum({BOARD.rate(ANNOUNCED_REQUESTS)})", "announced"),),
            unit="reqps",
        ),
    ),
)

_PRICE = Section(
    "What deciding costs",
    (
        Panel(
            title="Time of a lookup",
            description="In the daemon, whatever its length. An engine gives up after "
            "client.lookup_deadline.",
            queries=(
                Query(BOARD.quantile(0.5, LOOKUP_SECONDS, "by (le)"), "P50"),
                Query(BOARD.quantile(0.99, LOOKUP_SECONDS, "by (le)"), "P99"),
            ),
            unit="s",
            span=6,
        ),
        Panel(
            title="Time of a decision",
            description="What to restore, or what to keep.",
            queries=(
                Query(BOARD.quantile(0.5, POLICY_SECONDS, "by (le)"), "P50"),
                Query(BOARD.quantile(0.99, POLICY_SECONDS, "by (le)"), "P99"),
            ),
            unit="s",
            span=6,
        ),
        Panel(
            title="Remote tier asked, or not",
            description="Lookups that ended before their prompt did, by whether the server was "
            "asked for the rest and, if not, why.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(PROBED_LOOKUPS)})", "{{outcome}}"),),
            unit="reqps",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Silence of the loop",
            description="Time since a daemon's loop last moved, the longest of all. It moves once "
            "a second; while it stands still, engines get no answer.",
            queries=(Query(f"max({BOARD.series(LOOP_SILENT_SECONDS)})", "longest"),),
            unit="s",
            span=6,
            thresholds=((10, "red"),),
            alert="KvtierLoopStuck",
        ),
    ),
)

DECISIONS_BOARD = Board(
    "decisions",
    "kvtier / Decisions",
    "What the daemon decides, what it expected, and what came of it.",
    (_DECIDED, _OUTCOMES, _MISSES, _BELIEFS, _PRICE),
)
"""For whoever asks why."""
