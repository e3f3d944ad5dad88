"""A connection to an HTTP server, and how many there may be.

Theory
------
Who connects and asks nothing costs a descriptor for as long as he likes, and the tiers and engines
of the process live on the same descriptors. So beyond a bound the newest connection is let in, for
it may be a probe, and the oldest one goes on which nothing is being answered. Below the bound, the
head of a request has to be complete within some seconds, however slowly it is sent.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.api.http.operator import Operators

__all__ = ["Connection", "UnixConnection"]

_CONNECTIONS_MAX = 512
"""Half of the 1024 descriptors that a shell gives, and twice the prompts that may be inside."""

_HEAD_SECONDS = 30.0
"""From the connection, or a later request's first byte, to the end of the request's head."""


class Connection(H11Protocol):
    """One of at most so many."""

    _made_s = 0.0
    _limit: asyncio.TimerHandle | None = None
    """Ends the connection, while the head of a request is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Come in; another one may have to leave for it."""
        super().connection_made(transport)
        self._made_s = self.loop.time()
        if len(self.connections) > _CONNECTIONS_MAX:
            one = min(filter(_is_idle, self.connections), key=_patience)
            self.connections.discard(one)  # it would be chosen again before the loop has ended it
            one.transport.abort()
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        """Take what came; uvicorn's own limit ends with the first byte of a request."""
        super().data_received(data)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        self._unlimit()

    def _limit_head(self) -> None:
        if not _is_idle(self):
            self._unlimit()
        elif self._limit is None and not self.transport.is_closing():
            self._limit = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _unlimit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


class UnixConnection(Connection):
    """A connection over the engine's Unix socket; its requests know whether an operator asks."""

    def __init__(self, operators: Operators, **more: Any) -> None:
        super().__init__(**more)
        self._operators = operators

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Put ``is_operator`` into the state of the requests to come."""
        super().connection_made(transport)
        is_operator = self._operators.include(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "is_operator": is_operator}


def _is_idle(connection: Any) -> bool:
    return connection.cycle is None or connection.cycle.response_complete


def _patience(connection: Any) -> tuple[bool, float]:
    """Put those first that never asked anything, the oldest before the others."""
    return connection.cycle is not None, connection._made_s
