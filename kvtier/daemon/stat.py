"""The status document of ``kvtier stat``: what the daemon would say of itself, in plain numbers."""

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvtier import __version__
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.node.driver import Driver
from kvtier.node.session import Session
from kvtier.observe.table import (
    LEASES,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    PINS,
    SESSIONS,
    TIER_BLOCKS,
    TIER_CAPACITY_BYTES,
    TIER_UP,
    TIER_USED_BYTES,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    Metric,
)

__all__ = ["Status"]


class Status:
    """Makes the document, and keeps the gauges that come from the same numbers up to date."""

    def __init__(self, driver: Driver, block_tokens: int) -> None:
        self._driver = driver
        self._block_tokens = block_tokens
        self._start_s = time.monotonic()
        self._tokens_of: dict[bytes, int] = {}
        """Tokens of a block by key space, as engines declared it."""

    def document(self) -> dict[str, Any]:
        """Return the document; everything in it can be written as JSON."""
        node = self._driver.node
        samples = _Samples(node.metrics.registry)
        lookups = {
            outcome: {
                tier.value: samples.count(LOOKUP_BLOCKS, outcome=outcome, tier=tier)
                for tier in LOWER_TIERS
            }
            for outcome in ("hit", "pending")
        }
        return {
            "version": __version__,
            "boot": node.boot,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "tiers": self._tiers(),
            "lookup_blocks": lookups | {"miss": samples.count(LOOKUP_BLOCKS, outcome="miss")},
            "miss_reasons": _miss_reasons(samples),
            "transfers": _transfers(samples),
            "engines": [_engine(session) for session in node.sessions.values()],
            "leases": node.num_leases,
            "pins": node.num_pins,
        }

    def refresh_gauges(self) -> None:
        """Set the gauges, on the loop's thread; touches no column of the index."""
        node = self._driver.node
        for name, tier in (
            (TierName.CPU, self._cpu()),
            (TierName.SSD, self._slow(TierName.SSD)),
            (TierName.REMOTE, self._slow(TierName.REMOTE)),
        ):
            blocks = node.cache.index.num_in(name, Residency.READY)
            node.metrics.set(TIER_BLOCKS, blocks, tier=name)
            node.metrics.set(TIER_USED_BYTES, tier["used_bytes"], tier=name)
            node.metrics.set(TIER_CAPACITY_BYTES, tier["capacity_bytes"], tier=name)
            node.metrics.set(TIER_UP, tier["state"] == "up", tier=name)
        node.metrics.set(LEASES, node.num_leases)
        node.metrics.set(PINS, node.num_pins)
        node.metrics.set(SESSIONS, len(node.sessions), transport="shm")

    def _tiers(self) -> dict[str, dict[str, Any]]:
        sessions = list(self._driver.node.sessions.values())
        self._tokens_of |= {s.key_space: s.layout.block_tokens for s in sessions}
        return {
            "gpu": _gpu(sessions),
            "cpu": self._cpu() | self._counts(TierName.CPU),
            "ssd": self._slow(TierName.SSD) | self._counts(TierName.SSD),
            "remote": self._slow(TierName.REMOTE) | self._counts(TierName.REMOTE),
        }

    def _cpu(self) -> dict[str, Any]:
        slots = self._driver.node.cache.slots
        return {
            "state": "up",
            "capacity_bytes": slots.capacity_bytes,
            "used_bytes": slots.used_bytes(),
            "reserved_bytes": slots.reserved_bytes,
        }

    def _slow(self, name: TierName) -> dict[str, Any]:
        tier = self._driver.tiers.get(name)
        if tier is None:
            return {"state": "off", "capacity_bytes": 0, "used_bytes": 0}
        lane = self._driver.node.transfers.lanes[name]
        usage = tier.usage()
        return {
            "state": "up" if lane.is_usable(time.monotonic_ns()) else "down",
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "queued_reads": len(lane.reads),
            "queued_writes": len(lane.writes),
            "in_flight": len(lane.flights),
            "detail": dict(usage.detail),
        }

    def _counts(self, tier: TierName) -> dict[str, int]:
        """Return the blocks that are ready in a tier, and their tokens."""
        index = self._driver.node.cache.index
        scopes = index.scope[index.in_state(tier, Residency.READY)]
        blocks_of = np.bincount(scopes, minlength=1)
        tokens = sum(
            int(blocks_of[number]) * self._tokens_of.get(scope.key_space, self._block_tokens)
            for number, scope in index.scopes()
            if number < len(blocks_of)
        )
        return {"blocks": len(scopes), "tokens": tokens}


def _gpu(sessions: list[Session]) -> dict[str, Any]:
    reports = [session.report for session in sessions]
    return {
        "state": "up" if sessions else "off",
        "capacity_bytes": sum(report.capacity_bytes for report in reports),
        "used_bytes": sum(report.used_bytes for report in reports),
        "blocks": sum(s.report.used_tokens // s.layout.block_tokens for s in sessions),
        "tokens": sum(report.used_tokens for report in reports),
        "hit_tokens": sum(report.hit_tokens for report in reports),
    }


def _engine(session: Session) -> dict[str, Any]:
    return {
        "engine": session.engine,
        "pid": session.pid,
        "transport": session.transport,
        "key_space": session.key_space.hex(),
        "block_tokens": session.layout.block_tokens,
        "block_bytes": session.layout.block_bytes,
        "gpu_used_bytes": session.report.used_bytes,
        "gpu_capacity_bytes": session.report.capacity_bytes,
        "loads": len(session.loads),
        "stores": len(session.stores),
    }


def _miss_reasons(samples: "_Samples") -> dict[str, dict[str, int]]:
    """Return, by tier, why it did not serve blocks that it should have, where that happened."""
    (_, tiers), (_, reasons) = MISS_BLOCKS.labels
    counts = {
        tier: {reason: samples.count(MISS_BLOCKS, tier=tier, reason=reason) for reason in reasons}
        for tier in tiers
    }
    return {tier: {r: n for r, n in of.items() if n} for tier, of in counts.items()}


def _transfers(samples: "_Samples") -> dict[str, dict[str, float]]:
    return {
        route: {
            "bytes": samples.count(TRANSFER_BYTES, route=route, outcome="complete"),
            "failed_bytes": samples.count(TRANSFER_BYTES, route=route, outcome="failed"),
            "seconds": samples.sum(TRANSFER_SECONDS, "_sum", route=route),
            "count": samples.count(TRANSFER_SECONDS, "_count", route=route),
        }
        for route in ("cpu_to_ssd", "ssd_to_cpu", "cpu_to_remote", "remote_to_cpu")
    }


class _Samples:
    """One reading of a registry."""

    def __init__(self, registry: Any) -> None:
        self._samples: list[tuple[str, Mapping[str, str], float]] = [
            (sample.name, sample.labels, sample.value)
            for family in registry.collect()
            for sample in family.samples
        ]

    def sum(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Return the sum of a metric's series that have these labels."""
        name = metric.name + suffix
        return sum(
            value
            for sample, given, value in self._samples
            if sample == name and labels.items() <= given.items()
        )

    def count(self, metric: Metric, suffix: str = "", **labels: str) -> int:
        """Return a sum that is a whole number, as one."""
        return int(self.sum(metric, suffix, **labels))
