"""The first page answers whether it is worth it."""

from deploy.source import vllm
from deploy.source.board import Board, Kind, Panel, Query, Section
from deploy.source.query import BOARD, ratio
from kvtier.observe.daemon_metrics import (
    ABSENT_TOKENS,
    ACTUAL_SECONDS,
    ASKED_TOKENS,
    FOUND_TOKENS,
    LOADED_TOKENS,
    LOST_SECONDS,
    REGRET_SECONDS,
    SAVED_SECONDS,
    SSD_WRITTEN_BYTES,
    TIER_STATE,
    TIER_USED_BYTES,
    TRANSFER_BYTES,
)
from kvtier.observe.engine_metrics import (
    PROMPT_TOKENS,
    RESTORE_STALL_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)

__all__ = ["OVERVIEW"]

_ALL = BOARD.over("$__range")
_SAVED = f"sum({_ALL.increase(SAVED_SECONDS)})"
_LOST = f"sum({_ALL.increase(LOST_SECONDS)})"
_ACTUAL = f"sum({_ALL.increase(ACTUAL_SECONDS, of='first_token')})"
_REGRET = f"sum({_ALL.increase(REGRET_SECONDS)})"
_WAITED, _FIRST_TOKENS = (
    f"sum({BOARD.rate(TIME_TO_FIRST_TOKEN_SECONDS, part)}"
    f" or {BOARD.rate(vllm.TIME_TO_FIRST_TOKEN_SECONDS, part)})"
    for part in ("sum", "count")
)
_SPARED = f"sum({BOARD.rate(SAVED_SECONDS)}) - sum({BOARD.rate(LOST_SECONDS)})"

_GLANCE = Section(
    "Is it worth it?",
    (
        Panel(
            title="Time saved",
            description="Waiting for the first token that users were spared, against computing "
            "every prompt, less what restores cost that did not pay. Below zero: turn it off, "
            "or look at the decisions page.",
            queries=(Query(f"{_SAVED} - {_LOST}", "saved"),),
            unit="s",
            kind=Kind.NUMBER,
            span=5,
            below="red",
            thresholds=((0, "green"),),
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="First token, against no cache",
            description="What requests waited for which a restore was weighed, as a share of what "
            "they would have waited had all been computed. 40 % is two and a half times as fast.",
            queries=(Query(ratio(_ACTUAL, f"({_ACTUAL} + {_SAVED} - {_LOST})"), "share"),),
            unit="percentunit",
            kind=Kind.NUMBER,
            span=5,
            thresholds=((0.95, "orange"), (1.0, "red")),
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="Found below the GPU",
            description="Of the tokens that engines asked for after their own cache, those that a "
            "tier had.",
            queries=(
                Query(
                    ratio(
                        f"sum({_ALL.increase(FOUND_TOKENS)})",
                        f"sum({_ALL.increase(ASKED_TOKENS)})",
                    ),
                    "found",
                ),
            ),
            unit="percentunit",
            kind=Kind.NUMBER,
            span=5,
            max=1,
            alert="KvtierEvictionStorm",
        ),
        Panel(
            title="Regret",
            description="What the better road would have saved more, as a share of what was saved. "
            "Small is good; none at all cannot be had.",
            queries=(Query(ratio(_REGRET, f"({_SAVED} + {_REGRET})"), "regret"),),
            unit="percentunit",
            kind=Kind.NUMBER,
            span=5,
            thresholds=((0.2, "orange"), (0.5, "red")),
            alert="KvtierWrongDecisions",
        ),
        Panel(
            title="Alerts",
            description="Alerts of kvtier that fire now.",
            queries=(
                Query(
                    'count(ALERTS{alertname=~"Kvtier.+", alertstate="firing"}) or vector(0)',
                    "firing",
                ),
            ),
            unit="short",
            kind=Kind.NUMBER,
            span=4,
            thresholds=((1, "red"),),
        ),
    ),
)

