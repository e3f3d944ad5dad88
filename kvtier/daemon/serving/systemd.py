"""What systemd hears of the daemon: that it serves, how it does, and that it is alive.

Theory
------
A datagram to the socket that ``NOTIFY_SOCKET`` names, with a fact on each line: sd_notify(3). The
watchdog is fed from the daemon's own loop, and only while ``NodeHealth`` has nothing to complain
of. No thread stands in for a loop that is stuck, and work of a tier that stands still ends the
feeding as well: then systemd ends the process and starts another.

Rules
-----
* The process serves whether or not systemd listens: what cannot be told is a line in the log.
* Children have no say: what systemd gave us is taken out of the environment.
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
"""Between two reports at most, so that ``systemctl status`` is no older."""

_FEEDS = 3
"""Times that the watchdog is fed within the time it waits, so that a late one is no end."""

_WAIT_S = 0.1
"""For systemd to take a datagram; the loop stands still meanwhile."""

_STOP_MARGIN_S = 5.0
"""Beyond the grace for stopping, which the daemon keeps itself."""

_STATUS_MAX = 200


class Systemd:
    """What started this process and wants to hear of it, or nobody: then nothing is told.

    ``address`` is a path, or a name behind an @. ``watchdog_s`` is how long the watchdog waits to
    be fed; 0: there is none.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._warnings = RateLimitedLog(Log("kvtier.daemon"))
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._is_serving = self._is_known = False
        self.period_s = min(_PERIOD_S, watchdog_s / _FEEDS) if watchdog_s else _PERIOD_S
        """How often ``report`` is to be called."""
        if address[:1] in {"/", "@"}:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.settimeout(_WAIT_S)
        elif address:
            self._warnings.warning("NOTIFY_SOCKET is neither a path nor a name behind an @")

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Take over what systemd says of itself, which is removed from ``environment``."""
        address, microseconds, pid = (
            environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        is_ours = pid in {"", str(os.getpid())} and microseconds.isdecimal()
        return cls(address, int(microseconds) / 1e6 if is_ours else 0.0)

    def starting(self, stage: str) -> None:
        """Tell what is being done before the daemon serves."""
        self._tell(_status(stage))

    def ready(self) -> None:
        """Tell that the daemon serves."""
        self._is_serving = True
        self._is_known = self._tell("READY=1", _status("serving"))

    async def report(self, health: NodeHealth) -> None:
        """Tell how the daemon does, and feed the watchdog while it is well. On its loop."""
        if not self._is_serving:
            return
        complaint = health.complaint()
        status = _status(complaint or health.unreachable or _tiers(health))
        facts = [status, *([] if complaint else ["WATCHDOG=1"])]
        if not self._is_known:  # systemd would take it for still starting
            facts.append("READY=1")
        self._is_known |= self._tell(*facts)

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Tell that the configuration is read again, within the context; from any thread."""
        is_told = self._is_serving  # READY=1 would say too much of one that still starts
        if is_told:
            self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            if is_told:
                self._is_known = self._tell("READY=1")

    def stopping(self, grace_s: float) -> None:
        """Tell that the daemon serves no more, and ends within ``grace_s``; it is the last word."""
        self._is_serving = False
        extended_us = int((grace_s + _STOP_MARGIN_S) * 1e6)
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={extended_us}", _status("stopping"))
        self.close()

    def close(self) -> None:
        """Tell nothing more. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *facts: str) -> bool:
        """Send facts; False where nobody took them."""
        connection = self._socket
        if connection is None:
            return False
        try:
            connection.sendto("\n".join(facts).encode(errors="replace"), self._address)
        except OSError as error:
            self._warnings.warning("systemd could not be told", fact=facts[0], error=error)
            return False
        return True


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_STATUS_MAX]}"


def _tiers(health: NodeHealth) -> str:
    """Return each tier's state, and why where it is not up."""
    parts = [
        f"{name} {told['state']}" + (f" ({told['reason']})" if told["reason"] else "")
        for name, told in health.document().items()
    ]
    return f"serving: {', '.join(parts)}" if parts else "serving"
