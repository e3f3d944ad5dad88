"""Creates the status document, which ``kvtier stat`` and the status page show."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvtier import __version__
from kvtier.core.key_space_usage import BlockTotals
from kvtier.core.plan import PlanReason
from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, TierName
from kvtier.daemon.persistence.key_spaces import KeySpaces
from kvtier.daemon.policies import Policies
from kvtier.daemon.status.benefit import BenefitAccount
from kvtier.daemon.status.counter_history import CounterHistory, CounterSnapshot, Samples, grown
from kvtier.daemon.status.health import NodeHealth, describe_health
from kvtier.node.state.decision_log import DecisionLog, LoggedDecision
from kvtier.node.state.session import Session
from kvtier.observe.daemon_metrics import (
    ABSENT_TOKENS,
    ASKED_TOKENS,
    BACKGROUND_FAULTS,
    FOUND_TOKENS,
    LEFT_TOKENS,
    LOADED_TOKENS,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    ORDERED_TOKENS,
    PROBED_LOOKUPS,
    TRANSFER_BYTES,
    TRANSFER_ROUTES,
    TRANSFER_SECONDS,
    UNLOADED_TOKENS,
)
from kvtier.observe.metrics import Metric
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import Health

__all__ = ["Status", "recent_requests"]

_KEY_SPACES_SHOWN_MAX = 256
"""As many as have known names."""

_REQUESTS_SHOWN_MAX = 32
"""More than a terminal shows; each one costs ten microseconds per document."""

_LATELY_S = 10.0
"""Time over which rates are computed: long enough that they can be read."""

_MINUTE_S = 60.0
"""Time over which the benefit is computed: long enough to be meaningful, and still current."""


class Status:
    """Creates the document."""

    def __init__(
        self,
        driver: Driver,
        health: NodeHealth,
        spaces: KeySpaces,
        policies: Policies,
        block_tokens: int,
        *,
        config: Callable[[], dict[str, Any]] = dict,
        unmeasured: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """``config`` returns the config section, ``unmeasured`` why tiers were not measured."""
        self._config = config
        self._unmeasured = unmeasured
        self._driver = driver
        self._account = BenefitAccount(driver.node, policies)
        self._health = health
        self._spaces = spaces
        self._block_tokens = block_tokens
        self._start_s = time.monotonic()
        self._counter_history = CounterHistory()

    async def note(self) -> None:
        """Take a snapshot of the counters; call it every ``SNAPSHOT_PERIOD_S``."""
        self._counter_history.note(self._snapshot(Samples(self._driver.node.metrics.registry)))

    def page(self) -> dict[str, Any]:
        """Return the document with the counter history for the status page."""
        return self.document() | {"history": self._counter_history.steps()}

    def document(self) -> dict[str, Any]:
        """Return the document, of JSON values."""
        node = self._driver.node
        samples = Samples(node.metrics.registry)
        now = self._snapshot(samples)
        lately, minute = (
            self._counter_history.before(now, seconds) for seconds in (_LATELY_S, _MINUTE_S)
        )
        now_ns = time.monotonic_ns()
        held = {tier: node.cache.index.held_in(tier) for tier in LOWER_TIERS}
        return {
            "version": __version__,
            "boot": node.boot,
            "pid": os.getpid(),
            "time_s": round(time.time(), 3),
            "uptime_s": round(now.counters["seconds"], 3),
            "config": self._config(),
            "worth": self._account.worth(samples),
            "grown": {
                "lately": grown(lately.counters, now.counters),
                "minute": grown(minute.counters, now.counters),
            },
            "tiers": self._tiers(held),
            "key_spaces": self._key_spaces(held),
            "tokens": _tokens(samples),
            "lookup_blocks": _lookup_blocks(samples),
            "miss_reasons": _miss_reasons(samples),
            "probed_lookups": samples.counts(PROBED_LOOKUPS),
            "transfers": _transfers(samples),
            "policy": self._account.policy(),
            "cost": self._account.cost(now_ns) | {"unmeasured": self._unmeasured()},
            "background_faults": samples.counts(BACKGROUND_FAULTS),
            "engines": [_engine(each, lately, now) for each in node.sessions.values()],
            "requests": recent_requests(node.decision_log, now_ns),
            "leases": node.num_leases,
            "pins": node.num_pins,
        }

    def _snapshot(self, samples: Samples) -> CounterSnapshot:
        uptime_s = time.monotonic() - self._start_s
        return CounterSnapshot.of(uptime_s, samples, self._driver.node.sessions.values())

    def _tiers(
        self, held: Mapping[TierName, Mapping[bytes, BlockTotals]]
    ) -> dict[str, dict[str, Any]]:
        sessions = list(self._driver.node.sessions.values())
        lower = {TierName.CPU: self._cpu()} | {name: self._slow(name) for name in SLOW_TIERS}
        for tier, document in lower.items():
            blocks = {key_space: each.num_blocks for key_space, each in held[tier].items()}
            document["blocks"] = sum(blocks.values())
            document["tokens"] = sum(
                count * self._tokens_of(key_space) for key_space, count in blocks.items()
            )
        return {"gpu": _gpu(sessions)} | {tier.value: each for tier, each in lower.items()}

    def _key_spaces(
        self, held: Mapping[TierName, Mapping[bytes, BlockTotals]]
    ) -> list[dict[str, Any]]:
        """Return the key spaces with a block or an engine on this node, largest first."""
        attached = {session.key_space for session in self._driver.node.sessions.values()}

        def num_bytes(key_space: bytes) -> int:
            return sum(held[tier].get(key_space, BlockTotals()).num_bytes for tier in LOWER_TIERS)

        found = attached.union(*held.values())
        most = sorted(found, key=lambda each: (-num_bytes(each), each))[:_KEY_SPACES_SHOWN_MAX]
        return [
            {
                "key_space": key_space.hex(),
                "names": list(named.names) if (named := self._spaces.get(key_space)) else [],
                "tiers": {
                    tier.value: {
                        "blocks": held[tier].get(key_space, BlockTotals()).num_blocks,
                        "bytes": held[tier].get(key_space, BlockTotals()).num_bytes,
                    }
                    for tier in LOWER_TIERS
                },
            }
            for key_space in most
        ]

    def _tokens_of(self, key_space: bytes) -> int:
        """Return the tokens per block that the engines declared."""
        named = self._spaces.get(key_space)
        return named.block_tokens if named else self._block_tokens

    def _cpu(self) -> dict[str, Any]:
        slots = self._driver.node.cache.slots
        return _state_of(self._health.of(TierName.CPU)) | {
            "capacity_bytes": slots.capacity_bytes,
            "used_bytes": slots.used_bytes(),
            "reserved_bytes": slots.reserved_bytes,
        }

    def _slow(self, name: TierName) -> dict[str, Any]:
        tier = self._driver.tiers.get(name)
        if tier is None:
            return _state_of(self._health.of(name)) | {"capacity_bytes": 0, "used_bytes": 0}
        lane = self._driver.node.transfers.lanes[name]
        usage = tier.usage()
        return _state_of(self._health.of(name)) | {
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "queued_reads": len(lane.reads),
            "queued_writes": len(lane.writes),
            "queued_bytes": lane.read_bytes,
            "in_flight": len(lane.in_flight),
            "breaker": tier.state.value,
            "hung_calls": len(self._driver.executors[name].late_calls()),
            "detail": dict(usage.detail),
        }


def _state_of(health: Health | None) -> dict[str, Any]:
    return describe_health(health) if health else {"state": "off", "reason": ""}


def _gpu(sessions: list[Session]) -> dict[str, Any]:
    reports = [session.report for session in sessions]
    capacity_bytes = sum(report.capacity_bytes for report in reports)
    state = "up" if capacity_bytes else "unknown" if sessions else "off"
    return {
        "state": state,
        "reason": "no engine reports its GPU memory" if state == "unknown" else "",
        "capacity_bytes": capacity_bytes,
        "used_bytes": sum(report.used_bytes for report in reports),
        "blocks": sum(s.report.used_tokens // s.layout.block_tokens for s in sessions),
        "tokens": sum(report.used_tokens for report in reports),
        "hit_tokens": sum(report.hit_tokens for report in reports),
    }


def _engine(session: Session, before: CounterSnapshot, now: CounterSnapshot) -> dict[str, Any]:
    counters = now.engines[session.token]
    return {
        "engine": session.engine,
        "pid": session.pid,
        "transport": session.transport,
        "key_space": session.key_space.hex(),
        "block_tokens": session.layout.block_tokens,
        "block_bytes": session.layout.block_bytes,
        "gpu_used_bytes": session.report.used_bytes,
        "gpu_capacity_bytes": session.report.capacity_bytes,
        "gpu_used_tokens": session.report.used_tokens,
        "running": session.load.num_running,
        "waiting_tokens": session.load.waiting_tokens,
        "loads": len(session.loads),
        "stores": len(session.stores),
        **{name: round(count, 6) for name, count in counters.items()},
        "lately": grown(before.engines.get(session.token, {}), counters),
    }


def _lookup_blocks(samples: Samples) -> dict[str, Any]:
    by_tier = {
        outcome: {
            tier.value: samples.count(LOOKUP_BLOCKS, outcome=outcome, tier=tier)
            for tier in LOWER_TIERS
        }
        for outcome in ("hit", "pending")
    }
    return by_tier | {"miss": samples.count(LOOKUP_BLOCKS, outcome="miss")}


def _tokens(samples: Samples) -> dict[str, Any]:
    """Return the token counts by outcome; docs/operations explains their sums."""
    return {
        "asked": samples.count(ASKED_TOKENS),
        "found": _by_tier(samples, FOUND_TOKENS),
        "absent": samples.count(ABSENT_TOKENS),
        "left": samples.counts(LEFT_TOKENS),
        "ordered": samples.count(ORDERED_TOKENS),
        "loaded": _by_tier(samples, LOADED_TOKENS),
        "unloaded": samples.counts(UNLOADED_TOKENS),
    }


def _by_tier(samples: Samples, metric: Metric) -> dict[str, int]:
    return {tier.value: samples.count(metric, tier=tier) for tier in LOWER_TIERS}


def _miss_reasons(samples: Samples) -> dict[str, dict[str, int]]:
    """Return why each tier did not serve blocks that it should have."""
    return {tier.value: samples.counts(MISS_BLOCKS, tier=tier) for tier in LOWER_TIERS}


def _transfers(samples: Samples) -> dict[str, dict[str, float | None]]:
    """Return the transfers of each route; the times of engines' copies are in their own metrics."""
    return {route: _transfer(samples, route) for route in TRANSFER_ROUTES}


