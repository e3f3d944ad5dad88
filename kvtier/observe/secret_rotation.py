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
"""Two looks see a file whole. A Secret of Kubernetes takes up to a minute to come here anyway."""


class SecretRotation:
    """Has secrets read again. From any thread, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, str] = {}
        """What was said to be wrong, by secret."""

    def look(self, secrets: Iterable[Secret[Any]]) -> None:
        """Take what has changed and is whole."""
        with self._lock:
            for secret in secrets:
                self._read(secret, secret.look)

    def reload(self, secrets: Sequence[Secret[Any]]) -> list[str]:
        """Read all now; returns what is wrong with those that stay as they were."""
        with self._lock:
            self._said.clear()  # who asks is told again
            for secret in secrets:
                self._read(secret, secret.reload)
            return [secret.fault for secret in secrets if secret.fault]

    def _read(self, secret: Secret[Any], step: Callable[[], bool]) -> None:
        try:
            is_changed = step()
        except StartError as error:
            if self._said.get(secret.name) != secret.fault:
                self._said[secret.name] = secret.fault
                _log.error("new secret rejected, keeping the previous one", error=error)
            return
        if not secret.fault:
            self._said.pop(secret.name, None)
        if is_changed:
            _log.info("secret reloaded", secret=secret.name)
