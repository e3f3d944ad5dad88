"""The daemon: opens the tiers and the sockets, serves until it is told to stop, and closes them.

Order of start: what can be refused comes before what takes memory or time. The sockets come last:
a client that can connect can be served. Order of stop: no more calls, then what the SSD lacks and
is worth it within the time given, then the tiers. Each step of it has a deadline; the one for all
of them together is kept by ``Stop``.
"""

import asyncio
import gc
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from kvtier.api.rpc.reports import Reports
from kvtier.config import Config
from kvtier.core.residency import TierName
from kvtier.daemon.account import Account
from kvtier.daemon.background import Background
from kvtier.daemon.closing import Closing
from kvtier.daemon.device import devices_of
from kvtier.daemon.explain import Explainer
from kvtier.daemon.health import NodeHealth
from kvtier.daemon.key_spaces import SavedKeySpaces
from kvtier.daemon.learned import Learned, Learner
from kvtier.daemon.memory import Reservation
from kvtier.daemon.policies import policies
from kvtier.daemon.probe import Prober
from kvtier.daemon.sockets import Sockets
from kvtier.daemon.stat import Status
from kvtier.daemon.stop import Stop
from kvtier.daemon.tiers import allowance, open_tiers, slow_tiers
from kvtier.daemon.yardstick import without_probes
from kvtier.lock import hold_lock, let_go
from kvtier.node import event as ev
from kvtier.node.crew import Crew
from kvtier.node.driver import Driver
from kvtier.node.node import Node, NodeSettings
from kvtier.node.scrub import Scrubber
from kvtier.node.workers import in_thread
from kvtier.observe.log import Log
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import DAEMON_METRICS, READY
from kvtier.tiers.host import HostArena
from kvtier.tiers.seal import KeyRing
from kvtier.tiers.wrap.breaker import BreakerTier

__all__ = ["Daemon", "OpenTiers"]

_log = Log("kvtier.daemon")

_HEALTH_PERIOD_S = 0.5
_GAUGES_PERIOD_S = 1.0
_SCRUB_PERIOD_S = 1.0
_BUDGET_PERIOD_S = 1.0
_RESERVE_PERIOD_S = 10.0
"""Between attempts to get memory that was not there."""

_PROBE_PERIOD_S = 60.0
"""Between two looks whether a tier is to be measured; once done it is good for a week."""

_DECISION_NS = 100_000
"""Decisions are numbered on from the time of the start in such units, so that no two of a node have
the same number, whichever daemon made them: no daemon makes ten thousand a second."""

_LEARNED_PERIOD_S = 60.0
_LEARNED_SAVE_S = 2.0
"""For keeping what was learned, at the end: it is small."""

_CLOSE_SHARE = 0.25
"""Of the time left, kept from writing what waits for closing the tiers."""

_HUNG_CLOSE_S = 1.0
"""For closing a tier that has not answered for long: not worth more of the grace."""

OpenTiers = Callable[[Config, KeyRing | None], dict[TierName, BreakerTier]]
"""Opens the tiers below the CPU."""


