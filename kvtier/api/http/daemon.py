"""The daemon's own HTTP face: health, readiness and metrics, nothing else."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from kvtier.api.http.error import error_responses
from kvtier.api.http.probe import probe_routes

__all__ = ["create_daemon_app"]


def create_daemon_app(
    *,
    is_alive: Callable[[], bool],
    is_ready: Callable[[], bool],
    registry: CollectorRegistry,
) -> Starlette:
    """Return the application; the two callables must return at once."""
    routes = probe_routes(is_alive=is_alive, is_ready=is_ready, registry=registry)
    return Starlette(routes=routes, exception_handlers=error_responses())
