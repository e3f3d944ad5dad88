"""Transfers between the arena and the slower tiers: queued, bounded, reads before writes.

A block queued for writing or being written is pinned in the CPU tier; one being read is in state
writing there. Either way its slot is not reused until the transfer completes, no matter how late: a
thread that hangs in a disk operation keeps its slots. A transfer past its deadline makes its tier
count as stuck, and nothing more is sent to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvtier.core.identity import EVERYTHING, Selection
from kvtier.core.index import Scope
from kvtier.core.limits import (
    BANDWIDTH_MIN_BYTES_PER_S,
    TRANSFER_BLOCKS,
    TRANSFER_BLOCKS_MAX,
    WRITE_ARENA_SHARE,
)
from kvtier.core.residency import Residency, TierName
from kvtier.core.slow_tier import AdminState, SlowTier, WriteMode
from kvtier.node.messages.actions import Read, TransferBlock, Write
from kvtier.node.state.cache import Cache
from kvtier.node.state.read_queue import ReadQueue
from kvtier.observe.daemon_metrics import TRANSFER_QUEUE_SECONDS

__all__ = ["InFlightTransfer", "TierTransfers", "TransferLane"]


@dataclass(slots=True)
class InFlightTransfer:
    """One transfer in flight."""

    rows: tuple[int, ...]
    is_read: bool
    deadline_ns: int
    started_ns: int
    depth: int
    """Transfers of the same direction in flight when it started, itself included."""
    num_bytes: int
    is_overdue: bool = False
    """Whether it was already reported as past its deadline."""


@dataclass(slots=True)
class TransferLane:
    """Queues and transfers between the arena and one tier."""

    tier: SlowTier
    admin_state: AdminState = AdminState.ACTIVE
    is_up: bool = True
    reads: ReadQueue = field(default_factory=ReadQueue)
    writes: dict[int, int] = field(default_factory=dict)
    """Rows to write, first come first served, each with the time it was queued."""
    in_flight: dict[int, InFlightTransfer] = field(default_factory=dict)
    closed: list[Selection] = field(default_factory=list)
    """Selections being dropped: their blocks are neither read for a lookup nor written."""
    purging: Selection | None = None
    """Selection that the tier is purging now; closed too, however long it takes."""
    queued_bytes: int = 0
    """Bytes pinned because they are queued for writing or being written."""

    @property
    def read_bytes(self) -> int:
        """Return the bytes of reads that are queued or in flight."""
        return self.reads.num_bytes + sum(f.num_bytes for f in self.in_flight.values() if f.is_read)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is queued or in flight."""
        return not (self.reads or self.writes or self.in_flight)

    def is_closed(self, scope: Scope) -> bool:
        """Return whether a scope's blocks are being dropped from the tier."""
        selections = self.closed if self.purging is None else [*self.closed, self.purging]
        return any(each.has(scope.key_space, scope.tenant) for each in selections)

    def is_working(self, now_ns: int) -> bool:
        """Return whether the tier is attached, up, and has no overdue transfer."""
        is_late = any(f.deadline_ns <= now_ns for f in self.in_flight.values())
        return self.admin_state is not AdminState.DETACHED and self.is_up and not is_late

    def is_usable(self, now_ns: int) -> bool:
        """Return whether more may be read from the tier."""
        return self.admin_state in {AdminState.ACTIVE, AdminState.READ_ONLY} and self.is_working(
            now_ns
        )

    def takes_writes(self, now_ns: int) -> bool:
        """Return whether more may be written to the tier."""
        return self.admin_state is AdminState.ACTIVE and self.is_working(now_ns)


