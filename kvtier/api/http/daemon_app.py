"""The daemon's HTTP application: health, metrics and the read-only status page.

Theory
------
The HTTP server has its own thread, and the status document is created on the node's loop. Only one
request at a time asks the loop for it; requests that arrive meanwhile, or within half a second, get
the same document. So a hundred open pages cost the loop as much as one, and a stuck loop is asked
only once.

Rules
-----
* The page loads nothing from elsewhere, and no other page can frame it: see ``_HEADERS``.
  ``CrossOriginGuard`` decides which requests of other pages are answered.
* The page shows less than ``kvtier stat`` does: only ``_SECTIONS``, with request ids cut short.
"""

import asyncio
import concurrent.futures
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.api.http.errors import ApiError, error_responses
from kvtier.api.http.health import probe_routes
from kvtier.observe.log import Log, RateLimitedLog

__all__ = [
    "StatusCache",
    "create_daemon_app",
    "status_routes",
]

_log = Log("kvtier.http")

_SHARED_S = 0.5
"""How long a document is shared. A page asks once a second, so it never gets a stale one."""

_DEADLINE_S = 1.0
"""Creating the document takes milliseconds; a loop that takes longer than this is overloaded."""

_ID_CHARACTERS_MAX = 16
"""Length of request ids on the page. Clients choose ids, and may put names in them."""

_SECTIONS: Sequence[str] = (
    "version",
    "boot",
    "pid",
    "time_s",
    "uptime_s",
    "ready",
    "worth",
    "grown",
    "history",
    "tiers",
    "tokens",
    "miss_reasons",
    "transfers",
    "background_faults",
    "engines",
    "requests",
    "leases",
    "pins",
)
"""Sections of the status that are public: all but key space names and traffic classes."""

_PAGE = Path(__file__).with_name("status_page")
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("page.html", "text/html"),
    "/status/page.css": ("page.css", "text/css"),
    "/status/icon.svg": ("icon.svg", "image/svg+xml"),
    "/status/life.js": ("life.js", "text/javascript"),
    "/status/picture.js": ("picture.js", "text/javascript"),
    "/status/element.js": ("element.js", "text/javascript"),
    "/status/flow.js": ("flow.js", "text/javascript"),
    "/status/number.js": ("number.js", "text/javascript"),
}

_HEADERS: Mapping[str, str] = {
    "cache-control": "no-store",  # so that the page matches its daemon after an upgrade
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

_Document = Mapping[str, Any]
"""The status document or a part."""


class StatusCache:
    """Shares the document of ``make``, which runs on ``loop``, with requests on another loop."""

    def __init__(self, make: Callable[[], _Document], loop: asyncio.AbstractEventLoop) -> None:
        self._make = make
        self._loop = loop
        self._asked: asyncio.Future[bytes] | None = None
        self._asked_s = 0.0
        self._warnings = RateLimitedLog(_log)
        self._made = b""
        self._made_s = float("-inf")

    async def read(self) -> bytes:
        """Return the document as JSON, at most half a second old.

        Raises ApiError if the loop does not answer in time.
        """
        if time.monotonic() - self._made_s <= _SHARED_S:
            return self._made
        asked = self._asked or self._ask()
        await asyncio.wait({asked}, timeout=_DEADLINE_S)
        if not asked.done():
            silent_s = time.monotonic() - self._asked_s
            raise _unavailable(f"the daemon has not responded for {silent_s:.0f} s")
        if asked.exception() is not None:
            raise _unavailable("cannot create the status document; see the daemon's log")
        return asked.result()

    def _ask(self) -> asyncio.Future[bytes]:
        answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def create() -> None:
            try:
                answer.set_result(_public(self._make()))
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(create)
        except RuntimeError as error:  # the loop is closed
            raise _unavailable("the daemon has stopped") from error
        self._asked, self._asked_s = asyncio.wrap_future(answer), time.monotonic()
        self._asked.add_done_callback(self._keep)
        return self._asked

    def _keep(self, asked: asyncio.Future[bytes]) -> None:
        self._asked = None
        if fault := asked.exception():
            self._warnings.warning("cannot create the status document", error=repr(fault))
        else:
            self._made, self._made_s = asked.result(), time.monotonic()


def status_routes(document: StatusCache) -> list[Route]:
    """Return the routes of the page, its files, and ``/status.json``."""

    async def status(_request: Request) -> Response:
        return Response(await document.read(), media_type="application/json", headers=_HEADERS)

    files = [
        Route(path, _file((_PAGE / name).read_bytes(), kind))
        for path, (name, kind) in _FILES.items()
    ]
    return [*files, Route("/status.json", status)]


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer


def _public(document: _Document) -> bytes:
    """Return the public part of a document as JSON."""
    public = {name: document[name] for name in _SECTIONS if name in document}
    public["requests"] = [_shortened(each) for each in document.get("requests", ())]
    return json.dumps(public, separators=(",", ":")).encode()


def _shortened(request: _Document) -> _Document:
    name = request["request_id"]
    short = name if len(name) <= _ID_CHARACTERS_MAX else f"{name[:_ID_CHARACTERS_MAX]}…"
    return {**request, "request_id": short}


def _unavailable(message: str) -> ApiError:
    return ApiError(message, status=503, kind="server_error", code="status_unavailable")


def create_daemon_app(
    *,
    complaint: Callable[[], str],
    is_ready: Callable[[], bool],
    report: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
    status: StatusCache | None = None,
) -> Starlette:
    """Return the application. The callables must not block.

    ``complaint`` returns why the process is stuck, or an empty string; ``report`` returns more
    fields of ``/readyz``. Without ``status`` there is no status page.
    """
    routes = probe_routes(
        is_alive=lambda: not complaint(),
        is_ready=is_ready,
        registry=registry,
        complaint=complaint,
        report=report,
    )
    if status is not None:
        routes += status_routes(status)
    return Starlette(routes=routes, exception_handlers=error_responses())
