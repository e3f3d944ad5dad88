"""Where others reach the daemon: HTTP for probes and eyes, the arena's door, and gRPC."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvtier.api.http.daemon import create_daemon_app
from kvtier.api.http.guard import Allowed
from kvtier.api.http.server import serve
from kvtier.api.http.status import SharedDocument
from kvtier.api.rpc.credentials import Credentials
from kvtier.api.rpc.engine_service import EngineService
from kvtier.api.rpc.operator import operator_door
from kvtier.api.rpc.operator_service import OperatorService
from kvtier.api.rpc.reports import Reports
from kvtier.api.rpc.server import OPERATORS_MAX, open_tcp, open_unix
from kvtier.config import Config
from kvtier.daemon.closing import Closing
from kvtier.daemon.health import NodeHealth
from kvtier.daemon.roster import Roster
from kvtier.node import event as ev
from kvtier.node.driver import Driver
from kvtier.node.scrub import Scrubber
from kvtier.node.workers import in_thread
from kvtier.secret import Secret
from kvtier.tiers.host import HostArena
from kvtier.transfer.door import Door
from kvtier.transfer.shm import ArenaServer, arena_socket

__all__ = ["Sockets"]

_CALLS_GRACE_S = 1.0
"""For calls under way; new ones are refused at once, so that engines compute for themselves."""

_CALLS_END_S = 3.0
"""For a server to end, its calls cancelled."""

_HTTP_GRACE_S = 1.0


class Sockets:
    """Opens what ``config`` says, one after the other; ``closing`` is to end each."""

    def __init__(self, config: Config, closing: Closing, driver: Driver) -> None:
        self.http_url = ""
        self.rpc_port = 0
        self._config = config
        self._closing = closing
        self._driver = driver
        self._passing: ArenaServer | None = None

    def open_http(
        self, health: NodeHealth, is_ready: Callable[[], bool], status: Callable[[], dict[str, Any]]
    ) -> None:
        """Serve probes, metrics and the status page, where that is wanted."""
        http = self._config.http
        if http.listen is None:
            return
        loop = asyncio.get_running_loop()
        page = SharedDocument(lambda: status() | {"ready": is_ready()}, loop)
        app = create_daemon_app(
            complaint=health.complaint,
            is_ready=is_ready,
            tiers=health.document,
            registry=self._driver.node.metrics.registry,
            status=page if http.status_page else None,
        )
        server = serve(
            app,
            http.listen.host,
            http.listen.port,
            field="http.listen",
            grace_seconds=_HTTP_GRACE_S,
            allowed=Allowed(http.allowed_hosts),
        )
        self.http_url = server.url
        stopping = partial(in_thread, server.stop, "kvtier-http-stop")
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
        self._closing.add("removing a socket", partial(path.unlink, missing_ok=True))
        self._closing.add("closing the arena's door", passing.stop, most_s=_CALLS_END_S)

    async def open_rpc(
        self,
        reports: Reports,
        scrubber: Scrubber,
        on_emptied: Callable[[], None],
        roster: Roster,
    ) -> Sequence[Secret[Any]]:
        """Serve engines and operators; ``open_arena`` comes before. Returns what that goes by."""
        assert self._passing is not None
        daemon, listen = self._config.daemon, self._config.rpc.listen
        operator = OperatorService(self._driver, reports, scrubber, on_emptied, roster)
        door = Door(daemon.allowed_uids, OPERATORS_MAX)
        door_path = operator_door(daemon.socket)
        await door.start(door_path)
        self._closing.add("removing a socket", partial(door_path.unlink, missing_ok=True))
        self._closing.add("closing the operators' door", door.stop, most_s=_CALLS_END_S)
        engine = EngineService(self._driver, self._passing)
        server = await open_unix(daemon.socket, door, daemon.allowed_uids, engine, operator)
        self._close_calls(server.stop)
        secrets: Sequence[Secret[Any]] = ()
        if listen is not None:
            credentials = Credentials(self._config.rpc)
            secrets = credentials.secrets
            remote, self.rpc_port = await open_tcp(listen, credentials, operator)
            self._close_calls(remote.stop)
        self._closing.add("ending orders", self._driver.end_orders)
        return secrets

    def _close_calls(self, stop: Callable[[float], Any]) -> None:
        self._closing.add("ending calls", partial(stop, _CALLS_GRACE_S), most_s=_CALLS_END_S)
