"""The client of an engine: finds the daemon, keeps a session with it, and fails open.

A keeper thread makes the link, attends to the daemon's orders, and makes the next link when this
one breaks: because the daemon ended, was replaced, or asked to register again. While there is no
link, or the daemon was too slow a moment ago, every call raises ``DaemonUnavailable`` at once, and
the engine recomputes. A daemon that starts later, or again, is joined without anybody's doing.

For whoever writes a connector
------------------------------
One request after the other, what an engine says, and when:

1. ``announce`` each request as it comes, with its whole prompt's full blocks, also those that need
   nothing. The daemon counts uses by it, and brings up what will be needed.
2. ``lookup`` when its turn has come, for the blocks that the engine's own tier lacks.
3. ``load`` as many of them as the plan says, and no longer than it says; a copy is made between one
   item and the next. What does not come is computed. An engine that has to know what it will get
   before it makes room for it has them brought up first, with ``hold``, and loads what was held.
4. ``store`` full blocks once they are computed, the prompt's and those of the answer.
5. ``note_outcome``, if there was a plan, once the first token is there; and ``announce`` the
   request as over when it ends.

Beside that ``note_steps`` for what the engine's steps took. Where any of this is left out kvtier
still works, and decides with less knowledge: without 1 uses are counted at lookups alone, without
steps it does not know what computing costs, without outcomes it cannot tell whether it helped.

``lookup``, ``hold``, ``load`` and ``store`` wait for the daemon, no longer than their deadlines,
and raise ``DaemonUnavailable``: then the engine computes. So does ``clear``. What is only noted or
announced never waits and never raises.

A session belongs to the process that started the client. In a forked child, every call of that
client raises ``DaemonUnavailable``; the child can create a client, with a session of its own.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.client.lease import HeldBlocks
from kvtier.client.link import DaemonLink, open_link
from kvtier.client.outbox import Announcement, Outbox
from kvtier.client.types import Fill, FoundBlocks, LoadedBlock, OwnTier
from kvtier.client.watch import ChangeForwarder, OnChanges
from kvtier.config.model import find_socket
from kvtier.core.identity import BlockHash, KeySpace
from kvtier.core.plan import EngineLoad, ModelFlops, PlanOutcome, StepSample
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.errors import CallRefused, DaemonSlow, DaemonUnavailable, RegistrationRefused
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.tiers.base import Removed
from kvtier.transfer.shm import ArenaPin
from kvtier.wire.convert import traits_fault

__all__ = ["Client", "ClientDeadlines", "OwnTier"]

_log = Log("kvtier.client")

_CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` waits for calls under way; each of them has a shorter timeout of its own."""

_ABSENT_PERIOD_NS = 5 * 60 * 10**9
"""Between lines that say so: an engine may run without a daemon for days."""

_REFUSED_PAUSE_S = 5.0
"""Pause after a refusal: mostly it needs somebody to change something."""

_GATHER_S = 0.003
"""Announcements that come within it go in one call: a thousand requests a second are then some
three hundred calls, and what is promoted for a request comes no later for it."""

_REPORT_PERIOD_S = 1.0
"""Between reports. A change of the world shows within seconds."""


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """How long an engine waits for the daemon."""

    lookup_s: float = 0.25
    load_s: float = 5.0
    store_s: float = 5.0
    reconnect_s: float = 1.0


