"""Notifies systemd about readiness, status and the watchdog.

Theory
------
A notification is a datagram to the socket ``NOTIFY_SOCKET`` with one assignment per line; see
sd_notify(3). The watchdog is fed from the daemon's own loop, and only while ``NodeHealth`` has no
complaint. If the loop or a tier's work is stuck, the feeding stops, and systemd restarts the
process.

Rules
-----
* The daemon serves even if systemd does not listen: a failed notification is a line in the log.
* Child processes cannot notify: the variables are removed from the environment.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, MutableMapping
from typing import Self

from kvtier.daemon.status.health import NodeHealth
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["Systemd"]

_PERIOD_S = 5.0
"""Longest time between reports, and so the maximum age of ``systemctl status``."""

_FEEDS = 3
"""Number of times the watchdog is fed in its timeout, so that a late one does no harm."""

_WAIT_S = 0.1
"""Time limit for sending a datagram; the loop is blocked meanwhile."""

_STOP_MARGIN_S = 5.0
"""Added to the daemon's own grace period for stopping."""

_STATUS_MAX = 200


class Systemd:
    """Connection to the service manager; without an ``address``, all methods do nothing.

    ``address`` is a path, or a name after an @. ``watchdog_s`` is the timeout of the watchdog; 0 if
    there is none.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._warnings = RateLimitedLog(Log("kvtier.daemon"))
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._is_serving = self._is_ready_sent = False
        self.period_s = min(_PERIOD_S, watchdog_s / _FEEDS) if watchdog_s else _PERIOD_S
        """Time between calls of ``report``, in seconds."""
        if address[:1] in {"/", "@"}:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.settimeout(_WAIT_S)
        elif address:
            self._warnings.warning("NOTIFY_SOCKET is neither a path nor a name after an @")

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Read systemd's variables, and remove them from ``environment``."""
        address, microseconds, pid = (
            environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        is_ours = pid in {"", str(os.getpid())} and microseconds.isdecimal()
        return cls(address, int(microseconds) / 1e6 if is_ours else 0.0)

    def starting(self, stage: str) -> None:
        """Report a stage of the start."""
        self._notify(_status(stage))

    def ready(self) -> None:
        """Report that the daemon serves."""
        self._is_serving = True
        self._is_ready_sent = self._notify("READY=1", _status("serving"))

    async def report(self, health: NodeHealth) -> None:
        """Report the health of the daemon, and feed the watchdog if it is well. On its loop."""
        if not self._is_serving:
            return
        complaint = health.complaint()
        status = _status(complaint or health.unreachable or _tiers(health))
        facts = [status, *([] if complaint else ["WATCHDOG=1"])]
        if not self._is_ready_sent:  # else systemd would assume that it is still starting
            facts.append("READY=1")
        self._is_ready_sent |= self._notify(*facts)

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload during the context; from any thread."""
        is_serving = self._is_serving  # READY=1 would be wrong while it is starting
        if is_serving:
            self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            if is_serving:
                self._is_ready_sent = self._notify("READY=1")

    def stopping(self, grace_s: float) -> None:
        """Report that the daemon stops within ``grace_s``; nothing is reported afterwards."""
        self._is_serving = False
        extended_us = int((grace_s + _STOP_MARGIN_S) * 1e6)
        self._notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={extended_us}", _status("stopping"))
        self.close()

    def close(self) -> None:
        """Report nothing more. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _notify(self, *facts: str) -> bool:
        """Send assignments; False if that failed."""
        connection = self._socket
        if connection is None:
            return False
        try:
            connection.sendto("\n".join(facts).encode(errors="replace"), self._address)
        except OSError as error:
            self._warnings.warning("cannot notify systemd", fact=facts[0], error=error)
            return False
        return True


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_STATUS_MAX]}"


def _tiers(health: NodeHealth) -> str:
    """Return the state of each tier, with a reason unless it is up."""
    parts = [
        f"{name} {told['state']}" + (f" ({told['reason']})" if told["reason"] else "")
        for name, told in health.document().items()
    ]
    return f"serving: {', '.join(parts)}" if parts else "serving"
