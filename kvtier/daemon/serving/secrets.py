"""Secrets: what their files say is taken as they change, and what is wrong with them said once.

Rules
-----
* Files are looked at on a thread, every second: a mount that hangs keeps nobody waiting.
* What is no good leaves in force what was before, and is looked at again until it is good.
* The remote tier's URL is a setting as well: ``Reload`` has it hold, where only the login differs.
"""

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.api.rpc.credentials import Identity
from kvtier.certificate import Certificates
from kvtier.config.tiers import read_url
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

__all__ = ["DaemonSecrets"]

_log = Log("kvtier.secrets")


class DaemonSecrets:
    """Those of a daemon, with ``held`` among them; its methods are for the loop's thread."""

    def __init__(self, driver: Driver, reload: Reload, *held: Secret[Any]) -> None:
        self._driver = driver
        self._reload = reload
        self._held = list(held)
        self._rotation = SecretRotation()
        self._url = Secret("remote_url", self._url_files, self._read_url)
        self._url_tried = reload.config.remote.url
        """The one that was last to hold: its file may have changed since the start read it."""
        self._url_stays = ""
        """Why it does not."""
        reload.read_secrets = lambda: self._rotation.reload(self._others())

    def add(self, secrets: Iterable[Secret[Any]]) -> None:
        """Look at more of them."""
        self._held += secrets

    async def step(self) -> None:
        """Look at all once, and tell of them."""
        if secrets := self._all():
            await run_in_thread(partial(self._rotation.look, secrets), "kvtier-secrets")
        if self._url in secrets and self._reload.is_open:
            self._take_url()
        self._tell(self._driver.node.metrics)

    def document(self) -> dict[str, Any]:
        """Return the part of the status that tells of them."""
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
        return [*self._others(), *([self._url] if self._url_files() else [])]

    def _others(self) -> list[Secret[Any]]:
        """Return all but the URL, which is read again with the configuration."""
        remote = self._driver.tiers.get(TierName.REMOTE)
        authorities = authorities_of(remote) if remote else None
        return [*self._held, *([authorities] if authorities else [])]

    def _url_files(self) -> tuple[Path, ...]:
        path = self._reload.config.remote.url_file
        return () if path is None else (path,)

    def _read_url(self) -> str:
        return "".join(map(read_url, self._url_files()))

    def _take_url(self) -> None:
        """Have the URL hold that the file has; each one is tried once."""
        if self._url.value == self._url_tried:
            return
        self._url_tried = self._url.value
        source = "".join(map(str, self._url_files()))
        self._url_stays = self._reload.take_url(self._url_tried, source)
        if self._url_stays:
            _log.error("new secret rejected, keeping the previous one", error=self._url_stays)

    def _fault_of(self, secret: Secret[Any]) -> str:
        is_stuck = secret is self._url and self._url.value != self._reload.config.remote.url
        return secret.fault or (self._url_stays if is_stuck else "")

    def _tell(self, metrics: Metrics) -> None:
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
