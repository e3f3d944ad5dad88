"""The daemon: opens the tiers and the sockets, serves until it is told to stop, and closes them.

Order of start: what can be refused comes before what takes memory or time. The sockets come last:
a client that can connect can be served. Order of stop: no more calls, then what is on its way to
the SSD within the time given, then the tiers.
"""

import asyncio
import contextlib
import gc
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from kvtier.api.http.daemon import create_daemon_app
from kvtier.api.http.server import serve
from kvtier.api.rpc.engine_service import EngineService
from kvtier.api.rpc.operator_service import OperatorService
from kvtier.config import Config
from kvtier.core.admission import AdmitEverything
from kvtier.core.eviction import LeafLru
from kvtier.core.residency import TierName
from kvtier.daemon.stat import Status
from kvtier.errors import StartError
from kvtier.lock import hold_lock, let_go
from kvtier.node import event as ev
from kvtier.node.driver import Driver
from kvtier.node.node import Node, NodeSettings
from kvtier.node.transfer import SlowTier
from kvtier.observe.log import Log
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import DAEMON_METRICS, READY
from kvtier.tiers.host import HostArena
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.store import SsdOptions, SsdTier
from kvtier.tiers.wrap.breaker import BreakerTier
from kvtier.transfer.shm import ArenaServer, arena_socket
from kvtier.v1 import engine_pb2_grpc, operator_pb2_grpc

__all__ = ["Daemon"]

_log = Log("kvtier.daemon")

_COOL_DOWN_NS = 1_000_000_000
"""How long a failing tier is left alone: it is back within seconds of its recovery."""

_BEAT_PERIOD_S = 1.0
_BEAT_MAX_S = 10.0
"""A loop that has not moved for this long is stuck, and health says so."""

_GRPC_GRACE_S = 1.0
_FLUSH_S = 10.0


