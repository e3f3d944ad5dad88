"""The daemon's sockets: HTTP for probes and the status page, ticket servers, and gRPC."""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvtier.api.http.cross_origin import CrossOriginRules
from kvtier.api.http.daemon_app import StatusCache, create_daemon_app
from kvtier.api.http.server import serve
from kvtier.api.rpc.credentials import Credentials
from kvtier.api.rpc.engine_service import EngineServicer
from kvtier.api.rpc.operator_client import operator_ticket_socket
from kvtier.api.rpc.operator_service import OperatorReports, OperatorServicer
from kvtier.api.rpc.server import OPERATORS_MAX, open_tcp, open_unix
from kvtier.config import Config
from kvtier.daemon.closing import ClosingStack
from kvtier.daemon.status.health import NodeHealth
from kvtier.daemon.tiers.admin import TierAdmin
from kvtier.errors import StartError, reason_of
from kvtier.lock import PathLock
from kvtier.node.messages import events as ev
from kvtier.observe.log import Log
from kvtier.permissions import check_owner, check_writable, directory_mode
from kvtier.runtime.driver import Driver
from kvtier.runtime.scrubber import TierScrubber
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.secret import Secret
from kvtier.tiers.host import HostArena
from kvtier.transfer.shm import ArenaServer, arena_socket
from kvtier.transfer.ticket_server import TicketServer

__all__ = ["Sockets"]

_log = Log("kvtier.daemon")

_CALLS_GRACE_S = 1.0
"""Time for running calls; new ones are refused at once, so that engines compute instead."""

_CALLS_END_S = 3.0
"""Time limit for a server to stop after its calls were cancelled."""

_HTTP_GRACE_S = 1.0


class _Listener(Protocol):
    """A server that listens on a Unix socket."""

    @property
    def is_in_place(self) -> bool:
        """Whether the socket file still belongs to this server."""

    async def reopen(self) -> None:
        """Listen at the same path with a new file. Raises StartError or OSError."""


class Sockets:
    """Opens the sockets of ``config``, and registers each with ``closing``.

    ``lock`` is the lock for the path of ``daemon.socket``.
    """

    def __init__(
        self,
        config: Config,
        closing: ClosingStack,
        driver: Driver,
        *,
        lock: PathLock,
        health: NodeHealth,
    ) -> None:
        self.http_url = ""
        self.rpc_port = 0
        self._config = config
        self._closing = closing
        self._driver = driver
        self._lock = lock
        self._health = health
        self._passing: ArenaServer | None = None
        self._listeners: dict[Path, _Listener] = {}

    def open_http(self, is_ready: Callable[[], bool], status: Callable[[], dict[str, Any]]) -> None:
        """Serve probes, metrics and the status page, if ``http.listen`` is set."""
        http = self._config.http
        if http.listen is None:
            return
        loop = asyncio.get_running_loop()
        page = StatusCache(lambda: status() | {"ready": is_ready()}, loop)
        app = create_daemon_app(
            complaint=self._health.complaint,
            is_ready=is_ready,
            report=self._health.report,
            registry=self._driver.node.metrics.registry,
            status=page if http.status_page else None,
        )
        server = serve(
            app,
            http.listen.host,
            http.listen.port,
            field="http.listen",
            grace_seconds=_HTTP_GRACE_S,
            allowed=CrossOriginRules(http.allowed_hosts),
        )
        self.http_url = server.url
        stopping = partial(run_in_thread, server.stop, "kvtier-http-stop")
        self._closing.add("stopping the HTTP server", stopping)

    async def open_arena(self, arena: HostArena, boot: str) -> None:
        """Pass the arena to engines that connect."""
        path = arena_socket(self._config.daemon.socket)
        passing = self._passing = ArenaServer(
            arena,
            boot,
            lambda ticket: self._driver.post(ev.SessionEnded(ticket)),
            self._config.daemon.allowed_uids,
        )
        await passing.start(path)
        self._listeners[path] = passing.ticket_server
        self._closing.add("closing the arena's ticket server", passing.stop, most_s=_CALLS_END_S)

    async def open_rpc(
        self,
        reports: OperatorReports,
        scrubber: TierScrubber,
        on_emptied: Callable[[], None],
        tier_admin: TierAdmin,
    ) -> Sequence[Secret[Any]]:
        """Serve engines and operators; call ``open_arena`` first. Returns the secrets in use."""
        assert self._passing is not None
        daemon, listen = self._config.daemon, self._config.rpc.listen
        operator = OperatorServicer(self._driver, reports, scrubber, on_emptied, tier_admin)
        ticket_server = TicketServer(daemon.allowed_uids, OPERATORS_MAX)
        ticket_path = operator_ticket_socket(daemon.socket)
        await ticket_server.start(ticket_path)
        self._listeners[ticket_path] = ticket_server
        self._closing.add(
            "closing the operators' ticket server", ticket_server.stop, most_s=_CALLS_END_S
        )
        engine = EngineServicer(self._driver, self._passing)
        server = await open_unix(
            daemon.socket, ticket_server, daemon.allowed_uids, engine, operator
        )
        self._listeners[daemon.socket] = server
        self._close_calls(server.stop)
        secrets: Sequence[Secret[Any]] = ()
        if listen is not None:
            credentials = Credentials(self._config.rpc)
            secrets = credentials.secrets
            remote, self.rpc_port = await open_tcp(listen, credentials, operator)
            self._close_calls(remote.stop)
        self._closing.add("ending orders", self._driver.end_orders)
        return secrets

    async def check(self) -> None:
        """Recreate removed socket files, and record why clients cannot connect if they cannot.

        A file that another process has put in its place is left alone.
        """
        try:
            await self._mend()
            problem = ""
        except StartError as error:
            problem = f"{error.problem}; {error.remedy}"
        except OSError as error:
            problem = f"cannot create {self._config.daemon.socket}: {reason_of(error)}"
        if problem and problem != self._health.unreachable:
            _log.warning("no client can connect", error=problem)
        elif self._health.unreachable and not problem:
            _log.info("clients can connect again", socket=self._config.daemon.socket)
        self._health.unreachable = problem

    async def _mend(self) -> None:
        lost = {path: each for path, each in self._listeners.items() if not each.is_in_place}
        if lost:
            daemon = self._config.daemon
            mode = directory_mode(is_shared=bool(daemon.allowed_uids))
            check_writable("daemon.socket", daemon.socket.parent, mode)
            check_owner(daemon.socket.parent, os.geteuid())
        if not self._lock.is_in_place():
            await run_in_thread(self._lock.renew, "kvtier-lock")
        for path, listener in lost.items():
            await listener.reopen()
            _log.warning("socket file was removed, created it again", path=path)

    def _close_calls(self, stop: Callable[[float], Any]) -> None:
        self._closing.add("ending calls", partial(stop, _CALLS_GRACE_S), most_s=_CALLS_END_S)