_FIRST_TOKEN = Section(
    "The wait for the first token",
    (
        Panel(
            title="With and without",
            description="Mean time to first token. kvtier's own engines by where the prompt's KV "
            "came from: `computed` had no help. vLLM tells one for all. `without`: of all engines "
            "together, had nothing been restored, by what the daemons say was saved and lost.",
            queries=(
                Query(BOARD.mean(TIME_TO_FIRST_TOKEN_SECONDS, "by (source)"), "{{source}}"),
                Query(BOARD.mean(vllm.TIME_TO_FIRST_TOKEN_SECONDS, "by ()"), "vLLM"),
                Query(ratio(f"({_WAITED} + {_SPARED})", _FIRST_TOKENS), "without"),
            ),
            unit="s",
            span=12,
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="Saved and lost",
            description="Seconds of waiting in each second, by the tier that blocks came from. Lost"
            " is where computing would have been faster.",
            queries=(
                Query(f"sum by (tier) ({BOARD.rate(SAVED_SECONDS)})", "{{tier}}"),
                Query(f"-sum({BOARD.rate(LOST_SECONDS)})", "lost"),
            ),
            unit="s",
            span=12,
            alert="KvtierRestoresSlowerThanRecompute",
        ),
    ),
)

_OWN_TOKENS, _VLLM_TOKENS = BOARD.rate(PROMPT_TOKENS), vllm.prompt_tokens(BOARD)

_TOKENS = Section(
    "Where prompts come from",
    (
        Panel(
            title="Prompt tokens by source",
            description="Engines of every kind: what each tier supplied first, and what had to be "
            "computed. Of vLLM, what was promised of a tier, also where it did not come.",
            queries=(Query(f"sum by (source) ({_OWN_TOKENS}\nor {_VLLM_TOKENS})", "{{source}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
        ),
        Panel(
            title="Asked of the tiers",
            description="Engines of every kind: tokens that were found, by tier, and those that "
            "were absent.",
            queries=(
                Query(f"sum by (tier) ({BOARD.rate(FOUND_TOKENS)})", "{{tier}}"),
                Query(f"sum({BOARD.rate(ABSENT_TOKENS)})", "absent"),
            ),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
            alert="KvtierEvictionStorm",
        ),
    ),
)

_COST = Section(
    "What it costs",
    (
        Panel(
            title="Engines that stand still",
            description="Share of time in which an engine had requests and computed nothing, since "
            "all waited for their blocks, or to hear whether there are any. vLLM does not count it:"
            " its share is of the moments at which one looked.",
            queries=(
                Query(f"sum by (waits_for) ({BOARD.rate(RESTORE_STALL_SECONDS)})", "{{waits_for}}"),
                Query(f"sum({vllm.stands_still(BOARD)})", "vLLM"),
            ),
            unit="percentunit",
            kind=Kind.STACK,
            thresholds=((0.1, "red"),),
            alert="KvtierRestoreStall",
        ),
        Panel(
            title="KV kept",
            description="Bytes in each tier.",
            queries=(Query(f"sum by (tier) ({BOARD.series(TIER_USED_BYTES)})", "{{tier}}"),),
            unit="bytes",
            kind=Kind.STACK,
        ),
        Panel(
            title="Written to drives, and read back",
            description="What wears the drive, and what it was good for.",
            queries=(
                Query(f"sum({BOARD.rate(SSD_WRITTEN_BYTES)})", "written"),
                Query(
                    f"sum({BOARD.rate(TRANSFER_BYTES, route='ssd_to_cpu', outcome='complete')})",
                    "read back",
                ),
            ),
            unit="Bps",
            alert="KvtierSsdWear",
        ),
        Panel(
            title="Tokens brought back",
            description="Handed to engines, verified, by the tier that they came from.",
            queries=(Query(f"sum by (tier) ({BOARD.rate(LOADED_TOKENS)})", "{{tier}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
            alert="KvtierStoresWithoutLoads",
        ),
        Panel(
            title="Tiers that are not up",
            description="Nodes whose tier is out or degraded.",
            queries=(
                Query(
                    f"sum by (tier, state) ({BOARD.series(TIER_STATE, state=('out', 'degraded'))})",
                    "{{tier}} {{state}}",
                ),
            ),
            unit="short",
            span=12,
            thresholds=((1, "red"),),
            alert="KvtierTierOut",
        ),
    ),
)

OVERVIEW = Board(
    "overview",
    "kvtier / Overview",
    "Is it worth it? Time saved, first tokens with and without, and what it costs.",
    (_GLANCE, _FIRST_TOKEN, _TOKENS, _COST),
)
"""For whoever pays for it."""
