"""Movements between the arena and the slower tiers: queued, bounded, loads before stores.

A block waiting to be written, or being written, is pinned in the CPU tier; one being read is in
state writing there. Either way nobody else uses its slot until the transfer's completion comes, no
matter how late: a thread that hangs in a disk keeps its slots, and once it is past its deadline the
tier counts as stuck and is left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvtier.core.admission import Admission, Admit, Offer, Reject
from kvtier.core.identity import EVERYTHING, Selection
from kvtier.core.index import Scope
from kvtier.core.limits import (
    BANDWIDTH_MIN_BYTES_PER_S,
    TRANSFER_BLOCKS,
    TRANSFER_BLOCKS_MAX,
    TRANSFER_BYTES,
    WRITE_ARENA_SHARE,
)
from kvtier.core.residency import Residency, TierName
from kvtier.node.action import Read, TransferBlock, Write
from kvtier.node.cache import Cache
from kvtier.observe.table import ADMISSION_BLOCKS, TRANSFER_QUEUE_SECONDS

__all__ = ["Lane", "SlowTier", "Transfers"]


@dataclass(frozen=True, slots=True)
class SlowTier:
    """What the node must know of a tier below the CPU."""

    name: TierName
    num_workers: int
    deadline_ns: int
    """For the answer; a transfer gets the time for its bytes on top."""
    queue_bytes_max: int
    """Bytes that may wait to be written; each of them is pinned in the arena."""
    min_tokens: int = 0
    """A lookup asks a shared tier only where at least so many are missing."""
    transfer_bytes: int = TRANSFER_BYTES
    """What a transfer of small blocks may take together."""


@dataclass(slots=True)
class _Flight:
    rows: tuple[int, ...]
    is_read: bool
    deadline_ns: int
    is_overdue: bool = False
    """Seen to be past its deadline, so that nobody is woken for it again."""


@dataclass(slots=True)
class Lane:
    """The way between the arena and one tier."""

    tier: SlowTier
    is_up: bool = True
    reads: dict[int, int] = field(default_factory=dict)
    """Rows to read, first come first served, each with the time it was queued."""
    writes: dict[int, int] = field(default_factory=dict)
    flights: dict[int, _Flight] = field(default_factory=dict)
    closed: list[Selection] = field(default_factory=list)
    """Whose blocks are being dropped: none is read for a lookup, and none is written."""
    purging: Selection | None = None
    """Whose blocks the tier is taking out just now; closed too, however long it takes."""
    queued_bytes: int = 0
    """Bytes pinned because they wait to be written or are being written."""

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is queued or on its way."""
        return not (self.reads or self.writes or self.flights)

    def is_closed(self, scope: Scope) -> bool:
        """Tell whether a scope's blocks are being dropped from the tier."""
        selections = self.closed if self.purging is None else [*self.closed, self.purging]
        return any(each.has(scope.key_space, scope.tenant) for each in selections)

    def is_usable(self, now_ns: int) -> bool:
        """Tell whether the tier answers, as far as one can see from here."""
        return self.is_up and not any(f.deadline_ns <= now_ns for f in self.flights.values())


