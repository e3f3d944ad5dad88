"""Errors in the shape that OpenAI clients parse."""

import json
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtier.errors import KvtierError

__all__ = [
    "ApiError",
    "engine_failed",
    "engine_silent",
    "error_responses",
    "no_key",
    "not_ready",
    "overloaded",
]

_RETRY_AFTER_SECONDS = 1
"""A place frees up with every finished request, so it is worth coming back soon."""


class ApiError(KvtierError):
    """A request that gets an error instead of an answer; ``param`` names the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body, the same for a response and for an event of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """Return the whole response."""
        headers = dict(headers or {})
        if self.status in {429, 503}:
            headers["retry-after"] = str(_RETRY_AFTER_SECONDS)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)

    def event(self) -> bytes:
        """Return the event that ends a stream which has already begun."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


def no_key(message: str) -> ApiError:
    """Say that a call does not show who it comes from; in the words that clients look for."""
    return ApiError(message, status=401, code="invalid_api_key")


def overloaded() -> ApiError:
    """Say that there is no room now; clients come back by themselves."""
    return ApiError(
        "the engine's queue is full; retry in a moment",
        status=429,
        kind="rate_limit_error",
        code="engine_overloaded",
    )


def not_ready() -> ApiError:
    """Say that the engine is loading or stopping."""
    return ApiError(
        "the engine is loading or stopping; retry in a moment",
        status=503,
        kind="server_error",
        code="engine_not_ready",
    )


def engine_silent() -> ApiError:
    """Say that the engine gave no sign of life before the deadline."""
    return ApiError(
        "the engine does not answer", status=503, kind="server_error", code="engine_silent"
    )


def engine_failed() -> ApiError:
    """Say that something broke; what it was is for the log, not for the client."""
    return ApiError(
        "the server failed on this request; its log says why",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def error_responses() -> dict[type[Exception], Callable[[Request, Exception], Response]]:
    """Return what an application answers to each kind of exception."""
    return {
        ApiError: _answer_api_error,
        HTTPException: _answer_routing_error,
        Exception: _answer_bug,
    }


def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _answer_routing_error(request: Request, error: Exception) -> Response:
    """Turn the router's refusals (no such path, wrong method) into the common shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    else:
        message = error.detail
    return ApiError(message, status=error.status_code).response(dict(error.headers or {}))


def _answer_bug(_request: Request, _error: Exception) -> Response:
    """Answer an unforeseen exception without its trace; the server logs that itself."""
    return engine_failed().response()
