"""Liveness: the loop moves, and what is queued for a tier that is up is done."""

import asyncio
import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvtier.core.admission import AdmitEverything
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.residency import TierName
from kvtier.core.slow_tier import SlowTier
from kvtier.daemon.status.health import NodeHealth
from kvtier.node.node import Node, NodeSettings
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import Health
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.host import HostArena
from kvtier.tiers.memory import MemoryTier

SLAB_BYTES = 1 << 20
HOUR_NS = 3600 * 10**9


def driver_of(arena: HostArena) -> Driver:
    slow = SlowTier(TierName.SSD, 2, HOUR_NS, SLAB_BYTES)
    settings = NodeSettings("boot", 1, SLAB_BYTES, HOUR_NS, (slow,))
    metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
    node = Node(settings, LeafLru(), AdmitEverything(), metrics)
    return Driver(node, arena, {TierName.SSD: BreakerTier(MemoryTier(SLAB_BYTES))})


def slow_of(driver: Driver) -> Callable[[TierName], Health | None]:
    return lambda name: driver.executors[name].last_health if name in driver.executors else None


def test_a_loop_that_does_not_move_is_told_from_another_thread() -> None:
    async def scenario() -> None:
        arena = HostArena(1, SLAB_BYTES)
        driver = driver_of(arena)
        now_s = [100.0]
        health = NodeHealth(driver, Health, slow_of(driver), clock_s=lambda: now_s[0])
        health.refresh()
        assert health.complaint() == ""
        assert health.document()["ssd"] == {"state": "up", "reason": ""}
        now_s[0] += 60
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.append(health.complaint()))
        asking.start()
        asking.join(30)
        assert told == ["the event loop has been stuck for 60 s"]
        health.refresh()
        assert health.complaint() == ""
        driver.stop()
        arena.close()

    asyncio.run(scenario())


def test_work_that_is_queued_and_not_done_is_told_unless_the_tier_is_out() -> None:
    async def scenario() -> None:
        arena = HostArena(1, SLAB_BYTES)
        driver = driver_of(arena)
        lane = driver.node.transfers.lanes[TierName.SSD]
        assert driver.stalled(0) == []
        lane.reads.add(7, 1, 4096, 0)
        assert driver.stalled(3600) == [], "not yet"
        assert driver.stalled(0) == [TierName.SSD]
        health = NodeHealth(driver, Health, slow_of(driver))
        health.refresh()
        assert health.complaint() == "", "30 seconds are given to it"
        lane.is_up = False
        assert driver.stalled(0) == [], "a tier that is out is no reason to restart the daemon"
        lane.is_up = True
        lane.reads.clear()
        assert driver.stalled(0) == []
        driver.stop()
        arena.close()

    asyncio.run(scenario())
