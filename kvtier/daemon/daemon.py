"""The daemon process: opens tiers and sockets, serves until it is stopped, and closes them.

On start, checks that can fail come before steps that take memory or time, and sockets are opened
last: a client that can connect can be served. On stop, calls end first, then valuable blocks are
written to the slower tiers as far as time allows, then the tiers are closed. Each step has a
deadline; ``Stop`` enforces the one for all of them.
"""

import asyncio
import gc
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector

from kvtier.config import Config
from kvtier.core.tier_registry import SLOW_TIERS, STORE_TIER, TierName
from kvtier.daemon.background import Background
from kvtier.daemon.closing import ClosingStack
from kvtier.daemon.components import DaemonComponents
from kvtier.daemon.policies import policies
from kvtier.daemon.reload import Reload
from kvtier.daemon.serving.sockets import Sockets
from kvtier.daemon.serving.systemd import Systemd
from kvtier.daemon.status.counter_history import SNAPSHOT_PERIOD_S
from kvtier.daemon.status.health import NodeHealth
from kvtier.daemon.stop import Stop
from kvtier.daemon.tiers.benchmark_runner import BenchmarkRunner
from kvtier.daemon.tiers.opening import (
    OpenTier,
    open_at_start,
    open_tier,
    placement,
    tune_tier,
    write_allowance,
)
from kvtier.lock import PathLock
from kvtier.node.messages import events as ev
from kvtier.node.node import Node, NodeSettings
from kvtier.observe.daemon_metrics import DAEMON_METRICS, READY
from kvtier.observe.log import Log, set_level
from kvtier.observe.metrics import Metrics
from kvtier.observe.secret_rotation import LOOK_EVERY_S
from kvtier.runtime.driver import Driver
from kvtier.runtime.scrubber import TierScrubber, Verifier
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.host import HostArena
from kvtier.tiers.seal import KeyRing

__all__ = ["Daemon"]

_log = Log("kvtier.daemon")

_HEALTH_PERIOD_S = 0.5
_RETRY_PERIOD_S = 2.0
"""Time between attempts to open a tier that could not be opened at the start."""

_GAUGES_PERIOD_S = 1.0
_SCRUB_PERIOD_S = 1.0
_VERIFY_PERIOD_S = 1.0
_BUDGET_PERIOD_S = 1.0
_SOCKETS_PERIOD_S = 2.0
_RESERVE_PERIOD_S = 10.0
"""Time between attempts to get memory that was not available."""

_BENCHMARK_PERIOD_S = 60.0
"""Time between checks whether a tier needs a benchmark; a result is valid for a week."""

_DECISION_NS = 100_000
"""Decision numbers start at the current time in this unit. They are unique across restarts as long
as a daemon makes fewer than ten thousand decisions a second."""

_LEARNED_PERIOD_S = 60.0
_LEARNED_SAVE_S = 2.0
"""Time limit for saving the learned state on shutdown: it is small."""

_CLOSE_SHARE = 0.25
"""Share of the remaining time reserved for closing the tiers; blocks are written in the rest."""

_HUNG_CLOSE_S = 1.0
"""Time limit for closing a tier with a stuck call: it does not deserve more of the grace period."""

_TIER_ADMIN_END_S = 2.0
"""Time limit for cancelling attaches and detaches in progress."""


