"""The asyncio loop around a node: carries out its actions and brings completions back.

The node runs on the loop's thread and nowhere else. Tiers block, so each has threads of its own; a
completion is posted back to the loop. A timer wakes the node at the deadline it names.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from kvtier.core.residency import TierName
from kvtier.errors import TierError
from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.node.node import Node
from kvtier.observe.log import Log, Repeated
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    MissReason,
    Removed,
    Tier,
)
from kvtier.tiers.host import HostArena
from kvtier.tiers.wrap.breaker import BreakerState, BreakerTier

__all__ = ["Driver", "TierWork"]

_HEALTH_PERIOD_S = 0.5
"""How often a tier that is out is looked at; its breaker decides when to try it."""

_HEALTH_DEADLINE_NS = 1_000_000_000

_NO_MORE_ORDERS = 0

TierWork = ac.Read | ac.Write | ac.Probe | ac.Purge


class Driver:
    """Runs ``node`` over ``arena`` and ``tiers`` on the running loop."""

    def __init__(self, node: Node, arena: HostArena, tiers: Mapping[TierName, BreakerTier]) -> None:
        self.node = node
        self.tiers = tiers
        self._arena = arena
        self._log = Repeated(Log("kvtier.node"))
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[ac.Answer]] = {}
        self._streams: dict[int, asyncio.Queue[ac.Progress | ac.Reply]] = {}
        self._orders: dict[str, asyncio.Queue[int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._up = dict.fromkeys(tiers, True)
        self._workers = {
            # One thread more than workers: probes and purges do not wait for a full lane.
            name: ThreadPoolExecutor(tier.properties.num_workers + 1, f"kvtier-{name}")
            for name, tier in tiers.items()
        }
        self._watch = self._loop.create_task(self._watch_health())

    async def ask(self, make: Callable[[int], ev.Event]) -> ac.Answer:
        """Hand the node a call and wait for its answer."""
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
    ) -> AsyncGenerator[ac.Progress | ac.Reply, None]:
        """Hand the node a load and yield its progress; ends after the last message."""
        call = next(self._numbers)
        # Unbounded, yet small: a load sends at most one message a block.
        queue = self._streams[call] = asyncio.Queue()
        try:
            self.post(make(call))
            while True:
                message = await queue.get()
                yield message
                if isinstance(message, ac.Reply) or message.end:
                    return
        finally:
            del self._streams[call]

    async def orders(self, session: str) -> AsyncGenerator[int, None]:
        """Yield the orders for a session until the driver stops or this is cancelled."""
        queue = self._orders[session] = asyncio.Queue()
        try:
            while order := await queue.get():
                yield order
        finally:
            self._orders.pop(session, None)

    def post(self, event: ev.Event) -> None:
        """Let the node take an event in, and carry out what it wants done."""
        for action in self.node.handle(event, time.monotonic_ns()):
            self._perform(action)
        self._arm()
        if all(lane.is_idle for lane in self.node.transfers.lanes.values()):
            self._quiet.set()
        else:
            self._quiet.clear()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued for any tier; False if that did not come in time."""
        try:
            await asyncio.wait_for(self._quiet.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end_orders(self) -> None:
        """End every ``orders``, so that no call of a client outlives the others."""
        for queue in self._orders.values():
            queue.put_nowait(_NO_MORE_ORDERS)

    async def stop(self) -> None:
        """Stop all threads that can be stopped; calls still open are cancelled."""
        self._watch.cancel()
        if self._timer:
            self._timer.cancel()
        for future in self._calls.values():
            future.cancel()
        for workers in self._workers.values():
            workers.shutdown(wait=False, cancel_futures=True)

    def _perform(self, action: ac.Action) -> None:
        match action:
            case ac.Reply() | ac.Progress():
                self._answer(action)
            case ac.Order():
                if action.session in self._orders:
                    self._orders[action.session].put_nowait(action.order)
            case _:
                self._workers[action.tier].submit(self._work, action)

    def _answer(self, action: ac.Reply | ac.Progress) -> None:
        if action.call in self._streams:
            self._streams[action.call].put_nowait(action)
        elif isinstance(action, ac.Reply):
            future = self._calls.get(action.call)
            if future and not future.done():
                future.set_result(action.answer)

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        at_ns = self.node.next_deadline_ns()
        if at_ns is not None:
            delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
            self._timer = self._loop.call_later(delay_s, self.post, ev.Tick())

    # On the tiers' threads

    def _work(self, action: TierWork) -> None:
        """Do what a tier is asked, and bring the completion back; there always is one."""
        try:
            event = self._done(action)
        except TierError as error:
            self._log.warning("a tier failed", tier=action.tier, error=error)
            event = _faulted(action, str(error))
        except Exception as error:
            # A bug in a tier. Told as a fault, so that nobody waits for it for ever.
            Log("kvtier.node").exception("a tier broke", tier=action.tier)
            event = _faulted(action, repr(error))
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.post, event)

    def _done(self, action: TierWork) -> ev.Event:
        tier = self.tiers[action.tier]
        match action:
            case ac.Read():
                return self._read(tier, action)
            case ac.Write():
                return self._write(tier, action)
            case ac.Probe():
                present = tier.contains(action.hashes, action.deadline_ns)
                return ev.ProbeDone(action.probe, tuple(present))
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
        results = tier.read(reads, action.deadline_ns)
        outcomes = tuple(r if isinstance(r, MissReason) else r.checksum for r in results)
        return ev.ReadDone(action.transfer, outcomes, _since(start_ns))

    def _write(self, tier: Tier, action: ac.Write) -> ev.Event:
        start_ns = time.monotonic_ns()
        writes = [
            BlockWrite(b.header, self._arena.view(b.offset, b.header.payload_bytes))
            for b in action.blocks
        ]
        # Checked before they spread: a client may have scribbled over the arena.
        is_whole = [write.header.matches(write.payload) for write in writes]
        whole = [write for write, ok in zip(writes, is_whole, strict=True) if ok]
        report = tier.write(whole, action.deadline_ns)
        outcomes = iter(report.outcomes)
        results = tuple(next(outcomes) if ok else None for ok in is_whole)
        return ev.WriteDone(action.transfer, results, b"".join(report.evicted), _since(start_ns))

    # Health

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_PERIOD_S)
            for name, tier in self.tiers.items():
                if tier.state is BreakerState.OPEN:
                    self._workers[name].submit(self._try, name)
                self._note_health(name, is_up=tier.state is BreakerState.CLOSED)

    def _note_health(self, name: TierName, *, is_up: bool) -> None:
        if is_up != self._up[name]:
            self._up[name] = is_up
            Log("kvtier.node").warning("tier is up" if is_up else "tier is down", tier=name)
            self.post(ev.TierUp(name, is_up))

    def _try(self, name: TierName) -> None:
        """Call a tier that may have recovered, so that its breaker learns whether it has."""
        try:
            self.tiers[name].probe(time.monotonic_ns() + _HEALTH_DEADLINE_NS)
        except TierError as error:
            self._log.warning("tier is still down", tier=name, error=error)


def _faulted(action: TierWork, fault: str) -> ev.Event:
    """Return the completion of work that failed."""
    match action:
        case ac.Read():
            return ev.ReadDone(action.transfer, (), 0.0, fault)
        case ac.Write():
            return ev.WriteDone(action.transfer, (), b"", 0.0, fault)
        case ac.Probe():
            return ev.ProbeDone(action.probe, ())
        case ac.Purge():
            return ev.PurgeDone(action.tier, action.selection, Removed(), fault)


def _since(start_ns: int) -> float:
    return (time.monotonic_ns() - start_ns) / 1e9
