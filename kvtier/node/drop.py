"""Drops: an operator empties tiers.

A drop first lets what is under way come to rest, so that a block being written cannot appear after
it; then each tier is emptied and says what it lost. What is still in use at the deadline is kept
and counted.
"""

from dataclasses import dataclass, field

from kvtier.core.limits import DROP_GRACE_NS
from kvtier.core.residency import Residency, TierName
from kvtier.node.action import Action, Dropped, Order, Purge, Reply
from kvtier.node.cache import Cache
from kvtier.node.event import Drop, PurgeDone
from kvtier.node.session import Session
from kvtier.node.transfer import Transfers
from kvtier.observe.table import DROPPED_BLOCKS
from kvtier.tiers.base import Removed

__all__ = ["Drops"]


@dataclass(slots=True)
class _Pending:
    event: Drop
    done: dict[TierName, Dropped] = field(default_factory=dict)
    clearing: set[TierName] = field(default_factory=set)
    orders: dict[int, str] = field(default_factory=dict)
    """Order numbers not yet answered, with the session that owes the answer."""
    gpu: Removed = field(default_factory=Removed)

    def report(self, tier: TierName, removed: Removed, kept: int = 0, error: str = "") -> None:
        self.done[tier] = Dropped(tier, removed.num_blocks, removed.num_bytes, kept, error)


class Drops:
    """All drops that are not done."""

    def __init__(self, cache: Cache, transfers: Transfers, sessions: dict[str, Session]) -> None:
        self._cache = cache
        self._transfers = transfers
        self._sessions = sessions
        self._pending: list[_Pending] = []
        self._num_orders = 0

    def start(self, event: Drop, now_ns: int) -> list[Action]:
        """Begin to empty tiers; the answer comes when all are done."""
        drop = _Pending(event)
        self._pending.append(drop)
        actions: list[Action] = []
        if TierName.GPU in event.tiers:
            for session in self._sessions.values():
                if event.selection.key_space not in {b"", session.key_space}:
                    continue
                self._num_orders += 1
                drop.orders[self._num_orders] = session.token
                actions.append(Order(session.token, self._num_orders))
        return actions + self.advance(now_ns)

    def advance(self, now_ns: int) -> list[Action]:
        """Take the steps that have become possible, or that the deadline asks for."""
        actions: list[Action] = []
        for drop in list(self._pending):
            is_overdue = now_ns >= drop.event.deadline_ns - DROP_GRACE_NS
            actions += self._step(drop, is_overdue)
            if len(drop.done) == len(set(drop.event.tiers)):
                self._pending.remove(drop)
                answer = tuple(drop.done[tier] for tier in drop.event.tiers)
                actions.append(Reply(drop.event.call, answer))
        return actions

    def purged(self, event: PurgeDone) -> None:
        """Note that a selection of blocks was taken out of a tier."""
        index = self._cache.index
        self._transfers.lanes[event.tier].is_clearing = False
        if not event.fault:
            rows = index.in_state(event.tier, Residency.READY)
            rows = index.selected(rows, event.selection)
            index.move(rows, event.tier, Residency.ABSENT)
            index.forget_absent(rows)
            self._cache.metrics.add(DROPPED_BLOCKS, event.removed.num_blocks, tier=event.tier)
        for drop in self._pending:
            if event.tier in drop.clearing:
                drop.clearing.remove(event.tier)
                drop.report(event.tier, event.removed, error=event.fault)

    def answered(self, order: int, removed: Removed) -> None:
        """Note an engine's answer."""
        for drop in self._pending:
            if drop.orders.pop(order, None) is not None:
                drop.gpu = Removed(
                    drop.gpu.num_blocks + removed.num_blocks,
                    drop.gpu.num_bytes + removed.num_bytes,
                )

    def session_ended(self, token: str) -> None:
        """Expect no more answers from a session."""
        for drop in self._pending:
            drop.orders = {order: s for order, s in drop.orders.items() if s != token}

    def next_deadline_ns(self) -> int | None:
        """Return when the next drop must be answered."""
        return min((d.event.deadline_ns - DROP_GRACE_NS for d in self._pending), default=None)

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
        if not drop.orders:
            drop.report(TierName.GPU, drop.gpu)
        elif is_overdue:
            late = f"{len(drop.orders)} engine(s) gave no answer"
            drop.report(TierName.GPU, drop.gpu, error=late)

    def _step_cpu(self, drop: _Pending, is_overdue: bool) -> None:
        index = self._cache.index
        rows = index.rows()
        slots = rows[index.residency(rows, TierName.CPU) != Residency.ABSENT]
        slots = index.selected(slots, drop.event.selection)
        in_use = slots[
            (index.pins[slots] > 0) | (index.residency(slots, TierName.CPU) == Residency.WRITING)
        ]
        if len(in_use) and not is_overdue:
            return
        num_blocks, num_bytes = self._cache.evict_all(drop.event.selection)
        self._cache.metrics.add(DROPPED_BLOCKS, num_blocks, tier=TierName.CPU)
        drop.report(TierName.CPU, Removed(num_blocks, num_bytes), kept=len(in_use))

    def _step_slow(self, drop: _Pending, tier: TierName, is_overdue: bool) -> list[Action]:
        lane = self._transfers.lanes.get(tier)
        if lane is None:
            drop.report(tier, Removed(), error="there is no such tier here")
        elif is_overdue:
            rows = self._cache.index.in_state(tier, Residency.READY)
            kept = len(self._cache.index.selected(rows, drop.event.selection))
            drop.clearing.discard(tier)
            drop.report(tier, Removed(), kept=kept, error="not emptied before the deadline")
        elif tier not in drop.clearing and not lane.is_writing and not lane.is_clearing:
            drop.clearing.add(tier)
            lane.is_clearing = True
            until_ns = drop.event.deadline_ns - DROP_GRACE_NS
            return [Purge(tier, drop.event.selection, until_ns)]
        return []
