"""Connections to an HTTP server: a limit on their number, and a deadline for each request's head.

Theory
------
An idle connection costs a file descriptor, and the tiers and engines of the process need
descriptors too. At the limit a new connection is still accepted, because it may be a health probe,
and the oldest connection without a request in progress is closed. The head of a request must be
complete within some seconds, however slowly it is sent.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.api.http.operator import Operators

__all__ = ["Connection", "UnixConnection"]

_CONNECTIONS_MAX = 512
"""Half of the usual limit of 1024 descriptors, and twice the number of prompts served at once."""

_HEAD_SECONDS = 30.0
"""Time from the connection, or from a later request's first byte, to the end of the head."""


class Connection(H11Protocol):
    """One connection, of at most ``_CONNECTIONS_MAX``."""

    _made_s = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    """Closes the connection at the deadline; set while the head of a request is incomplete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Accept the connection; beyond the limit, close another one for it."""
        super().connection_made(transport)
        self._made_s = self.loop.time()
        if len(self.connections) > _CONNECTIONS_MAX:
            one = min(filter(_is_idle, self.connections), key=_patience)
            self.connections.discard(one)  # it would be chosen again before the loop has ended it
            one.transport.abort()
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; uvicorn's own timeout ends at the first byte of a request."""
        super().data_received(data)
        self._update_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        super().connection_lost(exc)
        self._cancel_head_timer()

    def _update_head_timer(self) -> None:
        if not _is_idle(self):
            self._cancel_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class UnixConnection(Connection):
    """A connection over the engine's Unix socket, which records whether an operator calls."""

    def __init__(self, operators: Operators, **more: Any) -> None:
        super().__init__(**more)
        self._operators = operators

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Set ``is_operator`` in the state of the connection's requests."""
        super().connection_made(transport)
        is_operator = self._operators.include(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "is_operator": is_operator}


def _is_idle(connection: Any) -> bool:
    return connection.cycle is None or connection.cycle.response_complete


def _patience(connection: Any) -> tuple[bool, float]:
    """Sort connections that never sent a request first, and then by age, the oldest first."""
    return connection.cycle is not None, connection._made_s