class Daemon:
    """One daemon of ``config``. Use ``serving`` once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.boot = secrets.token_hex(8)
        self.metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
        self.http_url = ""
        self._is_ready = False
        self._beat_s = time.monotonic()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Daemon"]:
        """Be ready within the context; everything is closed after it. Raises StartError."""
        os.umask(0o077)  # sockets and files are this user's alone
        async with AsyncExitStack() as stack:
            socket_path = self.config.daemon.socket
            lock = hold_lock(
                socket_path.with_name(socket_path.name + ".lock"),
                "daemon.socket",
                str(socket_path),
            )
            stack.callback(let_go, lock)
            tiers = self._open_tiers()
            for tier in tiers.values():
                stack.push_async_callback(asyncio.to_thread, tier.close)
            arena = HostArena(*self._slabs())
            stack.callback(arena.close)
            driver = Driver(self._node(tiers), arena, tiers)
            stack.push_async_callback(self._stop_driver, driver)
            self._recover(driver, tiers)
            reserving = asyncio.create_task(self._reserve(driver, arena))
            stack.push_async_callback(_cancel, reserving)
            await self._open_sockets(stack, driver, arena)
            # What there is now stays: the collector need not walk it again and again.
            gc.collect()
            gc.freeze()
            self._is_ready = True
            self.metrics.set(READY, 1)
            _log.info(
                "ready",
                socket=socket_path,
                http=self.http_url or "off",
                pid=os.getpid(),
                boot=self.boot,
            )
            yield self
            self._is_ready = False
            self.metrics.set(READY, 0)

    def _slabs(self) -> tuple[int, int]:
        cpu = self.config.cpu
        return max(1, cpu.capacity_bytes // cpu.slab_bytes), cpu.slab_bytes

    def _open_tiers(self) -> dict[TierName, BreakerTier]:
        tiers: dict[TierName, BreakerTier] = {}
        ssd, remote = self.config.ssd, self.config.remote
        if ssd.enabled:
            options = SsdOptions(
                direct_io=DirectIO(ssd.direct_io),
                free_space_floor_bytes=ssd.free_space_floor_bytes,
                num_workers=ssd.io_threads,
            )
            opened = SsdTier(ssd.directory, ssd.capacity_bytes, ssd.segment_bytes, options)
            tiers[TierName.SSD] = BreakerTier(opened, cool_down_ns=_COOL_DOWN_NS)
        if remote.url:
            server = RemoteTier(
                remote.url,
                key_prefix=remote.key_prefix,
                ttl_s=remote.ttl_ns / 1e9,
                timeout_s=remote.deadline_ns / 1e9,
                num_workers=remote.io_threads,
            )
            tiers[TierName.REMOTE] = BreakerTier(server, cool_down_ns=_COOL_DOWN_NS)
        return tiers

    def _node(self, tiers: dict[TierName, BreakerTier]) -> Node:
        ssd, remote = self.config.ssd, self.config.remote
        deadlines_ns = {TierName.SSD: ssd.deadline_ns, TierName.REMOTE: remote.deadline_ns}
        # The SSD's queue is bounded by its share of the arena alone.
        queues_bytes = {
            TierName.SSD: self.config.cpu.capacity_bytes,
            TierName.REMOTE: remote.in_flight_bytes,
        }
        num_slabs, slab_bytes = self._slabs()
        settings = NodeSettings(
            boot=self.boot,
            num_slabs=num_slabs,
            slab_bytes=slab_bytes,
            lease_ns=self.config.daemon.lease_ns,
            tiers=tuple(
                SlowTier(
                    name,
                    tier.properties.num_workers,
                    deadlines_ns[name],
                    queues_bytes[name],
                )
                for name, tier in tiers.items()
            ),
        )
        return Node(settings, LeafLru(), AdmitEverything(), self.metrics)

    def _recover(self, driver: Driver, tiers: dict[TierName, BreakerTier]) -> None:
        for name, tier in tiers.items():
            num_blocks = 0
            for headers in tier.headers():
                driver.post(ev.Recovered(name, headers))
                num_blocks += len(headers)
            if tier.properties.is_persistent and not tier.properties.is_shared:
                _log.info("tier opened", tier=name, blocks=num_blocks, **tier.usage().detail)

    async def _reserve(self, driver: Driver, arena: HostArena) -> None:
        """Put memory behind the arena, slab by slab, while serving from what is there already."""
        for slab in range(arena.num_slabs):
            try:
                await asyncio.to_thread(arena.reserve, slab)
            except StartError as error:  # others took the memory since the start
                _log.error("the arena stays smaller than it was to be", error=error)
                return
            driver.post(ev.SlabsReserved(slab + 1))
        _log.info("arena reserved", bytes=arena.capacity_bytes)

    async def _open_sockets(self, stack: AsyncExitStack, driver: Driver, arena: HostArena) -> None:
        socket_path = self.config.daemon.socket
        status = Status(driver, self.config.engine.block_tokens)
        listen = self.config.http.listen
        if listen is not None:
            app = create_daemon_app(
                is_alive=lambda: time.monotonic() - self._beat_s < _BEAT_MAX_S,
                is_ready=lambda: self._is_ready,
                registry=self.metrics.registry,
            )
            server = serve(app, listen.host, listen.port, field="http.listen")
            self.http_url = server.url
            stack.push_async_callback(asyncio.to_thread, server.stop)
            beating = asyncio.create_task(self._beat(status))
            stack.push_async_callback(_cancel, beating)
        path = arena_socket(socket_path)
        path.unlink(missing_ok=True)
        passing = ArenaServer(arena, self.boot, lambda ticket: driver.post(ev.SessionEnded(ticket)))
        await passing.start(path)
        stack.callback(path.unlink, missing_ok=True)
        stack.push_async_callback(passing.stop)
        await self._open_rpc(stack, driver, passing, status)

    async def _open_rpc(
        self, stack: AsyncExitStack, driver: Driver, passing: ArenaServer, status: Status
    ) -> None:
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServicer_to_server(EngineService(driver, passing), server)
        operator_pb2_grpc.add_OperatorServicer_to_server(
            OperatorService(driver, status.document), server
        )
        server.add_insecure_port(f"unix:{self.config.daemon.socket}")
        await server.start()
        stack.push_async_callback(server.stop, _GRPC_GRACE_S)
        stack.callback(driver.end_orders)

    async def _beat(self, status: Status) -> None:
        """Show that the loop moves, and keep the gauges current for scrapes on other threads."""
        while True:
            self._beat_s = time.monotonic()
            status.refresh_gauges()
            await asyncio.sleep(_BEAT_PERIOD_S)

    async def _stop_driver(self, driver: Driver) -> None:
        if not await driver.flush(_FLUSH_S):
            _log.warning("stopped with blocks still unwritten")
        await driver.stop()


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