class Transfers:
    """Every lane. ``pump`` turns what is queued into actions, as far as workers are free."""

    def __init__(self, cache: Cache, tiers: Sequence[SlowTier], admission: Admission) -> None:
        self._cache = cache
        self._admission = admission
        self._metrics = cache.metrics
        self._num_started = 0
        self.lanes = {tier.name: Lane(tier) for tier in tiers}

    def read(self, row: int, tier: TierName, now_ns: int) -> None:
        """Queue a claimed row to be filled from a tier."""
        assert self._cache.state(row, TierName.CPU) == Residency.WRITING
        self.lanes[tier].reads[row] = now_ns

    def cancel_read(self, row: int) -> bool:
        """Take a row off the queue of reads; False where none is queued that has not begun."""
        return any(lane.reads.pop(row, None) is not None for lane in self.lanes.values())

    def cancel_writes(self, lane: Lane, selection: Selection) -> None:
        """Write no block of a selection that is still queued."""
        rows = self._cache.index.selected(np.array([*lane.writes], np.int64), selection)
        for row in rows.tolist():
            del lane.writes[row]
            self._cache.index.move(row, lane.tier.name, Residency.ABSENT)
            self._unqueue(lane, row)

    def writing(self, lane: Lane, selection: Selection) -> int:
        """Return how many blocks of a selection are being written."""
        flights = lane.flights.values()
        rows = np.array([r for f in flights if not f.is_read for r in f.rows], np.int64)
        return len(self._cache.index.selected(rows, selection))

    def offer(self, rows: Sequence[int], now_ns: int) -> None:
        """Offer rows, consecutive in one chain, to every slower tier that lacks them."""
        for lane in self.lanes.values():
            self.offer_to(lane, rows, now_ns)

    def offer_to(self, lane: Lane, rows: Sequence[int], now_ns: int) -> int:
        """Offer rows, consecutive in one chain, to one tier; returns how many will be written."""
        index, name = self._cache.index, lane.tier.name
        lacking = [
            row
            for row in rows
            if self._cache.state(row, TierName.CPU) == Residency.READY
            and self._cache.state(row, name) == Residency.ABSENT
        ]
        if not lacking or lane.is_closed(index.scope_of(lacking[0])):
            return 0
        taken = self._judge(lane, lacking, now_ns)
        for row in lacking[:taken]:
            self._cache.pin(row)
            index.move(row, name, Residency.WRITING)
            lane.queued_bytes += self._cache.size_of(row)
            lane.writes[row] = now_ns
        return taken

    def pump(self, now_ns: int) -> list[Read | Write]:
        """Start what free workers can take, reads first. One worker is kept for reads."""
        actions: list[Read | Write] = []
        for lane in self.lanes.values():
            if not lane.is_usable(now_ns):
                continue
            while lane.reads and len(lane.flights) < lane.tier.num_workers:
                actions.append(self._start_read(lane, now_ns))
            write_workers = max(1, lane.tier.num_workers - 1)
            while lane.writes and len(lane.flights) < write_workers:
                actions.append(self._start_write(lane, now_ns))
        return actions

    def end(self, transfer: int) -> tuple[Lane, tuple[int, ...]]:
        """Take a transfer off its lane; a write's rows are unpinned."""
        for lane in self.lanes.values():
            flight = lane.flights.pop(transfer, None)
            if flight is None:
                continue
            if not flight.is_read:
                for row in flight.rows:
                    self._unqueue(lane, row)
            return lane, flight.rows
        raise AssertionError(f"transfer {transfer} ends once")

    def shed(self, lane: Lane) -> list[int]:
        """Give up what is queued on a lane that cannot be used; returns the rows to be read."""
        self.cancel_writes(lane, EVERYTHING)
        unread = list(lane.reads)
        lane.reads.clear()
        return unread

    def note_overdue(self, now_ns: int) -> list[int]:
        """Note transfers past their deadline; returns the rows of reads that just became so."""
        flights = [f for lane in self.lanes.values() for f in lane.flights.values()]
        fresh = [f for f in flights if f.deadline_ns <= now_ns and not f.is_overdue]
        for flight in fresh:
            flight.is_overdue = True
        return [row for flight in fresh if flight.is_read for row in flight.rows]

    def stuck(self) -> list[int]:
        """Return the rows that overdue reads still fill: it may take for ever, so nobody waits."""
        flights = [f for lane in self.lanes.values() for f in lane.flights.values()]
        return [row for f in flights if f.is_read and f.is_overdue for row in f.rows]

    def shed_unusable(self, now_ns: int) -> list[tuple[Lane, list[int]]]:
        """Shed every lane that is down or stuck."""
        return [
            (lane, self.shed(lane))
            for lane in self.lanes.values()
            if (lane.reads or lane.writes) and not lane.is_usable(now_ns)
        ]

    def next_deadline_ns(self) -> int | None:
        """Return when the next transfer is overdue."""
        flights = [f for lane in self.lanes.values() for f in lane.flights.values()]
        return min((f.deadline_ns for f in flights if not f.is_overdue), default=None)

    def room_bytes(self, lane: Lane) -> int:
        """Return how many more bytes may wait to be written to a tier."""
        share_bytes = int(self._cache.slots.reserved_bytes * WRITE_ARENA_SHARE)
        return min(share_bytes, lane.tier.queue_bytes_max) - lane.queued_bytes

    def _judge(self, lane: Lane, rows: Sequence[int], now_ns: int) -> int:
        index = self._cache.index
        if not lane.is_usable(now_ns):
            self._metrics.add(ADMISSION_BLOCKS, len(rows), tier=lane.tier.name, outcome="throttled")
            return 0
        verdict = self._admission.judge(
            Offer(
                tier=lane.tier.name,
                num_blocks=len(rows),
                first_position=int(index.position[rows[0]]),
                payload_bytes=self._cache.size_of(rows[0]),
                queued_bytes=lane.queued_bytes,
                queued_bytes_max=lane.queued_bytes + self.room_bytes(lane),
            )
        )
        taken = verdict.num_blocks if isinstance(verdict, Admit) else 0
        name = lane.tier.name
        refusal = "rejected" if isinstance(verdict, Reject) else "throttled"
        self._metrics.add(ADMISSION_BLOCKS, taken, tier=name, outcome="admitted")
        self._metrics.add(ADMISSION_BLOCKS, len(rows) - taken, tier=name, outcome=refusal)
        return taken

    def _start_read(self, lane: Lane, now_ns: int) -> Read:
        rows = self._next(lane, lane.reads, now_ns)
        blocks = tuple(
            TransferBlock(self._cache.index.header_of(row), int(self._cache.index.slot[row]))
            for row in rows
        )
        number = self._fly(lane, rows, now_ns, is_read=True)
        return Read(number, lane.tier.name, blocks, lane.flights[number].deadline_ns)

    def _start_write(self, lane: Lane, now_ns: int) -> Write:
        rows = self._next(lane, lane.writes, now_ns)
        blocks = tuple(
            TransferBlock(self._cache.header(row), int(self._cache.index.slot[row])) for row in rows
        )
        number = self._fly(lane, rows, now_ns, is_read=False)
        return Write(number, lane.tier.name, blocks, lane.flights[number].deadline_ns)

    def _next(self, lane: Lane, queue: dict[int, int], now_ns: int) -> tuple[int, ...]:
        small = lane.tier.transfer_bytes // self._cache.size_of(next(iter(queue)))
        count = max(TRANSFER_BLOCKS, min(TRANSFER_BLOCKS_MAX, small))
        taken = [(row, queue.pop(row)) for row in list(islice(queue, count))]
        source, target = ("cpu", lane.tier.name)
        if queue is lane.reads:
            source, target = target, source
        for _, queued_ns in taken:
            waited = (now_ns - queued_ns) / 1e9
            self._metrics.observe(TRANSFER_QUEUE_SECONDS, waited, route=f"{source}_to_{target}")
        return tuple(row for row, _ in taken)

    def _fly(self, lane: Lane, rows: tuple[int, ...], now_ns: int, *, is_read: bool) -> int:
        self._num_started += 1
        num_bytes = sum(self._cache.size_of(row) for row in rows)
        deadline_ns = (
            now_ns + lane.tier.deadline_ns + num_bytes * 10**9 // BANDWIDTH_MIN_BYTES_PER_S
        )
        lane.flights[self._num_started] = _Flight(rows, is_read, deadline_ns)
        return self._num_started

    def _unqueue(self, lane: Lane, row: int) -> None:
        lane.queued_bytes -= self._cache.size_of(row)
        self._cache.unpin(row)
