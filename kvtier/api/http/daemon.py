"""The daemon's own HTTP application: health, readiness, metrics and the status page only."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from kvtier.api.http.error import error_responses
from kvtier.api.http.probe import probe_routes
from kvtier.api.http.status import SharedDocument, status_routes

__all__ = ["create_daemon_app"]


def create_daemon_app(
    *,
    complaint: Callable[[], str],
    is_ready: Callable[[], bool],
    report: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
    status: SharedDocument | None = None,
) -> Starlette:
    """Return the application; the callables must return at once.

    ``complaint`` returns why the process is not alive, or an empty text; ``report`` returns the
    further fields of ``/readyz``. Without ``status`` there is no page.
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
