"""Keeps a client's link to its daemon: attaches, serves the daemon's orders, and reconnects.

A keeper thread opens the link and replaces it when it breaks: because the daemon ended, was
replaced, or asked the client to register again. A daemon that starts later, or restarts, is found
automatically. While there is no link, or the daemon was too slow a moment ago, ``lend`` raises
``DaemonUnavailable`` at once.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kvtier.client.link import DaemonLink
from kvtier.client.outbox import Outbox
from kvtier.client.types import ClientDeadlines, OnChanges, OwnTier
from kvtier.config.model import find_socket
from kvtier.core.residency_change import RESYNC, ResidencyChange
from kvtier.errors import CallRefused, DaemonSlow, DaemonUnavailable, RegistrationRefused
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.tiers.base import Removed

__all__ = ["ChangeForwarder", "LinkKeeper"]

_log = Log("kvtier.client")

_CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` waits for running calls, each of which has a shorter timeout."""

_ABSENT_PERIOD_NS = 5 * 60 * 10**9
"""Interval of log lines about a missing daemon: an engine may run without one for days."""

_REFUSED_PAUSE_S = 5.0
"""Pause after a refusal: it usually takes a change by an operator."""

_GATHER_S = 0.003
"""Announcements within this time share a call: a thousand requests per second then take about three
hundred calls, and promotions for a request are not delayed noticeably."""

_REPORT_PERIOD_S = 1.0
"""Interval of reports: a change of load or speed shows within seconds."""


class ChangeForwarder:
    """Passes the changes of one source at a time to ``on_changes``, from one thread at a time."""

    def __init__(self, on_changes: OnChanges) -> None:
        self._on_changes = on_changes
        self._lock = threading.Lock()
        self._source: object = None

    def begin(self, source: object) -> None:
        """Start forwarding a source and stop forwarding the previous one."""
        with self._lock:
            self._source = source

    def follow(self, source: object, batches: Iterable[Sequence[ResidencyChange]]) -> None:
        """Forward a source's changes until it ends or is no longer the current source."""
        for changes in batches:
            with self._lock:
                if self._source is not source:
                    return
                self._on_changes(changes)

    def end(self, source: object) -> None:
        """Invalidate everything that a source has sent, if it is the current source."""
        with self._lock:
            if self._source is source:
                self._source = None
                self._on_changes([RESYNC])