class Daemon:
    """Runs one daemon; enter ``serving`` once. ``ring`` has the keys that seal blocks."""

    def __init__(
        self,
        config: Config,
        *,
        ring: KeyRing | None = None,
        stop: Stop | None = None,
        open_tier: OpenTier | None = None,
        systemd: Systemd | None = None,
        reload: Reload | None = None,
    ) -> None:
        self.config = config
        self._reload = reload or Reload(config)
        self.boot = secrets.token_hex(8)
        self.metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
        ProcessCollector(registry=self.metrics.registry)
        self._policies = policies(config)
        self._ring = ring
        self._open_tier = open_tier or self._own_tier
        # Without ``stop``, the daemon must not exit the process it runs in.
        self._stop = stop or Stop(config.daemon.stop_grace_ns / 1e9, end=lambda _code: None)
        self._systemd = systemd or Systemd()
        self._stop.on_begin = lambda: self._systemd.stopping(self._stop.left_s)
        self._is_ready = False
        self._executors: dict[TierName, TierExecutor] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Daemon"]:
        """Serve within the context, and close everything after it. Raises StartError."""
        os.umask(0o077)  # only this user may access sockets and files
        self._systemd.starting("opening the tiers")
        async with ClosingStack(self._stop) as closing:
            path = self.config.daemon.socket
            lock = PathLock(path.with_name(path.name + ".lock"), "daemon.socket", str(path))
            closing.add("releasing the lock", lock.release)
            tiers, late = await open_at_start(self.config, self._open_tier)
            driver, arena = self._open_node(tiers, closing)
            components = DaemonComponents(
                driver,
                arena,
                self._policies,
                lambda: self.config,
                open_tier=self._open_tier,
                reload=self._reload,
                ring=self._ring,
            )
            sockets = Sockets(self.config, closing, driver, lock=lock, health=components.health)
            is_serving = partial(self._is_serving, components.health)
            sockets.open_http(is_serving, components.status.page)
            components.tier_admin.expect(late)
            self._begin(closing, components)
            closing.add("writing blocks to the tiers", partial(self._flush, driver))
            closing.add(
                "cancelling changes of tiers", components.tier_admin.stop, most_s=_TIER_ADMIN_END_S
            )
            await sockets.open_arena(arena, self.boot)
            components.secrets.add(
                await sockets.open_rpc(
                    components.reports(),
                    components.scrubber,
                    components.spaces.forget_unused,
                    components.tier_admin,
                )
            )
            # Objects created so far live until the end: exclude them from garbage collection.
            gc.collect()
            gc.freeze()
            watching = Background(self.metrics)
            watching.every(_SOCKETS_PERIOD_S, "sockets", partial(self._check, sockets, is_serving))
            closing.add("stopping the socket checks", watching.stop)  # before they close
            self._note_ready(sockets)
            self._reload.begin(partial(self._adopt, driver))
            closing.add("ending reloads", self._reload.end)
            yield self
            self._stop.begin()
            self._is_ready = False
            self.metrics.set(READY, 0)

    def _is_serving(self, health: NodeHealth) -> bool:
        return self._is_ready and not self._stop.has_begun and not health.unreachable

    async def _check(self, sockets: Sockets, is_serving: Callable[[], bool]) -> None:
        await sockets.check()
        self.metrics.set(READY, is_serving())

    def _own_tier(self, config: Config, name: TierName) -> BreakerTier:
        return open_tier(config, name, self._ring, self._policies.history.queues.scores)

    def _open_node(
        self, tiers: dict[TierName, BreakerTier], closing: ClosingStack
    ) -> tuple[Driver, HostArena]:
        """Open the arena, and create a node that knows the blocks of all tiers."""
        # Closed in reverse, the fastest first: a local store has unwritten metadata to lose.
        for name in reversed(SLOW_TIERS):
            closing.add(f"closing the {name} tier", partial(self._close, name, tiers))
        arena = HostArena(*self._slabs())
        closing.add("closing the arena", arena.close)
        num_slabs, slab_bytes = self._slabs()
        settings = NodeSettings(
            boot=self.boot,
            first_decision=time.time_ns() // _DECISION_NS,
            num_slabs=num_slabs,
            slab_bytes=slab_bytes,
            lease_ns=self.config.daemon.lease_ns,
            pin_share=self.config.policy.pin_share,
            tiers=tuple(placement(self.config, tier) for tier in tiers.values()),
        )
        node = Node(
            settings,
            self._policies.eviction,
            self._policies.admission,
            self.metrics,
            history=self._policies.history,
            planner=self._policies.planner,
            depth=self._policies.depth,
        )
        driver = Driver(node, arena, tiers)
        self._executors = driver.executors
        self._stop.hanging = self._hanging
        closing.add("stopping the driver", driver.stop)
        for name, tier in tiers.items():
            _recover(driver, name, tier)
        return driver, arena

    def _slabs(self) -> tuple[int, int]:
        cpu = self.config.cpu
        return max(1, cpu.capacity_bytes // cpu.slab_bytes), cpu.slab_bytes

    def _begin(self, closing: ClosingStack, components: DaemonComponents) -> None:
        """Start the periodic tasks."""
        driver, background = components.driver, Background(self.metrics)
        closing.add("stopping the background tasks", background.stop)
        for name in SLOW_TIERS:
            background.every(_HEALTH_PERIOD_S, "health", partial(driver.check_health, name))
        background.every(_RETRY_PERIOD_S, "health", components.tier_admin.retry)
        background.every(_GAUGES_PERIOD_S, "gauges", components.gauges.refresh)
        background.every(SNAPSHOT_PERIOD_S, "gauges", components.status.note)
        background.every(_BUDGET_PERIOD_S, "budget", partial(self._set_write_allowance, driver))
        background.every(_SCRUB_PERIOD_S, "scrub", partial(self._scrub, components.scrubber))
        for name in SLOW_TIERS:
            if name.is_shared:
                verifier = Verifier(driver, name)
                background.every(_VERIFY_PERIOD_S, "verify", verifier.step)
        background.every(_RESERVE_PERIOD_S, "reserve", components.reservation.step)
        report = partial(self._systemd.report, components.health)
        background.every(self._systemd.period_s, "systemd", report)
        background.every(LOOK_EVERY_S, "secrets", components.secrets.step)
        benchmark = partial(self._benchmark, components.benchmarks)
        background.every(_BENCHMARK_PERIOD_S, "probe", benchmark)
        for document in (components.learned, components.spaces):
            background.every(_LEARNED_PERIOD_S, "learned", document.save)
            closing.add("saving the learned state", document.save, most_s=_LEARNED_SAVE_S)

    def _note_ready(self, sockets: Sockets) -> None:
        self._is_ready = True
        self._stop.stage = "serving"
        self.metrics.set(READY, 1)
        self._systemd.ready()
        _log.info(
            "ready",
            socket=self.config.daemon.socket,
            http=sockets.http_url or "off",
            rpc_port=sockets.rpc_port or "off",
            pid=os.getpid(),
            boot=self.boot,
        )

    def _adopt(self, driver: Driver, config: Config) -> None:
        """Apply the settings that a reload may change, between two events of the node."""
        self._policies.adopt(config)
        for tier in driver.tiers.values():
            tune_tier(config, tier)
        slow = tuple(placement(config, tier) for tier in driver.tiers.values())
        driver.post(ev.SettingsChanged(config.daemon.lease_ns, config.policy.pin_share, slow))
        if not self._stop.has_begun:  # a stop in progress keeps its grace period
            self._stop.grace_s = config.daemon.stop_grace_ns / 1e9
        set_level(config.daemon.log_level)
        self.config = config

    async def _benchmark(self, benchmarks: BenchmarkRunner) -> None:
        if self.config.cost.probe == "start":
            await benchmarks.step()

    async def _scrub(self, scrubber: TierScrubber) -> None:
        rate = self.config.tiers[STORE_TIER].scrub_bytes_per_s
        await scrubber.step(int(rate * _SCRUB_PERIOD_S))

    async def _set_write_allowance(self, driver: Driver) -> None:
        """Pass each tier's current write budget in bytes per second to the node."""
        for name, tier in driver.tiers.items():
            driver.post(ev.SetWriteAllowance(name, write_allowance(self.config, tier)))

    async def _flush(self, driver: Driver) -> None:
        driver.post(ev.DaemonStopping())
        if not await driver.flush(self._stop.left_s * (1 - _CLOSE_SHARE)):
            _log.warning("stopped before all blocks were written to the tiers")

    async def _close(self, name: TierName, tiers: Mapping[TierName, BreakerTier]) -> None:
        if (tier := tiers.get(name)) is None:
            return  # not configured, or detached
        is_hung = name in self._executors and self._executors[name].late_calls()
        closed = run_in_thread(tier.close, f"kvtier-{name}-close")
        async with asyncio.timeout(_HUNG_CLOSE_S if is_hung else self._stop.left_s):
            await closed

    def _hanging(self) -> str:
        """Return the calls that are stuck; from any thread."""
        return "; ".join(
            f"{name}: {call.name} for {call.seconds:.0f} s"
            for name, executor in list(self._executors.items())
            for call in executor.late_calls()
        )


def _recover(driver: Driver, name: TierName, tier: BreakerTier) -> None:
    """Report all blocks of a tier to the node."""
    num_blocks = 0
    for headers in tier.headers():
        driver.post(ev.BlocksRecovered(name, headers))
        num_blocks += len(headers)
    if name.is_persistent and not name.is_shared:
        _log.info("tier opened", tier=name, blocks=num_blocks, **tier.usage().detail)
