"""The driver: runs a node on the asyncio loop, carries out its actions and posts completions back.

The node runs on the loop's thread only. Tiers block, so each has threads of its own; a completion
is posted back to the loop. A timer wakes the node at the deadline it asks for.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from itertools import count

from kvtier.core.limits import ROWS_TOLD_AT_ONCE
from kvtier.core.residency import Residency, TierName
from kvtier.core.residency_change import ResidencyChange
from kvtier.core.slow_tier import AdminState
from kvtier.errors import TierError
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.node.node import Node
from kvtier.observe.daemon_metrics import POLICY_SECONDS
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.observe.trace import TRACES
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    HealthState,
    MissReason,
    Removed,
    Tier,
)
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.host import HostArena

__all__ = ["Driver", "TierWork"]

_ORDERS_MAX = 64
"""Maximum number of unanswered commands of an engine; more are not sent; drops report that."""

_BROKEN_PAUSE_S = 0.1
"""Pause after an event that raised in the node, so that a recurring one does not spin."""

_NO_MORE_ORDERS = 0

_FEED_PERIOD_S = 0.02
"""Pause between messages to a watcher that is up to date; changes meanwhile share one message."""

_DECIDED = (ev.Announce, ev.Lookup, ev.PrepareStore)
"""Calls answered with a decision: what to restore, or what to store."""

TierWork = ac.Read | ac.Write | ac.ExistsQuery | ac.Purge
"""Actions that a tier carries out on its threads."""

_CALL_NAMES: Mapping[type[TierWork], str] = {
    ac.Read: "read",
    ac.Write: "write",
    ac.ExistsQuery: "lookup",
    ac.Purge: "purge",
}
"""Names of calls in the health of a tier."""


class Driver:
    """Runs ``node`` over ``arena`` and ``tiers`` on the running loop."""

    def __init__(
        self,
        node: Node,
        arena: HostArena,
        tiers: dict[TierName, BreakerTier],
    ) -> None:
        self.node = node
        self.tiers = tiers
        """Tiers in use now; operators attach and detach them."""
        self.executors = {name: TierExecutor(tier, node.metrics) for name, tier in tiers.items()}
        self._arena = arena
        self._register_listeners: list[Callable[[ev.Register], None]] = []
        self._log = RateLimitedLog(Log("kvtier.node"))
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[ac.Answer]] = {}
        self._streams: dict[int, asyncio.Queue[ac.LoadUpdate | ac.CallReply]] = {}
        self._orders: dict[str, asyncio.Queue[int]] = {}
        self._readers: dict[str, asyncio.Event] = {}
        """By watching session, an event that is set when its feed has changes."""
        self._is_ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._moved_ns = dict.fromkeys(tiers, time.monotonic_ns())
        """When each tier last ended a transfer, or had none to do."""

    def add_register_listener(self, listener: Callable[[ev.Register], None]) -> None:
        """Call ``listener`` with each accepted registration of an engine."""
        self._register_listeners.append(listener)

    async def ask(self, make: Callable[[int], ev.Event]) -> ac.Answer:
        """Post a call to the node and wait for its answer."""
        call = next(self._numbers)
        future: asyncio.Future[ac.Answer] = self._loop.create_future()
        self._calls[call] = future
        try:
            self.post(make(call))
            return await future
        finally:
            del self._calls[call]

    async def stream(
        self, make: Callable[[int], ev.Event]
    ) -> AsyncGenerator[ac.LoadUpdate | ac.CallReply, None]:
        """Post a load to the node and yield its progress; ends after the last message."""
        call = next(self._numbers)
        # Unbounded but small: a load sends at most one message per block.
        queue = self._streams[call] = asyncio.Queue()
        try:
            self.post(make(call))
            while True:
                message = await queue.get()
                yield message
                if isinstance(message, ac.CallReply) or message.end:
                    return
        finally:
            del self._streams[call]

    async def orders(self, session: str) -> AsyncGenerator[int, None]:
        """Yield the commands for a session until the driver stops or this is cancelled.

        One stream for each session: a new one ends the previous one.
        """
        if (earlier := self._orders.get(session)) is not None:
            _end(earlier)
        queue = self._orders[session] = asyncio.Queue(_ORDERS_MAX)
        try:
            while not self._is_ending and (order := await queue.get()):
                yield order
        finally:
            if self._orders.get(session) is queue:
                del self._orders[session]

    def is_watching(self, session: str) -> bool:
        """Return whether a session has a feed."""
        return session in self._readers

    async def watch(self, session: str) -> AsyncGenerator[list[ResidencyChange], None]:
        """Yield the blocks of a session's key space in each tier, then the changes.

        Ends with the session, or when the driver stops. One feed for each session.
        """
        sessions = self.node.sessions
        news = self._readers[session] = asyncio.Event()
        feed = self.node.feeds.open(sessions[session].key_space, news.set)
        try:
            while session in sessions and not self._is_ending:
                await news.wait()
                news.clear()
                while feed.has_news and session in sessions and not self._is_ending:
                    if changes := feed.take():
                        yield changes
                    await asyncio.sleep(0)  # an index of millions of rows takes many steps
                await asyncio.sleep(_FEED_PERIOD_S)
        finally:
            self.node.feeds.close(feed)
            del self._readers[session]

    def post(self, event: ev.Event) -> None:
        """Pass an event to the node, and carry out its actions."""
        if isinstance(event, ev.ReadDone | ev.WriteDone):
            self._note_moved(event.transfer)
        start_ns = time.monotonic_ns()
        try:
            actions = self.node.handle(event, start_ns)
        except BaseException:  # a bug; keep the timer going, because other calls wait
            self._arm(_BROKEN_PAUSE_S)
            raise
        if isinstance(event, _DECIDED):
            self.node.metrics.observe(POLICY_SECONDS, _since(start_ns))
        for action in actions:
            self._perform(action)
        sessions = self.node.sessions.values()
        if isinstance(event, ev.Register) and any(s.ticket == event.ticket for s in sessions):
            for listener in self._register_listeners:
                listener(event)
        self._arm()
        now_ns = time.monotonic_ns()
        lanes = self.node.transfers.lanes.values()
        if all(lane.is_idle or not lane.is_working(now_ns) for lane in lanes):
            self._quiet.set()
        else:
            self._quiet.clear()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until tiers that are up have nothing queued or in flight; False on timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def end_orders(self) -> None:
        """End every ``orders`` and ``watch`` stream, so that none outlives the other calls."""
        self._is_ending = True
        for news in self._readers.values():
            news.set()
        for queue in self._orders.values():
            _end(queue)

    def stop(self) -> None:
        """Stop: cancel open calls, and start nothing more. Threads in a call are left alone."""
        if self._timer:
            self._timer.cancel()
        for future in self._calls.values():
            future.cancel()
        for executor in self.executors.values():
            executor.stop()

    def attach(self, tier: BreakerTier) -> None:
        """Use a tier from now on; the node already knows its contents."""
        name = tier.properties.name
        self.tiers[name], self.executors[name] = tier, TierExecutor(tier, self.node.metrics)
        self.post(ev.SetAdminState(name, AdminState.ACTIVE))

    def detach(self, name: TierName) -> TierExecutor:
        """Stop using a tier at once; returns its executor, which may still be busy."""
        self.post(ev.SetAdminState(name, AdminState.DETACHED))
        del self.tiers[name]
        executor = self.executors.pop(name)
        executor.retire()
        return executor

    async def check_health(self, name: TierName) -> None:
        """Report to the node whether a tier is up, and start a health check if one is due."""
        executor = self.executors.get(name)
        if executor is None:
            return
        if executor.has_new_generation():  # check before the node learns that the tier is up
            await self.mark_unverified(name, "its server restarted or failed over")
        executor.check(partial(self._note_health, name))

    async def mark_unverified(self, name: TierName, why: str) -> None:
        """Mark all blocks of a tier as unverified, because of ``why``."""
        index, first = self.node.cache.index, 0
        if not (num_blocks := index.num_in(name, Residency.READY)):
            return
        self._log.info("verifying all blocks of a tier", tier=name, blocks=num_blocks, why=why)
        while first < index.extent:
            self.post(ev.MarkUnverified(name, first, first + ROWS_TOLD_AT_ONCE))
            first += ROWS_TOLD_AT_ONCE
            await asyncio.sleep(0)  # let requests be handled

    def stalled(self, limit_s: float) -> list[TierName]:
        """Return the tiers that are up and have work queued, but completed none for ``limit_s``."""
        now_ns = time.monotonic_ns()
        stalled = []
        for name, lane in self.node.transfers.lanes.items():
            if not (lane.reads or lane.writes) or not lane.is_working(now_ns):
                self._moved_ns[name] = now_ns
            elif now_ns - self._moved_ns.get(name, now_ns) > limit_s * 1e9:
                stalled.append(name)
        return stalled

    def is_reading(self, name: TierName) -> bool:
        """Return whether reads of a tier are queued or in flight."""
        lane = self.node.transfers.lanes[name]
        return bool(lane.reads) or any(transfer.is_read for transfer in lane.in_flight.values())

    def _note_health(self, name: TierName, before: HealthState, now: HealthState) -> None:
        if HealthState.OUT in {before, now}:
            self.post(ev.TierUp(name, now is not HealthState.OUT))

    def _note_moved(self, transfer: int) -> None:
        for name, lane in self.node.transfers.lanes.items():
            if transfer in lane.in_flight:
                self._moved_ns[name] = time.monotonic_ns()

    # Actions

    def _perform(self, action: ac.Action) -> None:
        match action:
            case ac.CallReply() | ac.LoadUpdate():
                self._answer(action)
            case ac.EmptyEngineTier():
                orders = self._orders.get(action.session)
                if orders is not None and not orders.full():
                    orders.put_nowait(action.order)
            case _:
                executor = self.executors[action.tier]
                work = partial(self._work, executor, action)
                if not executor.submit(work, _CALL_NAMES[type(action)], action.deadline_ns):
                    event = _faulted(action, "too many calls are queued for the tier")
                    self._loop.call_soon(self.post, event)

    def _completed(self, executor: TierExecutor, event: ev.Event) -> None:
        # The node recognizes transfers of a detached tier, but not purges.
        if not isinstance(event, ev.PurgeDone) or self.executors.get(event.tier) is executor:
            self.post(event)

    def _answer(self, action: ac.CallReply | ac.LoadUpdate) -> None:
        if action.call in self._streams:
            self._streams[action.call].put_nowait(action)
        elif isinstance(action, ac.CallReply):
            future = self._calls.get(action.call)
            if future and not future.done():
                future.set_result(action.answer)

    def _arm(self, least_s: float = 0.0) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        at_ns = self.node.next_deadline_ns()
        if at_ns is not None:
            delay_s = max(least_s, (at_ns - time.monotonic_ns()) / 1e9)
            self._timer = self._loop.call_later(delay_s, self.post, ev.Tick())

    # On the tiers' threads

    def _work(self, executor: TierExecutor, action: TierWork) -> None:
        """Do a tier's work and post its completion; there always is one."""
        try:
            event = self._done(executor.tier, action)
        except TierError as error:
            self._log.warning("tier call failed", tier=action.tier, error=error)
            event = _faulted(action, str(error))
        except Exception as error:
            # A bug in a tier; reported as a fault, so that nothing waits for it forever.
            self._log.exception("unexpected error in a tier call", tier=action.tier)
            event = _faulted(action, repr(error))
        executor.to_loop(partial(self._completed, executor, event))

    def _done(self, tier: Tier, action: TierWork) -> ev.Event:
        match action:
            case ac.Read():
                return self._read(tier, action)
            case ac.Write():
                return self._write(tier, action)
            case ac.ExistsQuery():
                present = tier.contains(action.hashes, action.deadline_ns)
                return ev.ExistsQueryDone(action.query, tuple(present))
            case ac.Purge():
                removed = tier.purge(action.selection, action.deadline_ns)
                return ev.PurgeDone(action.tier, action.selection, removed)

    def _read(self, tier: Tier, action: ac.Read) -> ev.Event:
        reads = [
            BlockRead(
                block.header.block_hash,
                block.header.key_space,
                block.header.tenant,
                block.header.payload_bytes,
                self._arena.view(block.offset, block.slot_bytes),
            )
            for block in action.blocks
        ]
        start_ns = time.monotonic_ns()
        with TRACES.read(action.tier, len(reads), (read.block_hash for read in reads)):
            results = tier.read(reads, action.deadline_ns)
        outcomes = tuple(r if isinstance(r, MissReason) else r.checksum for r in results)
        return ev.ReadDone(action.transfer, outcomes, _since(start_ns))

    def _write(self, tier: Tier, action: ac.Write) -> ev.Event:
        start_ns = time.monotonic_ns()
        writes = [
            BlockWrite(b.header, self._arena.view(b.offset, b.header.payload_bytes))
            for b in action.blocks
        ]
        # Check before bytes spread: a client may have scribbled over the arena.
        is_whole = [write.header.matches(write.payload) for write in writes]
        whole = [write for write, ok in zip(writes, is_whole, strict=True) if ok]
        report = tier.write(whole, action.deadline_ns)
        outcomes = iter(report.outcomes)
        results = tuple(next(outcomes) if ok else None for ok in is_whole)
        return ev.WriteDone(action.transfer, results, b"".join(report.evicted), _since(start_ns))


def _end(orders: asyncio.Queue[int]) -> None:
    if orders.full():
        orders.get_nowait()
    orders.put_nowait(_NO_MORE_ORDERS)


def _faulted(action: TierWork, fault: str) -> ev.Event:
    """Return the completion of work that failed."""
    match action:
        case ac.Read():
            return ev.ReadDone(action.transfer, (), 0.0, fault)
        case ac.Write():
            return ev.WriteDone(action.transfer, (), b"", 0.0, fault)
        case ac.ExistsQuery():
            return ev.ExistsQueryDone(action.query, ())
        case ac.Purge():
            return ev.PurgeDone(action.tier, action.selection, Removed(), fault)


def _since(start_ns: int) -> float:
    return (time.monotonic_ns() - start_ns) / 1e9
