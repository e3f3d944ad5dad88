"""The engine's OpenAI-compatible HTTP application."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier.api.http.chain import ChainEndpoint, ChainIdentity, PromptRecorder, RecentPrompts
from kvtier.api.http.completions import CompletionEndpoint
from kvtier.api.http.engine_call import read_chat, read_completion
from kvtier.api.http.errors import error_responses
from kvtier.api.http.generation import Backend
from kvtier.api.http.health import probe_routes
from kvtier.api.http.limits import PromptLimiter, ServerLimits
from kvtier.api.http.openai_response import CHAT, COMPLETION
from kvtier.api.http.request_body import ChatBody, CompletionBody
from kvtier.api.http.service import ChatModel, EngineService, NoObserver, Observer
from kvtier.api.http.tenant import TenantRules

__all__ = ["create_app"]


def create_app(
    service: EngineService,
    model: ChatModel,
    *,
    registry: CollectorRegistry,
    observer: Observer | None = None,
    limits: ServerLimits | None = None,
    tenants: TenantRules | None = None,
    identity: ChainIdentity | None = None,
) -> Starlette:
    """Return the application, which needs no closing.

    Without ``identity`` there is no endpoint for block hashes.
    """
    limits = limits or ServerLimits()
    tenants = tenants or TenantRules()
    recent = RecentPrompts()
    if identity is not None:
        service = PromptRecorder(service, recent)
    backend = Backend(
        service, model, observer or NoObserver(), time.monotonic, limits.silence_seconds
    )
    limiter = PromptLimiter(limits.open_prompts, limits.prompts_per_call)
    complete = CompletionEndpoint(
        CompletionBody, read_completion, COMPLETION, backend, limiter, limits, tenants
    )
    chat = CompletionEndpoint(ChatBody, read_chat, CHAT, backend, limiter, limits, tenants)
    chains = ChainEndpoint(identity, recent, model, limiter, limits, tenants) if identity else None
    probes = probe_routes(
        is_alive=lambda: not service.is_stuck,
        is_ready=lambda: service.is_ready,
        registry=registry,
    )
    app = Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", _models(model, tenants)),
            *_chain_routes(chains),
            *(_guarded(route, tenants) if route.path == "/metrics" else route for route in probes),
        ],
        exception_handlers=error_responses(),
    )
    app.router.redirect_slashes = False  # clients do not resend a body after a redirect
    return app


def _chain_routes(chains: ChainEndpoint | None) -> list[Route]:
    return [Route("/v1/kvtier/chain", chains.answer, methods=["POST"])] if chains else []


def _guarded(metrics: Route, tenants: TenantRules) -> Route:
    async def guarded(request: Request) -> Response:
        tenants.check_scrape(request)
        response: Response = await metrics.endpoint(request)
        return response

    return Route(metrics.path, guarded)


def _models(model: ChatModel, tenants: TenantRules) -> Callable[[Request], Response]:
    card = {
        "id": model.model_id,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kvtier",
        "max_model_len": model.context_limit,  # vLLM's name; load generators look for it
    }

    def models(request: Request) -> Response:
        tenants.key_of(request)
        return JSONResponse({"object": "list", "data": [card]})

    return models
