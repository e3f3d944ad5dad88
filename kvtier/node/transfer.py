"""Movements between the arena and the slower tiers: queued, bounded, loads before stores.

A block waiting to be written, or being written, is pinned in the CPU tier; one being read is in
state writing there. Either way nobody else uses its slot until the transfer's completion comes, no
matter how late: a thread that hangs in a disk keeps its slots, and once it is past its deadline the
tier counts as stuck and is left alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.admission import Admission, Admit, Offer, Reject
from kvtier.core.limits import (
    BANDWIDTH_MIN_BYTES_PER_S,
    TRANSFER_BLOCKS_MAX,
    WRITE_ARENA_SHARE,
)
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import slot_bytes
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
    reads: deque[tuple[int, int]] = field(default_factory=deque)
    """Rows to read, each with the time it was queued."""
    writes: deque[tuple[int, int]] = field(default_factory=deque)
    flights: dict[int, _Flight] = field(default_factory=dict)
    is_clearing: bool = False
    """The tier is being emptied: writes wait, so that none of them is half of what is dropped."""
    queued_bytes: int = 0
    """Bytes pinned because they wait to be written or are being written."""

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is queued or on its way."""
        return not (self.reads or self.writes or self.flights)

    @property
    def is_writing(self) -> bool:
        """Tell whether anything is, or is about to be, written to the tier."""
        return bool(self.writes) or not all(f.is_read for f in self.flights.values())

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
        self._pinned_bytes_max = int(cache.slots.capacity_bytes * WRITE_ARENA_SHARE)

    def read(self, row: int, tier: TierName, now_ns: int) -> None:
        """Queue a claimed row to be filled from a tier."""
        assert self._cache.state(row, TierName.CPU) == Residency.WRITING
        self.lanes[tier].reads.append((row, now_ns))

    def offer(self, rows: Sequence[int], now_ns: int) -> None:
        """Offer ready rows, consecutive in one chain, to every slower tier that lacks them."""
        for lane in self.lanes.values():
            name = lane.tier.name
            lacking = [r for r in rows if self._cache.state(r, name) == Residency.ABSENT]
            if not lacking:
                continue
            taken = self._judge(lane, lacking, now_ns)
            for row in lacking[:taken]:
                self._cache.pin(row)
                self._cache.index.move(row, name, Residency.WRITING)
                lane.queued_bytes += self._size(row)
                lane.writes.append((row, now_ns))

    def pump(self, now_ns: int) -> list[Read | Write]:
        """Start what free workers can take, reads first. One worker is kept for reads."""
        actions: list[Read | Write] = []
        for lane in self.lanes.values():
            if not lane.is_usable(now_ns):
                continue
            while lane.reads and len(lane.flights) < lane.tier.num_workers:
                actions.append(self._start_read(lane, now_ns))
            write_workers = max(1, lane.tier.num_workers - 1)
            while lane.writes and len(lane.flights) < write_workers and not lane.is_clearing:
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
        for row, _ in lane.writes:
            self._cache.index.move(row, lane.tier.name, Residency.ABSENT)
            self._unqueue(lane, row)
        lane.writes.clear()
        unread = [row for row, _ in lane.reads]
        lane.reads.clear()
        return unread

    def shed_unusable(self, now_ns: int) -> list[tuple[Lane, list[int]]]:
        """Note overdue transfers, and shed every lane that is down or stuck."""
        for lane in self.lanes.values():
            for flight in lane.flights.values():
                flight.is_overdue |= flight.deadline_ns <= now_ns
        return [
            (lane, self.shed(lane))
            for lane in self.lanes.values()
            if (lane.reads or lane.writes) and not lane.is_usable(now_ns)
        ]

    def next_deadline_ns(self) -> int | None:
        """Return when the next transfer is overdue."""
        flights = [f for lane in self.lanes.values() for f in lane.flights.values()]
        return min((f.deadline_ns for f in flights if not f.is_overdue), default=None)

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
                payload_bytes=self._size(rows[0]),
                queued_bytes=lane.queued_bytes,
                queued_bytes_max=min(self._pinned_bytes_max, lane.tier.queue_bytes_max),
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

    def _next(self, lane: Lane, queue: deque[tuple[int, int]], now_ns: int) -> tuple[int, ...]:
        count = min(len(queue), TRANSFER_BLOCKS_MAX)
        taken = [queue.popleft() for _ in range(count)]
        source, target = ("cpu", lane.tier.name)
        if queue is lane.reads:
            source, target = target, source
        for _, queued_ns in taken:
            waited = (now_ns - queued_ns) / 1e9
            self._metrics.observe(TRANSFER_QUEUE_SECONDS, waited, route=f"{source}_to_{target}")
        return tuple(row for row, _ in taken)

    def _fly(self, lane: Lane, rows: tuple[int, ...], now_ns: int, *, is_read: bool) -> int:
        self._num_started += 1
        num_bytes = sum(self._size(row) for row in rows)
        deadline_ns = (
            now_ns + lane.tier.deadline_ns + num_bytes * 10**9 // BANDWIDTH_MIN_BYTES_PER_S
        )
        lane.flights[self._num_started] = _Flight(rows, is_read, deadline_ns)
        return self._num_started

    def _unqueue(self, lane: Lane, row: int) -> None:
        lane.queued_bytes -= self._size(row)
        self._cache.unpin(row)

    def _size(self, row: int) -> int:
        return slot_bytes(int(self._cache.index.payload_bytes[row]))
