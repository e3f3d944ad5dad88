"""Health probes and metrics, for orchestrators and Prometheus."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

__all__ = ["probe_routes"]


def probe_routes(
    *,
    is_alive: Callable[[], bool],
    is_ready: Callable[[], bool],
    registry: CollectorRegistry,
    complaint: Callable[[], str] = str,
    report: Callable[[], Mapping[str, Any]] = dict,
) -> list[Route]:
    """Return the three routes. The callables are called for each request, and must not block.

    ``complaint`` returns the response if the process is not alive. ``report`` returns more fields
    of ``/readyz``, which is then JSON instead of plain text.
    """

    async def healthz(_request: Request) -> Response:
        return _verdict(is_alive(), good="alive", bad=complaint() or "stuck")

    async def readyz(_request: Request) -> Response:
        more = report()
        if not more:
            return _verdict(is_ready(), good="ready", bad="not ready")
        is_good = is_ready()
        return JSONResponse({"ready": is_good, **more}, 200 if is_good else 503)

    async def metrics(_request: Request) -> Response:
        # Prometheus reads this format as well as OpenMetrics, which has no advantage here.
        headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4}
        return Response(generate_latest(registry), headers=headers)

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
    ]


def _verdict(is_good: bool, *, good: str, bad: str) -> Response:
    return PlainTextResponse(good if is_good else bad, 200 if is_good else 503)