class TierTransfers:
    """All lanes. ``pump`` turns queued work into actions, as far as workers are free."""

    def __init__(self, cache: Cache, tiers: Sequence[SlowTier]) -> None:
        self._cache = cache
        self._metrics = cache.metrics
        self._num_started = 0
        self.lanes = {tier.name: TransferLane(tier) for tier in tiers}
        self.orphans: dict[int, InFlightTransfer] = {}
        """Transfers of tiers detached since; they hold slots, and nothing else."""

    def shared_lane(self) -> TransferLane | None:
        """Return the lane of the shared tier, unless it is detached or about to be."""
        for name, lane in self.lanes.items():
            if name.is_shared and lane.admin_state in {AdminState.ACTIVE, AdminState.READ_ONLY}:
                return lane
        return None

    def read(self, row: int, tier: TierName, load: int, now_ns: int) -> None:
        """Queue a claimed row to be read from a tier, for a load or in the ``BACKGROUND``."""
        assert self._cache.state(row, TierName.CPU) == Residency.WRITING
        self.lanes[tier].reads.add(row, load, self._cache.size_of(row), now_ns)

    def join_read(self, row: int, load: int, now_ns: int) -> None:
        """Add a load to a row's queued read, so that it is read in the turn that comes first."""
        for lane in self.lanes.values():
            if row in lane.reads:
                lane.reads.add(row, load, self._cache.size_of(row), now_ns)

    def limit_reads(self, load: int, num_blocks: int) -> None:
        """Limit reads for a load to ``num_blocks`` each, until the load is forgotten."""
        for lane in self.lanes.values():
            lane.reads.limit(load, num_blocks)

    def forget_load(self, load: int) -> None:
        """Give a load no more turns; reads that it alone wanted were cancelled before."""
        for lane in self.lanes.values():
            lane.reads.forget(load)

    def cancel_read(self, row: int) -> bool:
        """Cancel the queued read of a row; False if none is queued."""
        return any(lane.reads.discard(row) for lane in self.lanes.values())

    def cancel_writes(self, lane: TransferLane, selection: Selection) -> None:
        """Cancel the queued writes of a selection."""
        rows = self._cache.index.selected(np.array([*lane.writes], np.int64), selection)
        for row in rows.tolist():
            del lane.writes[row]
            self._cache.index.move(row, lane.tier.name, Residency.ABSENT)
            self._unqueue(lane, row)

    def writing(self, lane: TransferLane, selection: Selection) -> int:
        """Return how many blocks of a selection are being written."""
        in_flight = lane.in_flight.values()
        rows = np.array([r for f in in_flight if not f.is_read for r in f.rows], np.int64)
        return len(self._cache.index.selected(rows, selection))

    def write(self, lane: TransferLane, rows: Sequence[int], now_ns: int) -> None:
        """Queue rows to be written; they are ready in the CPU tier and absent from the tier."""
        for row in rows:
            self._cache.pin(row)
            self._cache.index.move(row, lane.tier.name, Residency.WRITING)
            lane.queued_bytes += self._cache.size_of(row)
            lane.writes[row] = now_ns

    def pump(self, now_ns: int) -> list[Read | Write]:
        """Start transfers on free workers, reads first. One worker is reserved for reads."""
        actions: list[Read | Write] = []
        for lane in self.lanes.values():
            if not lane.is_working(now_ns):
                continue
            while lane.reads and len(lane.in_flight) < lane.tier.num_workers:
                actions.append(self._start(lane, now_ns, Read))
            write_workers = max(1, lane.tier.num_workers - 1)
            while lane.writes and len(lane.in_flight) < write_workers:
                actions.append(self._start(lane, now_ns, Write))
        return actions

    def end(self, number: int) -> tuple[TransferLane, InFlightTransfer]:
        """Take a transfer off its lane; the rows of a write are unpinned."""
        for lane in self.lanes.values():
            transfer = lane.in_flight.pop(number, None)
            if transfer is None:
                continue
            if not transfer.is_read:
                for row in transfer.rows:
                    self._unqueue(lane, row)
            return lane, transfer
        raise AssertionError(f"transfer {number} ends once")

    def orphan(self, lane: TransferLane) -> list[int]:
        """Orphan a lane's transfers: they hold their slots until they end, without effect.

        Returns the rows that were being read.
        """
        unread: list[int] = []
        for number, transfer in lane.in_flight.items():
            self.orphans[number] = transfer
            if transfer.is_read:
                unread += transfer.rows
                continue
            self._cache.index.move(np.array(transfer.rows), lane.tier.name, Residency.ABSENT)
            lane.queued_bytes -= transfer.num_bytes
        lane.in_flight.clear()
        return unread

    def end_orphan(self, number: int) -> InFlightTransfer | None:
        """End an orphaned transfer; None if it is not one.

        The rows of a write are unpinned; the caller abandons those of a read.
        """
        transfer = self.orphans.pop(number, None)
        if transfer is not None and not transfer.is_read:
            for row in transfer.rows:
                self._cache.unpin(row)
        return transfer

    def shed(self, lane: TransferLane) -> list[int]:
        """Cancel everything queued on a lane; returns the rows that were to be read."""
        self.cancel_writes(lane, EVERYTHING)
        unread = list(lane.reads)
        lane.reads.clear()
        return unread

    def note_overdue(self, now_ns: int) -> list[tuple[TransferLane, InFlightTransfer]]:
        """Mark transfers past their deadline; returns those marked now."""
        fresh = [
            (lane, transfer)
            for lane in self.lanes.values()
            for transfer in lane.in_flight.values()
            if transfer.deadline_ns <= now_ns and not transfer.is_overdue
        ]
        for _, transfer in fresh:
            transfer.is_overdue = True
        return fresh

    def reading(self, row: int) -> TierName | None:
        """Return the tier that a row is being read from, or is queued to be."""
        for name, lane in self.lanes.items():
            if row in lane.reads or any(
                f.is_read and row in f.rows for f in lane.in_flight.values()
            ):
                return name
        return None

    def stuck(self) -> list[int]:
        """Return the rows that overdue or orphaned reads still fill; loads do not wait for them."""
        in_flight = [f for lane in self.lanes.values() for f in lane.in_flight.values()]
        in_flight = [f for f in in_flight if f.is_overdue] + [*self.orphans.values()]
        return [row for f in in_flight if f.is_read for row in f.rows]

    def shed_unusable(self, now_ns: int) -> list[tuple[TransferLane, list[int]]]:
        """Shed every lane that is down or stuck."""
        return [
            (lane, self.shed(lane))
            for lane in self.lanes.values()
            if (lane.reads or lane.writes) and not lane.is_working(now_ns)
        ]

    def next_deadline_ns(self) -> int | None:
        """Return when the next transfer becomes overdue."""
        in_flight = [f for lane in self.lanes.values() for f in lane.in_flight.values()]
        return min((f.deadline_ns for f in in_flight if not f.is_overdue), default=None)

    def is_way_down(self, now_ns: int) -> bool:
        """Return whether stored blocks go on to a slower tier without a second use."""
        return any(
            lane.tier.write is not WriteMode.SECOND_USE and lane.takes_writes(now_ns)
            for lane in self.lanes.values()
        )

    def room_bytes(self, lane: TransferLane) -> int:
        """Return how many more bytes may be queued for writing to a tier."""
        share_bytes = int(self._cache.slots.reserved_bytes * WRITE_ARENA_SHARE)
        return min(share_bytes, lane.tier.queue_bytes_max) - lane.queued_bytes

    def _start(self, lane: TransferLane, now_ns: int, kind: type[Read | Write]) -> Read | Write:
        index, is_read = self._cache.index, kind is Read
        rows = self._next(lane, now_ns, is_read=is_read)
        blocks = tuple(TransferBlock(index.header_of(row), int(index.slot[row])) for row in rows)
        number = self._fly(lane, rows, now_ns, is_read=is_read)
        return kind(number, lane.tier.name, blocks, lane.in_flight[number].deadline_ns)

    def _next(self, lane: TransferLane, now_ns: int, *, is_read: bool) -> tuple[int, ...]:
        queue = lane.reads if is_read else lane.writes
        small = lane.tier.transfer_bytes // self._cache.size_of(next(iter(queue)))
        count = max(TRANSFER_BLOCKS, min(TRANSFER_BLOCKS_MAX, small))
        if is_read:
            taken = lane.reads.take(count)
        else:
            taken = [(row, lane.writes.pop(row)) for row in list(islice(lane.writes, count))]
        source, target = (lane.tier.name, "cpu") if is_read else ("cpu", lane.tier.name)
        for _, queued_ns in taken:
            waited = (now_ns - queued_ns) / 1e9
            self._metrics.observe(TRANSFER_QUEUE_SECONDS, waited, route=f"{source}_to_{target}")
        return tuple(row for row, _ in taken)

    def _fly(self, lane: TransferLane, rows: tuple[int, ...], now_ns: int, *, is_read: bool) -> int:
        self._num_started += 1
        num_bytes = sum(self._cache.size_of(row) for row in rows)
        deadline_ns = (
            now_ns + lane.tier.deadline_ns + num_bytes * 10**9 // BANDWIDTH_MIN_BYTES_PER_S
        )
        depth = 1 + sum(transfer.is_read == is_read for transfer in lane.in_flight.values())
        lane.in_flight[self._num_started] = InFlightTransfer(
            rows, is_read, deadline_ns, now_ns, depth, num_bytes
        )
        return self._num_started

    def _unqueue(self, lane: TransferLane, row: int) -> None:
        lane.queued_bytes -= self._cache.size_of(row)
        self._cache.unpin(row)
