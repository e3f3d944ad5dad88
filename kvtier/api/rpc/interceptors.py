"""gRPC interceptors: authorization of operators, and a check of malformed requests.

Each operator call carries a ticket (Unix socket) or a token (TCP), as ``authorization: Bearer …``.
Engines need neither: they register with a ticket for the shared memory and a proof that they map
it, and each later call carries the session's secret id.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["MalformedRequestInterceptor", "OperatorAuthInterceptor"]

_ENGINE_CALLS = "/kvtier.v1.Engine/"
_SCHEME = "bearer "
_WARNING_PERIOD_NS = 60 * 10**9

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorAuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs alone
    """Refuses calls unless ``admits`` accepts their secret; ``remedy`` is the error message."""

    def __init__(self, admits: Callable[[str], bool], remedy: str) -> None:
        self._admits = admits
        self._remedy = remedy

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of an authorized call, or one that refuses it."""
        if details.method.startswith(_ENGINE_CALLS):
            return await continuation(details)
        metadata: Mapping[str, str | bytes] = dict(details.invocation_metadata or ())
        shown = metadata.get("authorization", "")
        is_bearer = isinstance(shown, str) and shown[: len(_SCHEME)].lower() == _SCHEME
        if is_bearer and self._admits(str(shown)[len(_SCHEME) :]):
            return await continuation(details)
        # A stream, because gRPC calls its handler before the caller has sent a message.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _requests: Any, context: _Context) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, self._remedy)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A request that could not be parsed."""

    error: str


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs alone
    """Answers requests that cannot be parsed with INVALID_ARGUMENT.

    gRPC itself would answer UNKNOWN and log an error with a traceback for each of them.
    """

    def __init__(self) -> None:
        self._warnings = RateLimitedLog(Log("kvtier.rpc"), _WARNING_PERIOD_NS)
        self._checked: dict[str, Any] = {}
        """Wrapped handlers by method; only existing methods are added."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, wrapped in the check."""
        method = details.method
        if method not in self._checked:
            call = await continuation(details)
            if call is None:
                return None
            self._checked[method] = self._check(method, call)
        return self._checked[method]

    def _check(self, method: str, call: Any) -> Any:
        def parse(raw: bytes) -> Any:
            try:
                return call.request_deserializer(raw)
            except DecodeError as error:
                return _Unreadable(str(error))

        async def answer(request: Any, context: _Context) -> Any:
            await self._refuse_unreadable(method, request, context)
            return await call.unary_unary(request, context)

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            await self._refuse_unreadable(method, request, context)
            async with contextlib.aclosing(call.unary_stream(request, context)) as replies:
                async for reply in replies:
                    yield reply

        make, behaviour = (
            (grpc.unary_stream_rpc_method_handler, stream)
            if call.response_streaming
            else (grpc.unary_unary_rpc_method_handler, answer)
        )
        return make(behaviour, parse, call.response_serializer)

    async def _refuse_unreadable(self, method: str, request: Any, context: _Context) -> None:
        if isinstance(request, _Unreadable):
            peer, error = context.peer(), request.error
            self._warnings.warning("cannot parse a request", method=method, peer=peer, error=error)
            details = f"cannot parse the request to {method}: {error}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details)
