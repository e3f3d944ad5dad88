"""Drops: remove an operator's selection of blocks from tiers.

Theory
------
A block must not come back after a drop: not with a write that was in flight, not read up from a
tier that is emptied later, not by a store that began before the drop and ends after it. So from its
first step to its answer a drop *closes* its tiers to the selected blocks. Closed blocks are not
served or accepted; those that are being written leave as soon as they have arrived. The CPU tier
drops unused blocks at once; a slower tier is purged when none of the blocks is being written to it.
Blocks still held at the deadline are counted as kept, and are no longer served.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvtier.core.fate import Fate
from kvtier.core.limits import DROP_GRACE_NS
from kvtier.core.residency import Residency, TierName
from kvtier.core.slow_tier import AdminState
from kvtier.core.table import Keys, as_keys
from kvtier.node.messages.actions import (
    Action,
    CallReply,
    EmptyEngineTier,
    EngineNotEmptied,
    Purge,
    TierDropped,
)
from kvtier.node.messages.events import Drop, PurgeDone
from kvtier.node.state.cache import Cache
from kvtier.node.state.session import Session
from kvtier.node.state.transfer import TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import DROPPED_BLOCKS
from kvtier.tiers.base import Removed

__all__ = ["Drops"]


_SILENT = "no answer; check its log and drop again"
_DETACHED = "detached; it keeps its blocks"
_EMPTIED = "emptied, but detached before the drop ended: its contents are unknown"


@dataclass(slots=True)
class _Pending:
    event: Drop
    lanes: list[TransferLane]
    """Lanes that this drop has closed; other tiers may be attached meanwhile."""
    done: dict[TierName, TierDropped] = field(default_factory=dict)
    purging: set[TierName] = field(default_factory=set)
    orders: dict[int, str] = field(default_factory=dict)
    """Unanswered commands to empty engine tiers, with their sessions."""
    gpu: Removed = field(default_factory=Removed)
    keeping: list[EngineNotEmptied] = field(default_factory=list)
    """Engines that did not empty their own tier."""
    cpu: Removed = field(default_factory=Removed)
    """Blocks that left the CPU tier at once."""
    held: Keys = field(default_factory=lambda: as_keys(b""))
    """Blocks that could not leave at once, because they were being read or filled."""
    held_bytes: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    was_ready: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """Which of the held blocks were readable."""

    def report(self, tier: TierName, removed: Removed, kept: int = 0, error: str = "") -> None:
        self.done[tier] = TierDropped(tier, removed.num_blocks, removed.num_bytes, kept, error)


class Drops:
    """All drops in progress."""

    def __init__(
        self, cache: Cache, transfers: TierTransfers, sessions: dict[str, Session]
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._sessions = sessions
        self._pending: list[_Pending] = []
        self._num_orders = 0

    def start(self, event: Drop, now_ns: int) -> list[Action]:
        """Start a drop; the answer comes when all its tiers are done."""
        lanes = self._transfers.lanes
        drop = _Pending(event, [lanes[tier] for tier in event.tiers if tier in lanes])
        self._pending.append(drop)
        actions: list[Action] = []
        if TierName.GPU in event.tiers:
            actions += self._order(drop)
        if TierName.CPU in event.tiers:
            self._cache.closed.append(event.selection)
            self._expel(drop)
        for lane in drop.lanes:
            lane.closed.append(event.selection)
            self._transfers.cancel_writes(lane, event.selection)
        return actions + self.advance(now_ns)

    def advance(self, now_ns: int) -> list[Action]:
        """Take the steps that are possible now, or that the deadline forces."""
        actions: list[Action] = []
        for drop in list(self._pending):
            is_overdue = now_ns >= drop.event.deadline_ns - DROP_GRACE_NS
            actions += self._step(drop, is_overdue)
            if len(drop.done) == len(set(drop.event.tiers)):
                self._pending.remove(drop)
                self._reopen(drop)
                answer = tuple(drop.done[tier] for tier in drop.event.tiers)
                actions.append(CallReply(drop.event.call, answer))
        return actions

    def purged(self, event: PurgeDone, _now_ns: int) -> None:
        """Handle the end of a tier's purge."""
        self._transfers.lanes[event.tier].purging = None
        if not event.fault:
            index = self._cache.index
            rows = index.selected(index.held(index.rows(), event.tier), event.selection)
            with self._cache.residency_listener.leaving(Fate.DROPPED):
                index.move(rows, event.tier, Residency.ABSENT)
            index.forget_absent(rows)
            self._cache.metrics.add(DROPPED_BLOCKS, event.removed.num_blocks, tier=event.tier)
        for drop in self._pending:
            if event.tier in drop.purging:
                drop.purging.remove(event.tier)
                drop.report(event.tier, event.removed, error=event.fault)

    def detached(self, tier: TierName) -> None:
        """Note that a tier was detached: the blocks it comes back with are not part of a drop.

        This also holds if the tier was emptied before: the owner of the device may write to it, and
        it may come back with new blocks before the answer, which then must not say that it is
        empty.
        """
        for drop in self._pending:
            if tier not in drop.event.tiers:
                continue
            done = drop.done.get(tier)
            if done is None:
                drop.purging.discard(tier)
                drop.report(tier, Removed(), error=_DETACHED)
            elif not done.error:
                drop.done[tier] = replace(done, error=_EMPTIED)

    def answered(self, session: Session, order: int, removed: Removed, refusal: str) -> None:
        """Handle an engine's answer."""
        for drop in self._pending:
            if drop.orders.pop(order, None) is not None:
                drop.gpu += removed
                if refusal:
                    drop.keeping.append(EngineNotEmptied(session.engine, session.pid, refusal))

    def session_ended(self, token: str) -> None:
        """Stop waiting for answers from a session."""
        for drop in self._pending:
            drop.orders = {order: s for order, s in drop.orders.items() if s != token}

    def next_deadline_ns(self) -> int | None:
        """Return when the next drop must be answered."""
        return min((d.event.deadline_ns - DROP_GRACE_NS for d in self._pending), default=None)

    def _order(self, drop: _Pending) -> list[Action]:
        """Ask engines to empty their own tier; they cannot drop a part of it."""
        actions: list[Action] = []
        for session in self._sessions.values():
            if drop.event.selection.key_space in {b"", session.key_space}:
                self._num_orders += 1
                drop.orders[self._num_orders] = session.token
                actions.append(EmptyEngineTier(session.token, self._num_orders))
        return actions

    def _expel(self, drop: _Pending) -> None:
        """Evict unused blocks from the CPU tier, and mark the others to follow."""
        cache, index = self._cache, self._cache.index
        drop.cpu = Removed(*cache.evict_all(drop.event.selection))
        held = cache.held(drop.event.selection)
        drop.held = index.keys_of(held)
        drop.held_bytes = index.payload_bytes[held].copy()
        drop.was_ready = index.residency(held, TierName.CPU) == Residency.READY
        with cache.residency_listener.leaving(Fate.DROPPED):
            cache.expel(held)

    def _reopen(self, drop: _Pending) -> None:
        if TierName.CPU in drop.event.tiers:
            self._cache.closed.remove(drop.event.selection)
        for lane in drop.lanes:
            lane.closed.remove(drop.event.selection)

    def _step(self, drop: _Pending, is_overdue: bool) -> list[Action]:
        actions: list[Action] = []
        for tier in drop.event.tiers:
            if tier in drop.done:
                continue
            if tier is TierName.GPU:
                self._step_gpu(drop, is_overdue)
            elif tier is TierName.CPU:
                self._step_cpu(drop, is_overdue)
            else:
                actions += self._step_slow(drop, tier, is_overdue)
        return actions

    def _step_gpu(self, drop: _Pending, is_overdue: bool) -> None:
        if drop.orders and not is_overdue:
            return
        late = [self._sessions[token] for token in drop.orders.values()]
        drop.keeping += [EngineNotEmptied(each.engine, each.pid, _SILENT) for each in late]
        error = (
            f"{len(drop.keeping)} engine(s) did not empty their GPU tier" if drop.keeping else ""
        )
        drop.done[TierName.GPU] = TierDropped(
            TierName.GPU,
            drop.gpu.num_blocks,
            drop.gpu.num_bytes,
            error=error,
            keeping=tuple(drop.keeping),
        )

    def _step_cpu(self, drop: _Pending, is_overdue: bool) -> None:
        index = self._cache.index
        rows = index.find(drop.held)
        is_held = rows >= 0
        is_held[is_held] = index.residency(rows[is_held], TierName.CPU) != Residency.ABSENT
        num_kept = int(is_held.sum())
        if num_kept and not is_overdue:
            return
        gone = drop.was_ready & ~is_held
        removed = drop.cpu + Removed(int(gone.sum()), int(drop.held_bytes[gone].sum()))
        self._cache.metrics.add(DROPPED_BLOCKS, removed.num_blocks, tier=TierName.CPU)
        drop.report(TierName.CPU, removed, kept=num_kept)

    def _step_slow(self, drop: _Pending, tier: TierName, is_overdue: bool) -> list[Action]:
        lane, selection = self._transfers.lanes.get(tier), drop.event.selection
        if lane is None:
            drop.report(tier, Removed(), error="no such tier")
        elif lane.admin_state is AdminState.DETACHED:
            drop.purging.discard(tier)
            drop.report(tier, Removed(), error=_DETACHED)
        elif is_overdue:
            index = self._cache.index
            kept = len(index.selected(index.held(index.rows(), tier), selection))
            drop.purging.discard(tier)
            drop.report(tier, Removed(), kept=kept, error="not emptied before the deadline")
        elif lane.purging is None and not self._transfers.writing(lane, selection):
            drop.purging.add(tier)
            lane.purging = selection
            return [Purge(tier, selection, drop.event.deadline_ns - DROP_GRACE_NS)]
        return []