def _transfer(samples: Samples, route: str) -> dict[str, float | None]:
    is_timed = "gpu" not in route
    return {
        "bytes": samples.count(TRANSFER_BYTES, route=route, outcome="complete"),
        "failed_bytes": samples.count(TRANSFER_BYTES, route=route, outcome="failed"),
        "seconds": samples.sum(TRANSFER_SECONDS, "_sum", route=route) if is_timed else None,
        "count": samples.count(TRANSFER_SECONDS, "_count", route=route) if is_timed else None,
    }


def recent_requests(decision_log: DecisionLog, now_ns: int) -> list[dict[str, Any]]:
    """Return the most recent requests, newest first."""
    return [_recent_request(each, now_ns) for each in decision_log.latest(_REQUESTS_SHOWN_MAX)]


def _recent_request(decision: LoggedDecision, now_ns: int) -> dict[str, Any]:
    """Return one request; unknown values are None."""
    ask, plan, outcome, evaluation = (
        decision.ask,
        decision.plan,
        decision.outcome,
        decision.evaluation,
    )
    is_compared = plan.reason is not PlanReason.NOTHING and plan.total_s > 0
    saved_s = None
    if evaluation is not None:
        saved_s = sum(evaluation.saved_s.values(), 0.0) - sum(evaluation.lost_s.values())
    return {
        "decision": decision.number,
        "request_id": decision.request_id,
        "engine": decision.engine,
        "age_s": round((now_ns - decision.at_ns) / 1e9, 1),
        "prompt_tokens": ask.num_tokens,
        "gpu_tokens": ask.first_token,
        "found_tokens": _tokens_by_tier(decision.found, ask.block_tokens),
        "planned_tokens": plan.num_blocks * ask.block_tokens,
        "reason": plan.reason.value,
        "predicted_s": _seconds(plan.total_s if is_compared else None),
        "recompute_s": _seconds(plan.recompute_total_s if is_compared else None),
        "restored_tokens": _tokens_by_tier(outcome.tiers, ask.block_tokens) if outcome else None,
        "first_token_s": _seconds(outcome.ttft_s if outcome else None),
        "saved_s": _seconds(saved_s),
        "regret_s": _seconds(evaluation.regret_s if evaluation else None),
        "cold_s": _seconds(evaluation.cold_s if evaluation else None),
    }


def _tokens_by_tier(runs: Iterable[tuple[TierName, int]], block_tokens: int) -> dict[str, int]:
    blocks: Counter[TierName] = Counter()
    for tier, length in runs:
        blocks[tier] += length
    return {tier.value: blocks[tier] * block_tokens for tier in LOWER_TIERS}


def _seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
