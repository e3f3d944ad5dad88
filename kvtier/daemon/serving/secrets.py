"""Reloads secrets when their files change, and reports invalid ones once.

Rules
-----
* Files are checked every second on a thread: a mount that does not answer blocks nothing else.
* After an invalid file the previous secret stays in use, and the file is read again until valid.
* A tier's secret is a setting as well: ``Reload`` adopts it if the tier can take it while open.
"""

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.api.rpc.credentials import Identity
from kvtier.certificate import Certificates
from kvtier.config.tiers import secret_in
from kvtier.core.residency import TierName
from kvtier.daemon.reload import Reload
from kvtier.daemon.tiers.opening import authorities_of
from kvtier.observe.daemon_metrics import (
    CERTIFICATE_NOT_AFTER,
    CERTIFICATE_NOT_BEFORE,
    SECRET_REFUSED,
)
from kvtier.observe.log import Log
from kvtier.observe.metrics import Metrics
from kvtier.observe.secret_rotation import SecretRotation
from kvtier.runtime.driver import Driver
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.secret import Secret

__all__ = ["DaemonSecrets", "TierSecret"]

_log = Log("kvtier.secrets")


class TierSecret:
    """A tier setting that is in a file of its own; ``reload`` adopts it."""

    def __init__(self, name: TierName, reload: Reload) -> None:
        self.tier = name
        self._reload = reload
        section = reload.config.tiers[name]
        self.secret = Secret(f"{name}_{section.file_backed_key}", self.files, self._read)
        self._tried = getattr(section, section.file_backed_key)
        """The last value passed to ``reload``; the file may have changed since the start."""
        self._refusal = ""

    @property
    def fault(self) -> str:
        """Return why the value in the file is not adopted."""
        section = self._reload.config.tiers[self.tier]
        is_stuck = self.secret.value != getattr(section, section.file_backed_key)
        return self.secret.fault or (self._refusal if is_stuck else "")

    def files(self) -> tuple[Path, ...]:
        """Return the file, if there is one."""
        path = self._reload.config.tiers[self.tier].secret_file
        return () if path is None else (path,)

    def take(self) -> None:
        """Adopt the value in the file; each value is tried once."""
        if self.secret.value == self._tried:
            return
        self._tried = self.secret.value
        source = "".join(map(str, self.files()))
        self._refusal = self._reload.take_secret(self.tier, self._tried, source)
        if self._refusal:
            _log.error("new secret rejected, keeping the previous one", error=self._refusal)

    def _read(self) -> str:
        section = self._reload.config.tiers[self.tier]
        return "".join(secret_in(self.tier, section, path) for path in self.files())


class DaemonSecrets:
    """The secrets of a daemon, including ``held``; its methods are for the loop's thread."""

    def __init__(self, driver: Driver, reload: Reload, *held: Secret[Any]) -> None:
        self._driver = driver
        self._reload = reload
        self._held = list(held)
        self._rotation = SecretRotation()
        self._tiers = [
            TierSecret(name, reload)
            for name, section in reload.config.tiers.items()
            if section.file_backed_key
        ]
        reload.read_secrets = lambda: self._rotation.reload(self._others())

    def add(self, secrets: Iterable[Secret[Any]]) -> None:
        """Watch more secrets."""
        self._held += secrets

    async def step(self) -> None:
        """Check all files once, and report."""
        if secrets := self._all():
            await run_in_thread(partial(self._rotation.look, secrets), "kvtier-secrets")
        for each in self._tiers:
            if each.secret in secrets and self._reload.is_open:
                each.take()
        self._set_metrics(self._driver.node.metrics)

    def document(self) -> dict[str, Any]:
        """Return the secrets' part of the status document."""
        now_s = time.time()
        told = {}
        for secret in self._all():
            certificates = _certificates_of(secret)
            time_fault = certificates.complaint(now_s) if certificates else ""
            told[secret.name] = {
                "fault": self._fault_of(secret) or time_fault,
                "not_after_s": certificates.not_after_s if certificates else None,
            }
        return told

    def _all(self) -> list[Secret[Any]]:
        return [*self._others(), *(each.secret for each in self._tiers if each.files())]

    def _others(self) -> list[Secret[Any]]:
        """Return all but those of ``TierSecret``, which are read again with the configuration."""
        authorities = map(authorities_of, self._driver.tiers.values())
        return [*self._held, *filter(None, authorities)]

    def _fault_of(self, secret: Secret[Any]) -> str:
        own = next((each for each in self._tiers if each.secret is secret), None)
        return own.fault if own else secret.fault

    def _set_metrics(self, metrics: Metrics) -> None:
        secrets = {secret.name: secret for secret in self._all()}
        for name in dict(SECRET_REFUSED.labels)["secret"]:
            is_refused = name in secrets and bool(self._fault_of(secrets[name]))
            metrics.set(SECRET_REFUSED, is_refused, secret=name)
        for name in dict(CERTIFICATE_NOT_AFTER.labels)["secret"]:
            found = _certificates_of(secrets[name]) if name in secrets else None
            metrics.set(CERTIFICATE_NOT_AFTER, found.not_after_s if found else 0, secret=name)
            metrics.set(CERTIFICATE_NOT_BEFORE, found.not_before_s if found else 0, secret=name)


def _certificates_of(secret: Secret[Any]) -> Certificates | None:
    value = secret.value
    if isinstance(value, Identity):
        return value.certificate
    return value if isinstance(value, Certificates) else None
