"""The decisions dashboard: decisions, predictions and outcomes."""

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
    "Decisions",
    (
        Panel(
            title="Requests by decision",
            description="Requests for which something could be restored. all, part and split "
            "restore; cost, risk and guard compute; limit is set by the request.",
            queries=(Query(BOARD.known(DECISIONS, "reason"), "{{reason}}"),),
            unit="reqps",
            kind=Kind.STACK,
            span=12,
        ),
        Panel(
            title="Found but computed",
            description="Tokens that were found but computed, by reason.",
            queries=(Query(f"sum by (reason) ({BOARD.rate(LEFT_TOKENS)})", "{{reason}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
            alert="KvtierTierGuarded",
        ),
    ),
)

_OUTCOMES = Section(
    "Outcomes",
    (
        Panel(
            title="Actual time, relative to predicted",
            description="100 %: predictions are right on average. Above: restores take longer than "
            "predicted.",
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
            title="Saved and lost per second",
            description="Time that restores saved and lost, by the tier that blocks came from. "
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
            title="Regret per second",
            description="What the other path would have saved, by the path taken.",
            queries=(Query(f"sum by (taken) ({BOARD.rate(REGRET_SECONDS)})", "took {{taken}}"),),
            unit="s",
            kind=Kind.STACK,
            alert="KvtierWrongDecisions",
        ),
    ),
)

_MISSES = Section(
    "Misses",
    (
        Panel(
            title="Looked-up blocks, by answer",
            description="pending: being stored or read at the moment; counts as found.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(LOOKUP_BLOCKS)})", "{{outcome}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
        ),
        Panel(
            title="Missed blocks, by fate",
            description="never_stored: new. evicted: needs more memory, a larger drive, or fewer "
            "bytes written; refused_budget: held back by the gate in front of the SSD.",
            queries=(Query(BOARD.known(MISSED_BLOCKS, "fate"), "{{fate}}"),),
            unit="si:blocks/s",
            kind=Kind.STACK,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="Ordered but not loaded",
            description="Tokens that engines waited for, and those that they had to compute "
            "anyway, by reason.",
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
    "Cost model and policy",
    (
        Panel(
            title="Bandwidth of each route",
            description="Predicted by the cost model, with one transfer in flight; mean of the "
            "nodes.",
            queries=(
                Query(
                    f"avg by (route) ({BOARD.series(RESTORE_BYTES_PER_SECOND)} > 0)", "{{route}}"
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Prefill speed",
            description="Predicted by the cost model for a prompt of 4,096 tokens, of the model "
            "that reported last.",
            queries=(
                Query(f"avg({BOARD.series(PREFILL_TOKENS_PER_SECOND)} > 0)", "mean of the nodes"),
            ),
            unit="si:tok/s",
        ),
        Panel(
            title="Tiers closed by the guard",
            description="Nodes on which restoring from a tier recently took longer than computing.",
            queries=(Query(f"sum by (tier) ({BOARD.series(GUARDED)})", "{{tier}}"),),
            unit="short",
            thresholds=((1, "orange"),),
            alert="KvtierTierGuarded",
        ),
        Panel(
            title="SSD gate",
            description="Share of the blocks leaving the CPU tier that is written. A low write "
            "budget reduces it.",
            queries=(Query(f"avg({BOARD.series(GATE_SHARE)})", "mean of the nodes"),),
            unit="percentunit",
            max=1,
            alert="KvtierWriteBudgetUsedUp",
        ),
        Panel(
            title="Blocks in the history",
            description="Blocks whose uses are known, cached or not; eviction learns from them.",
            queries=(Query(f"sum({BOARD.series(REMEMBERED_BLOCKS)})", "remembered"),),
            unit="short",
        ),
        Panel(
            title="Announced requests",
            description="Requests that engines announced while they were queued.",
            queries=(Query(f"sum({BOARD.rate(ANNOUNCED_REQUESTS)})", "announced"),),
            unit="reqps",
        ),
    ),
)

_PRICE = Section(
    "Overhead",
    (
        Panel(
            title="Lookup time",
            description="Time in the daemon, for prompts of any length. An engine gives up after "
            "client.lookup_deadline.",
            queries=(
                Query(BOARD.quantile(0.5, LOOKUP_SECONDS, "by (le)"), "P50"),
                Query(BOARD.quantile(0.99, LOOKUP_SECONDS, "by (le)"), "P99"),
            ),
            unit="s",
            span=6,
        ),
        Panel(
            title="Decision time",
            description="Time to decide what to restore, or what to keep.",
            queries=(
                Query(BOARD.quantile(0.5, POLICY_SECONDS, "by (le)"), "P50"),
                Query(BOARD.quantile(0.99, POLICY_SECONDS, "by (le)"), "P99"),
            ),
            unit="s",
            span=6,
        ),
        Panel(
            title="Lookups in the remote tier",
            description="Lookups that did not find the whole prompt, by whether the server was "
            "asked for the rest and, if not, why.",
            queries=(Query(f"sum by (outcome) ({BOARD.rate(PROBED_LOOKUPS)})", "{{outcome}}"),),
            unit="reqps",
            kind=Kind.STACK,
            span=6,
        ),
        Panel(
            title="Event loop stall",
            description="Longest time since a daemon's event loop last moved. It moves at least "
            "once a second; while it is stuck, engines get no answer.",
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
    "What the daemon decided, what it predicted, and the outcome.",
    (_DECIDED, _OUTCOMES, _MISSES, _BELIEFS, _PRICE),
)
"""For explaining hits and misses."""
