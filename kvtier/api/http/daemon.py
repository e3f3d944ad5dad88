"""The daemon's own HTTP face: health, readiness and metrics, nothing else."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from kvtier.api.http.error import error_responses
from kvtier.api.http.probe import probe_routes

__all__ = ["create_daemon_app"]


def create_daemon_app(
    *,
    complaint: Callable[[], str],
    is_ready: Callable[[], bool],
    tiers: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
) -> Starlette:
    """Return the application; the callables must return at once.

    ``complaint`` says why the process is not alive, or nothing; ``tiers`` how each one does.
    """
    routes = probe_routes(
        is_alive=lambda: not complaint(),
        is_ready=is_ready,
        registry=registry,
        complaint=complaint,
        report=lambda: {"tiers": tiers()},
    )
    return Starlette(routes=routes, exception_handlers=error_responses())