class Client:
    """Use ``start`` first and ``close`` at the end. Calls may come from any thread."""

    def __init__(  # noqa: PLR0913 - what an engine is made of; all but three have defaults
        self,
        socket_path: Path,
        space: KeySpace,
        engine: str,
        *,
        deadlines: ClientDeadlines | None = None,
        drop: Callable[[], Removed | str] = Removed,
        own_tier: Callable[[], OwnTier] | None = None,
        flops: ModelFlops | None = None,
        can_split: bool = False,
        rank: int = 0,
        watch: OnChanges | None = None,
        pin: ArenaPin | None = None,
    ) -> None:
        """``socket_path`` is where the daemon is, as ``find_socket`` takes it.

        ``own_tier`` tells what is in the engine's own tier, and ``drop`` empties it, or says why
        that is not done and what would do it. ``drop`` may raise TimeoutError where the engine is
        too busy; the operator is then told so. ``flops`` is what the model takes, while no step was
        noted, and ``can_split`` tells that it can compute the front of a prompt while the back is
        being loaded. Of several ``rank``s that serve a request together, each with a client, the
        request counts with that of rank 0. ``watch`` is told, on a thread of the client's, what the
        daemon's tiers have of the key space and what comes and leaves; without a daemon they have
        nothing. ``pin`` is shown each arena that is mapped, for a device that is to copy from and
        to it.
        """
        self.deadlines = deadlines or ClientDeadlines()
        self._named_path = self._socket_path = socket_path
        self._was_attached = False
        self._open_link = partial(
            open_link,
            space=space,
            engine=engine,
            flops=flops,
            can_split=can_split,
            rank=rank,
            pin=pin,
        )
        self._drop = drop
        self._own_tier = own_tier
        self._watching = ChangeForwarder(watch) if watch else None
        self._outbox = Outbox()
        self._link: DaemonLink | None = None
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._slow_until_s = 0.0
        self._warnings = RateLimitedLog(_log)
        self._absences = RateLimitedLog(_log, _ABSENT_PERIOD_NS)
        self._keeper = threading.Thread(target=self._keep, name="kvtier-keeper", daemon=True)
        self._reporter = threading.Thread(target=self._report, name="kvtier-report", daemon=True)
        self._announcer = threading.Thread(target=self._announce, name="kvtier-said", daemon=True)
        self._is_forked = False
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def start(self) -> None:
        """Begin to look for the daemon; returns at once.

        Raises RuntimeError where no thread is to be had, and is closed then.
        """
        try:
            for thread in (self._reporter, self._announcer, self._keeper):
                thread.start()
        except RuntimeError:
            self.close()
            raise

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

    def announce(self, announced: Sequence[Announcement], over: Sequence[str] = ()) -> None:
        """Say which requests have come, each once, and the ids of those that are ``over``.

        Returns at once: they are sent within some milliseconds, many in one call. Where no daemon
        is attached, or it is too slow, they are lost, the oldest first. A request that is looked
        up at once need not be announced.
        """
        if not self.is_attached:
            return
        sound = [each for each in announced if not self._complain(each.traits)]
        self._outbox.announce(sound, over)

    def lookup(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        traits: RequestTraits = NO_TRAITS,
        load: EngineLoad | None = None,
    ) -> FoundBlocks:
        """Ask which blocks from ``first`` on can be loaded, and how many of them should be.

        ``load`` is what the engine has to do before this request: with it the daemon can tell
        whether restoring would make the request wait longer than computing. Raises CallRefused for
        traits that make no sense.
        """
        if fault := self._complain(traits):
            raise CallRefused(fault)
        if traits.request_id:
            self._outbox.take_back(traits.request_id)
        with self._use(request=traits.request_id) as link:
            timeout_s = self.deadlines.lookup_s
            load = load or EngineLoad()
            return link.lookup(tenant, hashes, first, timeout_s, traits=traits, load=load)

    def load(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        *,
        decision: int = 0,
        from_back: bool = False,
        is_held: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[LoadedBlock | str]:
        """Yield verified blocks as they come, then why no more.

        In chain order, or ``from_back`` from the last one down; ``is_held``: another client holds
        them, and that they were loaded has been counted. ``decision`` is the plan's number where
        there was a plan, and ``timeout_s`` how long to wait, by default the client's own
        deadline. End the iteration early and what has not come yet is given up. For when a block
        may be used see ``DaemonLink.load``.
        """
        most_s = self.deadlines.load_s if timeout_s is None else timeout_s
        with self._use(decision=decision) as link:
            yield from link.load(
                tenant,
                hashes,
                first,
                most_s,
                decision=decision,
                from_back=from_back,
                is_held=is_held,
            )

    def hold(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        *,
        decision: int = 0,
        timeout_s: float | None = None,
    ) -> HeldBlocks:
        """Have blocks from ``first`` on brought up, and keep them there until they are loaded.

        For an engine that must know what it will get before it has room for it. Waits like
        ``load``, verifies each block, and keeps what came, also where the load ended short.
        """
        most_s = self.deadlines.load_s if timeout_s is None else timeout_s
        with self._use(decision=decision) as link:
            return link.hold(tenant, hashes, first, most_s, decision=decision)

    def store(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        fill: Fill,
        *,
        traits: RequestTraits = NO_TRAITS,
        num_prompt_blocks: int = -1,
    ) -> int:
        """Offer the blocks from ``first`` on; returns how many it has. See ``DaemonLink.store``.

        Those from ``num_prompt_blocks`` on hold generated tokens; -1: none does.
        """
        if fault := self._complain(traits):
            raise CallRefused(fault)
        with self._use(request=traits.request_id) as link:
            return link.store(
                tenant,
                hashes,
                first,
                fill,
                self.deadlines.store_s,
                traits=traits,
                num_prompt_blocks=num_prompt_blocks,
            )

    def clear(self, timeout_s: float) -> str:
        """Have the daemon forget every block of the key space, of all tenants and in every tier.

        Returns why some are left, or nothing. None of them comes back, not with a store that began
        before either, unless the daemon says that they are left.
        """
        with self._use() as link:
            return link.clear(timeout_s)

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Keep what the engine's steps took, and what it has to do now, for the next report.

        Returns at once. A report goes out once a second; of more steps than it takes the newest
        are told.
        """
        self._outbox.note_steps(steps, load)

    def note_outcome(self, outcome: PlanOutcome) -> None:
        """Keep what came of a plan for the next report; returns at once.

        An outcome of a daemon that has gone meanwhile is told nobody.
        """
        self._outbox.note_outcome(outcome)

    def close(self) -> None:
        """End the session, once the calls under way are over. Idempotent."""
        self._is_closing.set()
        self._outbox.close()
        with self._changed:
            if self._link is not None:
                self._link.is_broken.set()
        for thread in (self._keeper, self._reporter, self._announcer):
            if thread.is_alive():
                thread.join(_CLOSE_TIMEOUT_S)

    @contextmanager
    def _use(self, **ids: object) -> Iterator[DaemonLink]:
        """Lend the link; one that fails is broken, and none is lent while the daemon is slow.

        ``ids`` say in the log what the call was about.
        """
        ids = {name: number for name, number in ids.items() if number}
        if self._is_forked:
            error = DaemonUnavailable("the client was started before this process was forked")
            self._warnings.warning("the client cannot be used", error=error)
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
            self._warnings.warning("the daemon refused a call", error=error, **ids)
            raise
        except DaemonSlow as error:
            self._warnings.warning("the daemon is slow", error=error, **ids)
            self._slow_until_s = time.monotonic() + self.deadlines.reconnect_s
            raise
        except DaemonUnavailable as error:
            self._warnings.warning("the daemon did not answer", error=error, **ids)
            link.is_broken.set()
            raise
        finally:
            with self._changed:
                link.num_users -= 1
                self._changed.notify_all()

    def leave_to_parent(self) -> None:
        """In a forked child, close the inherited parts of the parent's session."""
        if self._keeper.ident is None:
            return  # not started yet: the child may start it
        self._is_forked = True
        # The parent's threads may have held the locks of these.
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._warnings = RateLimitedLog(_log)
        link, self._link = self._link, None
        if link is not None:
            link.attachment.abandon()

    def _complain(self, traits: RequestTraits) -> str:
        """Return what is wrong with traits, if anything is, and log it."""
        fault = traits_fault(traits)
        if fault:
            self._warnings.warning(
                "a request's traits cannot be sent", request=traits.request_id, error=fault
            )
        return fault

    def _keep(self) -> None:
        while not self._is_closing.is_set():
            pause_s = self.deadlines.reconnect_s
            try:
                self._serve(self._attach())
            except DaemonUnavailable as error:
                self._absences.warning("no daemon", socket=self._socket_path, error=error)
            except RegistrationRefused as error:
                self._absences.warning("the daemon refused this engine", error=error)
                pause_s = _REFUSED_PAUSE_S
            except Exception:  # whatever it is, the daemon is looked for again
                self._warnings.exception("the session failed", socket=self._socket_path)
                with self._changed:
                    self._link = None
            self._is_closing.wait(pause_s)

    def _attach(self) -> DaemonLink:
        """Attach to the nearest daemon, and from then on to whichever serves there."""
        if not self._was_attached:
            self._socket_path = find_socket(self._named_path)
        link = self._open_link(self._socket_path)
        self._was_attached = True
        return link

    def _serve(self, link: DaemonLink) -> None:
        """Lend out a link until it breaks, then close it when nobody uses it any more."""
        over = threading.Event()
        closer = threading.Thread(target=self._use_up, args=(link, over), daemon=True)
        try:
            closer.start()
        except RuntimeError:  # no thread is to be had
            link.close()
            raise
        try:
            self._lend(link)
        finally:
            with self._changed:
                self._link = None
            over.set()
            if self._watching:
                with self._going_on("watching"):
                    self._watching.end(link)
            closer.join(_CLOSE_TIMEOUT_S)
            if closer.is_alive():
                _log.warning("the arena is in use still", socket=self._socket_path)
            _log.info("detached", socket=self._socket_path)

    def _lend(self, link: DaemonLink) -> None:
        """Lend out a link until it breaks."""
        self._outbox.renew()
        with self._changed:
            self._link = link
            self._changed.notify_all()
        _log.info("attached", socket=self._socket_path, protocol=link.protocol)
        threading.Thread(target=self._attend, args=(link,), daemon=True).start()
        if self._watching:
            self._watching.begin(link)
            threading.Thread(target=self._follow, args=(link,), daemon=True).start()
        if not self._is_closing.is_set():
            link.is_broken.wait()

    def _use_up(self, link: DaemonLink, over: threading.Event) -> None:
        """Have a link's arena populated, and close it once it is ``over`` and nobody uses it.

        On a thread of its own: until then a copy, or a device, may know the arena.
        """
        try:
            with self._going_on("populating"):
                link.attachment.populate(over.is_set)
            over.wait()
            with self._changed:
                self._changed.wait_for(lambda: not link.num_users)
        finally:
            link.close()

    def _attend(self, link: DaemonLink) -> None:
        """Follow the daemon's orders; where they are heard no more, the link is over."""
        with self._going_on("orders"):
            for order in link.orders():
                try:
                    removed, own = self._drop(), self._own()
                except TimeoutError:
                    self._warnings.warning("the engine was too busy to empty its tier")
                except Exception:  # the operator is told that there was no answer
                    self._warnings.exception("the engine could not empty its tier")
                else:
                    link.answer(order, removed, own, self.deadlines.store_s)
        link.is_broken.set()

    def _follow(self, link: DaemonLink) -> None:
        assert self._watching is not None
        try:
            self._watching.follow(link, link.changes())
        except DaemonUnavailable:
            link.is_broken.set()
        except Exception:  # blocks are stored and loaded all the same
            self._warnings.exception("what the tiers have is not told any more")
            with self._going_on("watching"):
                self._watching.end(link)

    def _report(self) -> None:
        period_s = min(_REPORT_PERIOD_S, self.deadlines.reconnect_s)
        while not self._is_closing.wait(period_s):
            if not self.is_attached:
                continue  # what steps take is the same for the next daemon
            with self._going_on("reports"):
                self._send_report()

    def _send_report(self) -> None:
        """Send it, in a frame that ends with it: a thread that waits keeps no link alive."""
        measured = self._outbox.take_measured()
        if measured or self._own_tier:
            own = self._own()
            with self._use() as link:
                link.report(own, measured, self.deadlines.store_s)

    def _announce(self) -> None:
        while self._outbox.wait():
            self._is_closing.wait(_GATHER_S)
            with self._going_on("announcements"):
                self._send_said()

    def _send_said(self) -> None:
        """Send it, in a frame that ends with it."""
        said = self._outbox.take_announced()
        with self._use() as link:
            link.announce(said, self.deadlines.store_s)

    @contextmanager
    def _going_on(self, part: str) -> Iterator[None]:
        """Have a thread go on, whatever the daemon does; what is a bug is logged."""
        try:
            yield
        except DaemonUnavailable:
            pass  # that was said
        except Exception:
            self._warnings.exception("a part of the client failed", part=part)

    def _own(self) -> OwnTier:
        return self._own_tier() if self._own_tier else OwnTier(0, 0, 0, 0)


def _leave_to_parent(client: "weakref.ref[Client]") -> None:
    if (found := client()) is not None:
        found.leave_to_parent()
