"""Who may operate: each call of an operator shows a ticket (Unix socket) or a token (TCP).

Both travel as ``authorization: Bearer …``. Engines need neither here: what lets them register is
the ticket of the arena's door and the proof that they map it, and each later call names the
session that came of it, which nobody can guess.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

__all__ = ["Guard"]

_ENGINE_CALLS = "/kvtier.v1.Engine/"
_SCHEME = "bearer "


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs alone
    """Refuses, with ``remedy``, a call that carries no secret which ``admits`` is true for."""

    def __init__(self, admits: Callable[[str], bool], remedy: str) -> None:
        self._admits = admits
        self._remedy = remedy

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let a call through to its service, or answer it here."""
        if details.method.startswith(_ENGINE_CALLS):
            return await continuation(details)
        metadata: Mapping[str, str | bytes] = dict(details.invocation_metadata or ())
        shown = metadata.get("authorization", "")
        is_bearer = isinstance(shown, str) and shown[: len(_SCHEME)].lower() == _SCHEME
        if is_bearer and self._admits(str(shown)[len(_SCHEME) :]):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, _request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, self._remedy)
