"""The client of an engine: finds the daemon, keeps a session with it, and fails open.

A keeper thread makes the link, attends to the daemon's orders, and makes the next link when this
one breaks: because the daemon ended, was replaced, or asked to register again. While there is no
link, or the daemon was too slow a moment ago, every call raises ``DaemonUnavailable`` at once, and
the engine recomputes. A daemon that starts later, or again, is joined without anybody's doing.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.client.link import Copy, Link, LoadedBlock, open_link
from kvtier.core.identity import BlockHash, KeySpace
from kvtier.core.residency import TierName
from kvtier.errors import DaemonSlow, DaemonUnavailable, RegistrationRefused
from kvtier.observe.log import Log, Repeated
from kvtier.tiers.base import Removed
from kvtier.v1 import engine_pb2 as pb

__all__ = ["Client", "ClientDeadlines", "OwnTier"]

_log = Log("kvtier.client")

_CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` waits for calls under way; each of them has a shorter timeout of its own."""

_REFUSED_PAUSE_S = 5.0
"""Pause after a refusal: mostly it needs somebody to change something."""


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """How long an engine waits for the daemon."""

    lookup_s: float = 0.25
    load_s: float = 5.0
    store_s: float = 5.0
    reconnect_s: float = 1.0


@dataclass(frozen=True, slots=True)
class OwnTier:
    """What an engine tells of its own tier."""

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    hit_tokens: int


class Client:
    """Use ``start`` first and ``close`` at the end. Calls may come from any thread."""

    def __init__(
        self,
        socket_path: Path,
        space: KeySpace,
        engine: str,
        *,
        deadlines: ClientDeadlines | None = None,
        drop: Callable[[], Removed] = Removed,
        own_tier: Callable[[], OwnTier] | None = None,
    ) -> None:
        """``own_tier`` tells what is in the engine's own tier, and ``drop`` empties it.

        ``drop`` may raise TimeoutError where the engine is too busy; the operator is then told
        that there was no answer.
        """
        self.deadlines = deadlines or ClientDeadlines()
        self._socket_path = socket_path
        self._space = space
        self._engine = engine
        self._drop = drop
        self._own_tier = own_tier
        self._link: Link | None = None
        self._num_users = 0
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._broken = threading.Event()
        self._slow_until_s = 0.0
        self._warnings = Repeated(_log)
        self._keeper = threading.Thread(target=self._keep, name="kvtier-keeper", daemon=True)
        self._reporter = threading.Thread(target=self._report, name="kvtier-report", daemon=True)

    def start(self) -> None:
        """Begin to look for the daemon; returns at once."""
        self._keeper.start()
        self._reporter.start()

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until there is a session; False if there is none in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link is not None, timeout_s)

    @property
    def is_attached(self) -> bool:
        """Tell whether there is a session now."""
        return self._link is not None

    @property
    def session(self) -> str:
        """Return the session's name; empty without one."""
        link = self._link
        return link.session if link else ""

    def lookup(
        self, tenant: bytes, hashes: Sequence[BlockHash], first: int
    ) -> tuple[tuple[TierName, ...], str]:
        """Return the tiers of the blocks from ``first`` on that can be loaded, and why no more."""
        with self._use() as link:
            return link.lookup(tenant, hashes, first, self.deadlines.lookup_s)

    def load(
        self, tenant: bytes, hashes: Sequence[BlockHash], first: int
    ) -> Iterator[LoadedBlock | str]:
        """Yield verified blocks as they come, then why no more; see ``Link.load``."""
        with self._use() as link:
            yield from link.load(tenant, hashes, first, self.deadlines.load_s)

    def store(self, tenant: bytes, hashes: Sequence[BlockHash], first: int, copy: Copy) -> int:
        """Offer the blocks from ``first`` on; returns how many it has. See ``Link.store``."""
        with self._use() as link:
            return link.store(tenant, hashes, first, copy, self.deadlines.store_s)

    def close(self) -> None:
        """End the session, once the calls under way are over. Idempotent."""
        self._is_closing.set()
        self._break()
        for thread in (self._keeper, self._reporter):
            if thread.is_alive():
                thread.join(_CLOSE_TIMEOUT_S)

    @contextmanager
    def _use(self) -> Iterator[Link]:
        """Lend the link; one that fails is broken, and none is lent while the daemon is slow."""
        if time.monotonic() < self._slow_until_s:
            raise DaemonUnavailable("the daemon was too slow a moment ago")
        with self._changed:
            link = self._link
            if link is None:
                raise DaemonUnavailable("no daemon")
            self._num_users += 1
        try:
            yield link
        except DaemonSlow as error:
            self._warnings.warning("the daemon is slow", error=error)
            self._slow_until_s = time.monotonic() + self.deadlines.reconnect_s
            raise
        except DaemonUnavailable as error:
            self._warnings.warning("the daemon did not answer", error=error)
            self._break()
            raise
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    def _break(self) -> None:
        self._broken.set()

    def _keep(self) -> None:
        while not self._is_closing.is_set():
            pause_s = self.deadlines.reconnect_s
            try:
                self._serve(open_link(self._socket_path, self._space, self._engine))
            except DaemonUnavailable as error:
                self._warnings.warning("no daemon", socket=self._socket_path, error=error)
            except RegistrationRefused as error:
                self._warnings.warning("the daemon refused this engine", error=error)
                pause_s = _REFUSED_PAUSE_S
            self._is_closing.wait(pause_s)

    def _serve(self, link: Link) -> None:
        """Lend out a link until it breaks, then close it when nobody uses it any more."""
        self._broken.clear()
        attendant = threading.Thread(target=self._attend, args=(link,), daemon=True)
        populate = partial(link.attachment.populate, self._broken.is_set)
        populator = threading.Thread(target=populate, daemon=True)
        with self._changed:
            self._link = link
            self._changed.notify_all()
        _log.info("attached", socket=self._socket_path)
        attendant.start()
        populator.start()
        if not self._is_closing.is_set():
            self._broken.wait()
        with self._changed:
            self._link = None
            is_idle = self._changed.wait_for(lambda: self._num_users == 0, _CLOSE_TIMEOUT_S)
        populator.join()
        _log.info("detached", socket=self._socket_path)
        if is_idle:  # else a copy still uses the arena, which goes with the process at the latest
            link.close()

    def _attend(self, link: Link) -> None:
        try:
            for order in link.orders():
                try:
                    removed = self._drop()
                except TimeoutError:
                    self._warnings.warning("the engine was too busy to empty its tier")
                    continue
                self._send_report(link, order, removed)
        except DaemonUnavailable:
            if self._link is link:
                self._break()

    def _report(self) -> None:
        while self._own_tier and not self._is_closing.wait(self.deadlines.reconnect_s):
            try:
                with self._use() as link:
                    self._send_report(link, 0, Removed())
            except DaemonUnavailable:
                continue

    def _send_report(self, link: Link, order: int, removed: Removed) -> None:
        own = self._own_tier() if self._own_tier else OwnTier(0, 0, 0, 0)
        report = pb.ReportRequest(
            capacity_bytes=own.capacity_bytes,
            used_bytes=own.used_bytes,
            used_tokens=own.used_tokens,
            hit_tokens=own.hit_tokens,
            order=order,
            removed_blocks=removed.num_blocks,
            removed_bytes=removed.num_bytes,
        )
        link.report(report, self.deadlines.store_s)
