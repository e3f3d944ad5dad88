"""Health, readiness and metrics: what orchestrators and Prometheus ask for."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

__all__ = ["probe_routes"]


def probe_routes(
    *,
    is_alive: Callable[[], bool],
    is_ready: Callable[[], bool],
    registry: CollectorRegistry,
) -> list[Route]:
    """Return the three routes; both questions are asked anew at each call and must not block."""

    async def healthz(_request: Request) -> Response:
        return _verdict(is_alive(), good="alive", bad="stuck")

    async def readyz(_request: Request) -> Response:
        return _verdict(is_ready(), good="ready", bad="not ready")

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=None, headers={"content-type": content_type})

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
    ]


def _verdict(is_good: bool, *, good: str, bad: str) -> Response:
    return PlainTextResponse(good if is_good else bad, 200 if is_good else 503)
