"""Sets the daemon's gauges once a second.

A scrape returns the last values without the loop, so that it works even if the loop is stuck.
"""

import time
from collections.abc import Mapping

from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.tier_registry import STORE_TIER
from kvtier.daemon.policies import Policies
from kvtier.daemon.status.benefit import ROUTES
from kvtier.daemon.status.health import NodeHealth
from kvtier.observe.daemon_metrics import (
    GATE_SHARE,
    GUARDED,
    LEASES,
    PINS,
    PREFILL_TOKENS_PER_SECOND,
    REMEMBERED_BLOCKS,
    RESTORE_BYTES_PER_SECOND,
    RETAINED_BYTES,
    SESSIONS,
    SSD_DIRECT_IO,
    SSD_READ_ONLY,
    SSD_WRITE_BUDGET_BYTES,
    SSD_WRITE_BUDGET_LEFT_BYTES,
    SSD_WRITE_BUDGET_STATE,
    SSD_WRITTEN_BYTES,
    TIER_BLOCKS,
    TIER_CAPACITY_BYTES,
    TIER_USED_BYTES,
)
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import TierUsage

__all__ = ["Gauges"]

_PROMPT_TOKENS = 4096
"""Prompt length for the reported prefill speed, as in the metric's description."""

_NOTHING = TierUsage(num_blocks=0, used_bytes=0, capacity_bytes=0)


class Gauges:
    """Gauges of the node and tiers of ``driver``; for the loop's thread."""

    def __init__(self, driver: Driver, health: NodeHealth, policies: Policies) -> None:
        self._driver = driver
        self._health = health
        self._policies = policies
        self._gates = policies.admission.gates
        self._metrics = driver.node.metrics
        self._written_bytes = dict.fromkeys(dict(SSD_WRITTEN_BYTES.labels)["kind"], 0)
        """Bytes already added to the counters, by kind."""

    async def refresh(self) -> None:
        """Set all gauges from existing counts, without a scan of the index."""
        self._health.refresh()
        self._refresh_node()
        self._refresh_tiers()
        self._refresh_model(time.monotonic_ns())

    def _refresh_node(self) -> None:
        node, metrics = self._driver.node, self._metrics
        metrics.set(LEASES, node.num_leases)
        metrics.set(PINS, node.num_pins)
        transports = [session.transport for session in node.sessions.values()]
        for transport in dict(SESSIONS.labels)["transport"]:
            metrics.set(SESSIONS, transports.count(transport), transport=transport)
        metrics.set(REMEMBERED_BLOCKS, self._policies.history.num_remembered)
        metrics.set(RETAINED_BYTES, node.retention.retained_bytes())
        gate = self._gates.get(STORE_TIER)
        metrics.set(GATE_SHARE, gate.share if gate else 1.0)

    def _refresh_tiers(self) -> None:
        node, tiers = self._driver.node, self._driver.tiers
        slots, sessions = node.cache.slots, node.sessions.values()
        usages = {name: tiers[name].usage() if name in tiers else _NOTHING for name in LOWER_TIERS}
        usages[TierName.CPU] = TierUsage(0, slots.used_bytes(), slots.capacity_bytes)
        for name, usage in usages.items():
            blocks = node.cache.index.num_in(name, Residency.READY)
            self._set_tier(name, blocks, usage.used_bytes, usage.capacity_bytes)
        self._set_tier(
            TierName.GPU,
            sum(each.report.used_tokens // each.layout.block_tokens for each in sessions),
            sum(each.report.used_bytes for each in sessions),
            sum(each.report.capacity_bytes for each in sessions),
        )
        self._refresh_store(usages[STORE_TIER].detail)

    def _set_tier(self, name: TierName, blocks: int, used_bytes: int, capacity_bytes: int) -> None:
        self._metrics.set(TIER_BLOCKS, blocks, tier=name)
        self._metrics.set(TIER_USED_BYTES, used_bytes, tier=name)
        self._metrics.set(TIER_CAPACITY_BYTES, capacity_bytes, tier=name)

    def _refresh_store(self, detail: Mapping[str, str | float]) -> None:
        metrics = self._metrics
        metrics.set(SSD_READ_ONLY, bool(detail.get("read_only", False)))
        metrics.set(SSD_DIRECT_IO, bool(detail.get("direct_io", False)))
        metrics.set(SSD_WRITE_BUDGET_BYTES, float(detail.get("write_budget_day_bytes", 0)))
        metrics.set(SSD_WRITE_BUDGET_LEFT_BYTES, float(detail.get("write_budget_bytes", 0)))
        state = str(detail.get("write_budget", "unlimited"))
        gate = self._gates.get(STORE_TIER)
        if state == "left" and gate is not None and gate.share < gate.most_share:
            state = "short"
        metrics.set_one(SSD_WRITE_BUDGET_STATE, "state", state)
        for kind, before in self._written_bytes.items():
            now = int(detail.get(f"written_{kind}_bytes", 0))
            # A smaller value means that the tier was reopened.
            metrics.add(SSD_WRITTEN_BYTES, now - before if now >= before else now, kind=kind)
            self._written_bytes[kind] = now

    def _refresh_model(self, now_ns: int) -> None:
        planner, metrics = self._policies.planner, self._metrics
        guarded = planner.guarded(now_ns)
        for tier in LOWER_TIERS:
            metrics.set(GUARDED, tier in guarded, tier=tier)
        for name, route in planner.document()["restore"].items():
            metrics.set(RESTORE_BYTES_PER_SECOND, route["bytes_per_s"], route=ROUTES[name])
        seconds = planner.saved_s(_PROMPT_TOKENS, _PROMPT_TOKENS)
        metrics.set(PREFILL_TOKENS_PER_SECOND, _PROMPT_TOKENS / seconds if seconds > 0 else 0.0)