class LinkKeeper:
    """Keeps a link to the daemon from ``start`` to ``close``. Thread-safe."""

    def __init__(
        self,
        socket_path: Path,
        open_link: Callable[[Path], DaemonLink],
        deadlines: ClientDeadlines,
        *,
        drop: Callable[[], Removed | str],
        own_tier: Callable[[], OwnTier] | None,
        on_changes: OnChanges | None,
    ) -> None:
        self.outbox = Outbox()
        self.warnings = RateLimitedLog(_log)
        self._deadlines = deadlines
        self._given_path = self._socket_path = socket_path
        self._was_attached = False
        self._open_link = open_link
        self._drop = drop
        self._own_tier = own_tier
        self._forwarder = ChangeForwarder(on_changes) if on_changes else None
        self._link: DaemonLink | None = None
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._slow_until_s = 0.0
        self._absences = RateLimitedLog(_log, _ABSENT_PERIOD_NS)
        self._threads = tuple(
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in (
                (self._report, "kvtier-report"),
                (self._announce, "kvtier-announce"),
                (self._keep, "kvtier-keeper"),
            )
        )
        self._is_forked = False
        os.register_at_fork(after_in_child=partial(_abandon, weakref.ref(self)))

    @property
    def link(self) -> DaemonLink | None:
        """Return the current link, or None."""
        return self._link

    def start(self) -> None:
        """Start looking for the daemon; returns at once.

        If no thread can be started, closes itself and raises RuntimeError.
        """
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self.close()
            raise

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for a session; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link is not None, timeout_s)

    def close(self) -> None:
        """End the session once running calls have ended. Idempotent."""
        self._is_closing.set()
        self.outbox.close()
        with self._changed:
            if self._link is not None:
                self._link.is_broken.set()
        for thread in reversed(self._threads):
            if thread.is_alive():
                thread.join(_CLOSE_TIMEOUT_S)

    @contextmanager
    def lend(self, **ids: object) -> Iterator[DaemonLink]:
        """Lend the link for one call; an unanswered call breaks it, a slow one pauses all calls.

        ``ids`` identify the call in the log.
        """
        ids = {name: number for name, number in ids.items() if number}
        if self._is_forked:
            error = DaemonUnavailable("the client was started before this process was forked")
            self.warnings.warning("the client cannot be used", error=error)
            raise error
        if time.monotonic() < self._slow_until_s:
            raise DaemonUnavailable("the daemon was too slow a moment ago")
        with self._changed:
            link = self._link
            if link is None:
                raise DaemonUnavailable("no daemon")
            link.num_users += 1
        try:
            yield link
        except CallRefused as error:
            self.warnings.warning("the daemon refused a call", error=error, **ids)
            raise
        except DaemonSlow as error:
            self.warnings.warning("the daemon is slow", error=error, **ids)
            self._slow_until_s = time.monotonic() + self._deadlines.reconnect_s
            raise
        except DaemonUnavailable as error:
            self.warnings.warning("the daemon did not answer", error=error, **ids)
            link.is_broken.set()
            raise
        finally:
            with self._changed:
                link.num_users -= 1
                self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child, close the inherited parts of the parent's session."""
        if self._threads[-1].ident is None:
            return  # not started yet: the child may start it
        self._is_forked = True
        # The parent's threads may have held the locks of these.
        self._changed = threading.Condition()
        self.outbox = Outbox()
        self.warnings = RateLimitedLog(_log)
        link, self._link = self._link, None
        if link is not None:
            link.attachment.abandon()

    def _keep(self) -> None:
        while not self._is_closing.is_set():
            pause_s = self._deadlines.reconnect_s
            try:
                self._serve(self._attach())
            except DaemonUnavailable as error:
                self._absences.warning("no daemon", socket=self._socket_path, error=error)
            except RegistrationRefused as error:
                self._absences.warning("the daemon refused this engine", error=error)
                pause_s = _REFUSED_PAUSE_S
            except Exception:  # keep looking for the daemon whatever happens
                self.warnings.exception("the session failed", socket=self._socket_path)
                with self._changed:
                    self._link = None
            self._is_closing.wait(pause_s)

    def _attach(self) -> DaemonLink:
        """Attach to the daemon that is found, and later to any daemon at the same path."""
        if not self._was_attached:
            self._socket_path = find_socket(self._given_path)
        link = self._open_link(self._socket_path)
        self._was_attached = True
        return link

    def _serve(self, link: DaemonLink) -> None:
        """Lend a link until it breaks, then close it once it is unused."""
        over = threading.Event()
        closer = threading.Thread(target=self._populate_and_close, args=(link, over), daemon=True)
        try:
            closer.start()
        except RuntimeError:  # no thread can be started
            link.close()
            raise
        try:
            self._lend_out(link)
        finally:
            with self._changed:
                self._link = None
            over.set()
            if self._forwarder:
                with self._continuing("watching"):
                    self._forwarder.end(link)
            closer.join(_CLOSE_TIMEOUT_S)
            if closer.is_alive():
                _log.warning("the arena is in use still", socket=self._socket_path)
            _log.info("detached", socket=self._socket_path)

    def _lend_out(self, link: DaemonLink) -> None:
        self.outbox.begin_session()
        with self._changed:
            self._link = link
            self._changed.notify_all()
        _log.info("attached", socket=self._socket_path, protocol=link.protocol)
        threading.Thread(target=self._serve_orders, args=(link,), daemon=True).start()
        if self._forwarder:
            self._forwarder.begin(link)
            threading.Thread(target=self._watch, args=(link,), daemon=True).start()
        if not self._is_closing.is_set():
            link.is_broken.wait()

    def _populate_and_close(self, link: DaemonLink, over: threading.Event) -> None:
        """Populate a link's arena, and close the link once it is ``over`` and unused.

        Runs on its own thread: until then a copy, or a device, may use the arena.
        """
        try:
            with self._continuing("populating"):
                link.attachment.populate(over.is_set)
            over.wait()
            with self._changed:
                self._changed.wait_for(lambda: not link.num_users)
        finally:
            link.close()

    def _serve_orders(self, link: DaemonLink) -> None:
        """Carry out the daemon's orders; when their stream ends, the link is broken."""
        with self._continuing("orders"):
            for order in link.drop_orders():
                try:
                    removed, own = self._drop(), self._own()
                except TimeoutError:
                    self.warnings.warning("the engine was too busy to empty its tier")
                except Exception:  # the daemon reports the missing answer to the operator
                    self.warnings.exception("the engine could not empty its tier")
                else:
                    link.answer(order, removed, own, self._deadlines.store_s)
        link.is_broken.set()

    def _watch(self, link: DaemonLink) -> None:
        assert self._forwarder is not None
        try:
            self._forwarder.follow(link, link.changes())
        except DaemonUnavailable:
            link.is_broken.set()
        except Exception:  # stores and loads continue
            self.warnings.exception("changes of residency are not followed any more")
            with self._continuing("watching"):
                self._forwarder.end(link)

    def _report(self) -> None:
        period_s = min(_REPORT_PERIOD_S, self._deadlines.reconnect_s)
        while not self._is_closing.wait(period_s):
            if self._link is None:
                continue  # step times are valid for the next daemon as well
            with self._continuing("reports"):
                self._send_report()

    def _send_report(self) -> None:
        """Send a report. A separate method, so that the waiting thread refers to no link."""
        measured = self.outbox.take_measured()
        if measured or self._own_tier:
            own = self._own()
            with self.lend() as link:
                link.report(own, measured, self._deadlines.store_s)

    def _announce(self) -> None:
        while self.outbox.wait():
            self._is_closing.wait(_GATHER_S)
            with self._continuing("announcements"):
                self._send_announced()

    def _send_announced(self) -> None:
        """Send announcements. A separate method for the same reason as ``_send_report``."""
        batch = self.outbox.take_announced()
        with self.lend() as link:
            link.announce(batch, self._deadlines.store_s)

    @contextmanager
    def _continuing(self, part: str) -> Iterator[None]:
        """Let a thread continue after any failure; an unexpected one is logged."""
        try:
            yield
        except DaemonUnavailable:
            pass  # already logged
        except Exception:
            self.warnings.exception("a part of the client failed", part=part)

    def _own(self) -> OwnTier:
        return self._own_tier() if self._own_tier else OwnTier(0, 0, 0, 0)


def _abandon(keeper: "weakref.ref[LinkKeeper]") -> None:
    if (found := keeper()) is not None:
        found.abandon()