class Daemon:
    """One daemon of ``config``, with the keys of ``ring``. Use ``serving`` once."""

    def __init__(
        self,
        config: Config,
        *,
        ring: KeyRing | None = None,
        stop: Stop | None = None,
        open_tiers: OpenTiers | None = None,
    ) -> None:
        self.config = config
        self.boot = secrets.token_hex(8)
        self.metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
        self._policies = policies(config)
        self._ring = ring
        self._open_tiers = open_tiers or self._own_tiers
        # Without one from outside this is a guest in a process that others end.
        self._stop = stop or Stop(config.daemon.stop_grace_ns / 1e9, end=lambda _code: None)
        self._is_ready = False
        self._crews: dict[TierName, Crew] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Daemon"]:
        """Be ready within the context; everything is closed after it. Raises StartError."""
        os.umask(0o077)  # sockets and files are this user's alone
        async with Closing(self._stop) as closing:
            path = self.config.daemon.socket
            lock = hold_lock(path.with_name(path.name + ".lock"), "daemon.socket", str(path))
            closing.add("letting go of the lock", partial(let_go, lock))
            driver, arena = self._open_node(closing)
            background = Background(self.metrics)
            reservation = Reservation(arena, lambda num: driver.post(ev.SlabsReserved(num)))
            health = NodeHealth(driver, reservation.health)
            spaces = self._key_spaces(driver)
            account = Account(
                driver.node,
                self.config.policy.eviction,
                self._policies.admission.gates,
                driver.node.lookahead.retention.retained_bytes,
            )
            block_tokens = self.config.engine.block_tokens
            status = Status(driver, health, spaces, account, block_tokens)
            explainer = Explainer(driver.node, spaces, block_tokens)
            prober = self._prober(driver)
            learned = self._learned(driver, prober)
            scrubber = Scrubber(driver, TierName.SSD) if TierName.SSD in driver.tiers else None
            sockets = Sockets(self.config, closing, driver)
            sockets.open_http(health, lambda: self._is_ready and not self._stop.has_begun)
            closing.add("stopping the background tasks", background.stop)
            self._supervise(background, driver, status, scrubber)
            background.every(_RESERVE_PERIOD_S, "reserve", reservation.step)
            self._learn(closing, background, driver, prober, learned)
            closing.add("writing what waits for the tiers", partial(self._flush, driver))
            await sockets.open_arena(arena, self.boot)
            reports = Reports(status.document, explainer.document, prober.probe, prober.hold)
            await sockets.open_rpc(reports, scrubber, spaces.forget_unused)
            # What there is now stays: the collector need not walk it again and again.
            gc.collect()
            gc.freeze()
            self._note_ready(sockets)
            yield self
            self._stop.begin()
            self._is_ready = False
            self.metrics.set(READY, 0)

    def _own_tiers(self, config: Config, ring: KeyRing | None) -> dict[TierName, BreakerTier]:
        return open_tiers(config, ring, self._policies.history.scores)

    def _open_node(self, closing: Closing) -> tuple[Driver, HostArena]:
        """Open tiers and arena, and a node that knows what they hold."""
        tiers = self._open_tiers(self.config, self._ring)
        # The last one is closed first: the SSD has something to lose by not being closed.
        for name in reversed(tiers):
            closing.add(f"closing the {name} tier", partial(self._close, name, tiers[name]))
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
            tiers=slow_tiers(self.config, tiers),
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
        self._crews = driver.crews
        self._stop.hanging = self._hanging
        closing.add("stopping the driver", driver.stop)
        for name, tier in tiers.items():
            _recover(driver, name, tier)
        return driver, arena

    def _slabs(self) -> tuple[int, int]:
        cpu = self.config.cpu
        return max(1, cpu.capacity_bytes // cpu.slab_bytes), cpu.slab_bytes

    def _key_spaces(self, driver: Driver) -> SavedKeySpaces:
        ssd = self.config.ssd
        spaces = SavedKeySpaces(driver, ssd.directory if ssd.enabled else None)
        driver.on_register = spaces.registered
        return spaces

    def _prober(self, driver: Driver) -> Prober:
        # Two daemons of one host may share a remote tier.
        node_name = f"{socket.gethostname()} {self.config.daemon.socket}"
        return Prober(driver, self._policies.planner, node_name, devices_of(self.config))

    def _learned(self, driver: Driver, prober: Prober) -> Learned:
        """Return what is kept of the models, which have been told what an earlier run kept."""
        learners: dict[str, Learner] = {
            "probe": prober,
            "cost": self._policies.planner,
            "gate": self._policies.admission,
            "reuse": self._policies.history,
            "depth": self._policies.depth,
        }
        ssd = self.config.ssd
        learned = Learned(driver, learners, ssd.directory if ssd.enabled else None)
        learned.recall()
        return learned

    def _learn(
        self,
        closing: Closing,
        background: Background,
        driver: Driver,
        prober: Prober,
        learned: Learned,
    ) -> None:
        """Measure tiers and keep what is learned, now and then and at the end."""
        measure = prober.step if self.config.cost.probe == "start" else prober.sweep
        background.every(_PROBE_PERIOD_S, "probe", measure)
        background.every(_LEARNED_PERIOD_S, "learned", learned.save)
        closing.add("keeping what was learned", learned.save, most_s=_LEARNED_SAVE_S)

    def _supervise(
        self,
        background: Background,
        driver: Driver,
        status: Status,
        scrubber: Scrubber | None,
    ) -> None:
        for crew in driver.crews.values():
            check = partial(driver.check_health, crew)
            background.every(_HEALTH_PERIOD_S, "health", check)
        background.every(_GAUGES_PERIOD_S, "gauges", status.refresh)
        if TierName.SSD in driver.tiers:
            background.every(_BUDGET_PERIOD_S, "budget", partial(self._tell_budget, driver))
        rate_bytes = self.config.ssd.scrub_rate_bytes
        if scrubber is not None:
            step = partial(scrubber.step, int(rate_bytes * _SCRUB_PERIOD_S))
            background.every(_SCRUB_PERIOD_S, "scrub", step)

    def _note_ready(self, sockets: Sockets) -> None:
        self._is_ready = True
        self._stop.stage = "serving"
        self.metrics.set(READY, 1)
        _log.info(
            "ready",
            socket=self.config.daemon.socket,
            http=sockets.http_url or "off",
            rpc_port=sockets.rpc_port or "off",
            pid=os.getpid(),
            boot=self.boot,
        )

    async def _tell_budget(self, driver: Driver) -> None:
        """Tell the node what may be written to the SSD for the time being."""
        rate = allowance(self.config, driver.tiers[TierName.SSD])
        driver.post(ev.Allowance(TierName.SSD, rate))

    async def _flush(self, driver: Driver) -> None:
        driver.post(ev.Closing())
        if not await driver.flush(self._stop.left_s * (1 - _CLOSE_SHARE)):
            _log.warning("stopped with blocks still unwritten")

    async def _close(self, name: TierName, tier: BreakerTier) -> None:
        is_hung = name in self._crews and self._crews[name].late_calls()
        closed = in_thread(tier.close, f"kvtier-{name}-close")
        await asyncio.wait_for(closed, _HUNG_CLOSE_S if is_hung else self._stop.left_s)

    def _hanging(self) -> str:
        """Return which calls hang; from any thread."""
        return "; ".join(
            f"{name}: {call.name} for {call.seconds:.0f} s"
            for name, crew in self._crews.items()
            for call in crew.late_calls()
        )


def _recover(driver: Driver, name: TierName, tier: BreakerTier) -> None:
    """Tell the node what a tier was found to hold."""
    num_blocks = 0
    for headers in map(without_probes, tier.headers()):
        driver.post(ev.Recovered(name, headers))
        num_blocks += len(headers)
    if tier.properties.is_persistent and not tier.properties.is_shared:
        _log.info("tier opened", tier=name, blocks=num_blocks, **tier.usage().detail)
