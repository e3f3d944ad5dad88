"""The status document of ``kvtier stat``: what the daemon would say of itself, in plain numbers."""

import os
import time
from collections.abc import Mapping
from typing import Any

from kvtier import __version__
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.daemon.account import Account
from kvtier.daemon.health import NodeHealth, told
from kvtier.daemon.holdings import Held, Holdings
from kvtier.daemon.key_spaces import KeySpaces
from kvtier.node.driver import Driver
from kvtier.node.session import Session
from kvtier.observe.table import (
    BACKGROUND_FAULTS,
    LEASES,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    PINS,
    PROBED_LOOKUPS,
    SESSIONS,
    SSD_DIRECT_IO,
    SSD_READ_ONLY,
    SSD_WRITE_BUDGET_BYTES,
    SSD_WRITTEN_BYTES,
    TIER_BLOCKS,
    TIER_CAPACITY_BYTES,
    TIER_USED_BYTES,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    Metric,
)
from kvtier.tiers.base import Health

__all__ = ["Status"]

_KEY_SPACES_SHOWN_MAX = 256
"""As many as are known by name."""

_WRITTEN_KINDS = ("blocks", "moved", "metadata")


class Status:
    """Makes the document, and keeps the gauges that come from the same numbers up to date."""

    def __init__(
        self,
        driver: Driver,
        health: NodeHealth,
        spaces: KeySpaces,
        account: Account,
        block_tokens: int,
    ) -> None:
        self._driver = driver
        self._account = account
        self._health = health
        self._spaces = spaces
        self._block_tokens = block_tokens
        self._start_s = time.monotonic()
        self._written_bytes = dict.fromkeys(_WRITTEN_KINDS, 0)
        """What the counters have taken over from the SSD tier."""

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
        holdings = Holdings(node.cache.index)
        return {
            "version": __version__,
            "boot": node.boot,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "worth": self._account.worth(samples),
            "tiers": self._tiers(holdings),
            "key_spaces": self._key_spaces(holdings),
            "lookup_blocks": lookups | {"miss": samples.count(LOOKUP_BLOCKS, outcome="miss")},
            "miss_reasons": _miss_reasons(samples),
            "probed_lookups": _by_label(samples, PROBED_LOOKUPS),
            "transfers": _transfers(samples),
            "policy": self._account.policy(),
            "cost": self._account.cost(time.monotonic_ns()),
            "background_faults": _by_label(samples, BACKGROUND_FAULTS),
            "engines": [_engine(session) for session in node.sessions.values()],
            "leases": node.num_leases,
            "pins": node.num_pins,
        }

    async def refresh(self) -> None:
        """Note health and set the gauges, on the loop's thread; touches no column of the index."""
        self._health.refresh()
        self._account.refresh(time.monotonic_ns())
        node = self._driver.node
        for name in LOWER_TIERS:
            tier = self._cpu() if name is TierName.CPU else self._slow(name)
            blocks = node.cache.index.num_in(name, Residency.READY)
            node.metrics.set(TIER_BLOCKS, blocks, tier=name)
            node.metrics.set(TIER_USED_BYTES, tier["used_bytes"], tier=name)
            node.metrics.set(TIER_CAPACITY_BYTES, tier["capacity_bytes"], tier=name)
        node.metrics.set(LEASES, node.num_leases)
        node.metrics.set(PINS, node.num_pins)
        node.metrics.set(SESSIONS, len(node.sessions), transport="shm")
        if TierName.SSD in self._driver.tiers:
            self._refresh_ssd(self._driver.tiers[TierName.SSD].usage().detail)

    def _refresh_ssd(self, detail: Mapping[str, str | float]) -> None:
        metrics = self._driver.node.metrics
        metrics.set(SSD_READ_ONLY, bool(detail.get("read_only", False)))
        metrics.set(SSD_DIRECT_IO, bool(detail.get("direct_io", False)))
        metrics.set(SSD_WRITE_BUDGET_BYTES, float(detail.get("write_budget_bytes", 0)))
        for kind, before in self._written_bytes.items():
            now = int(detail.get(f"written_{kind}_bytes", 0))
            # Less than before: the tier has begun anew.
            metrics.add(SSD_WRITTEN_BYTES, now - before if now >= before else now, kind=kind)
            self._written_bytes[kind] = now

    def _tiers(self, holdings: Holdings) -> dict[str, dict[str, Any]]:
        sessions = list(self._driver.node.sessions.values())
        lower = {
            "cpu": self._cpu(),
            "ssd": self._slow(TierName.SSD),
            "remote": self._slow(TierName.REMOTE),
        }
        for name, document in lower.items():
            held = holdings.by_key_space(TierName(name))
            document["blocks"] = sum(each.num_blocks for each in held.values())
            document["tokens"] = sum(
                each.num_blocks * self._tokens_of(key_space) for key_space, each in held.items()
            )
        return {"gpu": _gpu(sessions)} | lower

    def _key_spaces(self, holdings: Holdings) -> list[dict[str, Any]]:
        """Return the key spaces that have a block or an engine here, those with most first."""
        attached = {session.key_space for session in self._driver.node.sessions.values()}
        held = {tier: holdings.by_key_space(tier) for tier in LOWER_TIERS}
        found = attached.union(*held.values())
        documents = [
            {
                "key_space": key_space.hex(),
                "names": list(named.names) if (named := self._spaces.get(key_space)) else [],
                "tiers": {
                    tier.value: {
                        "blocks": held[tier].get(key_space, Held()).num_blocks,
                        "bytes": held[tier].get(key_space, Held()).num_bytes,
                    }
                    for tier in LOWER_TIERS
                },
            }
            for key_space in found
        ]
        documents.sort(key=lambda each: (-_total_bytes(each), each["key_space"]))
        return documents[:_KEY_SPACES_SHOWN_MAX]

    def _tokens_of(self, key_space: bytes) -> int:
        """Return the tokens of a block, as engines declared it."""
        named = self._spaces.get(key_space)
        return named.block_tokens if named else self._block_tokens

    def _cpu(self) -> dict[str, Any]:
        slots = self._driver.node.cache.slots
        return _told(self._health.of(TierName.CPU)) | {
            "capacity_bytes": slots.capacity_bytes,
            "used_bytes": slots.used_bytes(),
            "reserved_bytes": slots.reserved_bytes,
        }

    def _slow(self, name: TierName) -> dict[str, Any]:
        tier = self._driver.tiers.get(name)
        if tier is None:
            return _told(None) | {"capacity_bytes": 0, "used_bytes": 0}
        lane = self._driver.node.transfers.lanes[name]
        usage = tier.usage()
        return _told(self._health.of(name)) | {
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "queued_reads": len(lane.reads),
            "queued_writes": len(lane.writes),
            "in_flight": len(lane.flights),
            "hung_calls": len(self._driver.crews[name].late_calls()),
            "detail": dict(usage.detail),
        }


def _told(health: Health | None) -> dict[str, Any]:
    return told(health) if health else {"state": "off", "reason": ""}


def _total_bytes(key_space: Mapping[str, Any]) -> int:
    return sum(tier["bytes"] for tier in key_space["tiers"].values())


def _gpu(sessions: list[Session]) -> dict[str, Any]:
    reports = [session.report for session in sessions]
    return {
        "state": "up" if sessions else "off",
        "reason": "",
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


def _by_label(samples: "_Samples", metric: Metric) -> dict[str, int]:
    """Return the counts of a metric that has one label, where they are not 0."""
    ((label, values),) = metric.labels
    counts = {value: samples.count(metric, **{label: value}) for value in values}
    return {value: count for value, count in counts.items() if count}


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
