"""Reloads secrets when their files change, and logs what was reloaded or rejected."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvtier.errors import StartError
from kvtier.observe.log import Log
from kvtier.secret import Secret

__all__ = ["LOOK_EVERY_S", "SecretRotation"]

_log = Log("kvtier.secrets")

LOOK_EVERY_S = 1.0
"""Seconds between checks. A Kubernetes Secret takes up to a minute to reach the node anyway."""


class SecretRotation:
    """Reloads secrets. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: dict[str, str] = {}
        """The last logged error, by secret."""

    def look(self, secrets: Iterable[Secret[Any]]) -> None:
        """Reload secrets whose files changed and are complete."""
        with self._lock:
            for secret in secrets:
                self._read(secret, secret.look)

    def reload(self, secrets: Sequence[Secret[Any]]) -> list[str]:
        """Reload all secrets now; returns the errors of those that keep their old value."""
        with self._lock:
            self._logged.clear()  # log errors again
            for secret in secrets:
                self._read(secret, secret.reload)
            return [secret.fault for secret in secrets if secret.fault]

    def _read(self, secret: Secret[Any], step: Callable[[], bool]) -> None:
        try:
            is_changed = step()
        except StartError as error:
            if self._logged.get(secret.name) != secret.fault:
                self._logged[secret.name] = secret.fault
                _log.error("new secret rejected, keeping the previous one", error=error)
            return
        if not secret.fault:
            self._logged.pop(secret.name, None)
        if is_changed:
            _log.info("secret reloaded", secret=secret.name)
