"""The overview dashboard: whether kvtier is worth its cost."""

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
            description="Time to first token saved compared with computing every prompt, less the "
            "time that restores lost. If it is below zero, turn kvtier off, or look at "
            "*Decisions*.",
            queries=(Query(f"{_SAVED} - {_LOST}", "saved"),),
            unit="s",
            kind=Kind.NUMBER,
            span=5,
            below="red",
            thresholds=((0, "green"),),
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="Time to first token, relative to no cache",
            description="Of requests for which something could be restored: time to first token as "
            "a share of computing everything. 40 % is two and a half times as fast.",
            queries=(Query(ratio(_ACTUAL, f"({_ACTUAL} + {_SAVED} - {_LOST})"), "share"),),
            unit="percentunit",
            kind=Kind.NUMBER,
            span=5,
            thresholds=((0.95, "orange"), (1.0, "red")),
            alert="KvtierRestoresSlowerThanRecompute",
        ),
        Panel(
            title="Found below the GPU",
            description="Share of the tokens missing in the engines' own caches that a tier had.",
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
            description="What the other path would have saved in addition, as a share of the "
            "savings. Small is good; zero is unattainable.",
            queries=(Query(ratio(_REGRET, f"({_SAVED} + {_REGRET})"), "regret"),),
            unit="percentunit",
            kind=Kind.NUMBER,
            span=5,
            thresholds=((0.2, "orange"), (0.5, "red")),
            alert="KvtierWrongDecisions",
        ),
        Panel(
            title="Alerts",
            description="kvtier alerts that are firing.",
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
    "Time to first token",
    (
        Panel(
            title="With and without",
            description="Mean time to first token. kvtier's own engines by source of the prompt's "
            "KV; vLLM in total. `without`: of all engines together without restoring, from the "
            "savings and losses that daemons report.",
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
            description="Seconds saved per second, by the tier that blocks came from. Lost: "
            "computing would have been faster.",
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
    "Sources of prompts",
    (
        Panel(
            title="Prompt tokens by source",
            description="All engines: tokens by the tier that supplied them, and tokens computed. "
            "For vLLM, tokens promised by a tier, including those that did not arrive.",
            queries=(Query(f"sum by (source) ({_OWN_TOKENS}\nor {_VLLM_TOKENS})", "{{source}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
        ),
        Panel(
            title="Tokens looked up in the tiers",
            description="All engines: tokens found, by tier, and tokens absent.",
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
    "Cost",
    (
        Panel(
            title="Engine stalls",
            description="Share of time in which an engine had requests but computed nothing, "
            "because all waited for blocks or for a lookup. vLLM does not count this; its share "
            "is estimated from samples.",
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
            title="KV stored",
            description="Bytes in each tier.",
            queries=(Query(f"sum by (tier) ({BOARD.series(TIER_USED_BYTES)})", "{{tier}}"),),
            unit="bytes",
            kind=Kind.STACK,
        ),
        Panel(
            title="Drive writes, and reads",
            description="Writes that wear the drive, and the reads that they made possible.",
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
            title="Tokens restored",
            description="Verified and loaded by engines, by the tier that they came from.",
            queries=(Query(f"sum by (tier) ({BOARD.rate(LOADED_TOKENS)})", "{{tier}}"),),
            unit="si:tok/s",
            kind=Kind.STACK,
            span=12,
            alert="KvtierStoresWithoutLoads",
        ),
        Panel(
            title="Tiers that are not up",
            description="Nodes with a tier that is out or degraded.",
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
    "Is it worth it? Time saved, time to first token with and without kvtier, and its cost.",
    (_GLANCE, _FIRST_TOKEN, _TOKENS, _COST),
)
"""For the owner of the service."""
