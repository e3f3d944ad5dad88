"""Errors in OpenAI's format."""

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
"""Short, because every finished request frees a slot."""


class ApiError(KvtierError):
    """An error response; ``param`` names the invalid field."""

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
        """Return the JSON body, for a response or an event of a stream."""
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
        """Return the event that ends a stream after it has started."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


def no_key(message: str) -> ApiError:
    """Return the error for a missing or invalid API key, with OpenAI's code."""
    return ApiError(message, status=401, code="invalid_api_key")


def overloaded() -> ApiError:
    """Return the error for a full queue; clients retry by themselves."""
    return ApiError(
        "the engine's queue is full; retry in a moment",
        status=429,
        kind="rate_limit_error",
        code="engine_overloaded",
    )


def not_ready() -> ApiError:
    """Return the error for an engine that is loading or stopping."""
    return ApiError(
        "the engine is loading or stopping; retry in a moment",
        status=503,
        kind="server_error",
        code="engine_not_ready",
    )


def engine_silent() -> ApiError:
    """Return the error for an engine that did not respond before the deadline."""
    return ApiError(
        "the engine is not responding", status=503, kind="server_error", code="engine_silent"
    )


def engine_failed() -> ApiError:
    """Return the error for an internal failure; details are in the log, not in the response."""
    return ApiError(
        "internal error; see the server's log",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def error_responses() -> dict[type[Exception], Callable[[Request, Exception], Response]]:
    """Return an application's exception handlers."""
    return {
        ApiError: _answer_api_error,
        HTTPException: _answer_routing_error,
        Exception: _answer_bug,
    }


def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _answer_routing_error(request: Request, error: Exception) -> Response:
    """Return the router's errors (unknown path, wrong method) in OpenAI's format."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"not found: {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not support {request.method}"
    else:
        message = error.detail
    return ApiError(message, status=error.status_code).response(dict(error.headers or {}))


def _answer_bug(_request: Request, _error: Exception) -> Response:
    """Respond to an unexpected exception without its traceback, which the server logs."""
    return engine_failed().response()
