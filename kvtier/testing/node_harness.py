"""Runs a node with its own arena, tiers and clock, under the control of a test.

The node's work for tiers and engines waits in ``waiting`` until the test carries it out, in any
order, late or never. Answers are checked as they arrive: exactly one per call, none after its
deadline. After each event the node's invariants are checked.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvtier.core.admission import Admission, AdmitEverything
from kvtier.core.eviction.base import Eviction
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.identity import BlockHeader
from kvtier.core.planner import Planner
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.history import History
from kvtier.core.slow_tier import AdminState, SlowTier, WriteMode
from kvtier.core.table import as_keys
from kvtier.errors import DaemonUnavailable, TierError
from kvtier.node.invariants import check, check_memory, check_token_counters
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.node.node import Node, NodeSettings
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import REFUSED_SAMPLES, Metrics
from kvtier.tiers.base import BlockRead, BlockWrite, MissReason, Removed, Tier, WriteOutcome

__all__ = ["FakeClock", "HarnessSettings", "NodeHarness", "Work"]


class FakeClock:
    """A monotonic clock in nanoseconds that the test advances; replaces ``time.monotonic_ns``."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the time."""
        return self.now_ns

    def advance(self, elapsed_ns: int) -> int:
        """Advance the time and return it."""
        assert elapsed_ns >= 0, "time does not go backwards"
        self.now_ns += elapsed_ns
        return self.now_ns


Work = ac.Read | ac.Write | ac.ExistsQuery | ac.Purge | ac.EmptyEngineTier

_EVENTS_A_LOOK = 16
"""The history is checked after this many events and at rest, since that takes longer."""

_NEVER_NS = 1 << 62
"""Deadline for the tiers, which use the real clock; here it never passes."""


@dataclass(frozen=True, slots=True)
class HarnessSettings:
    """A small arena and short times, so that every limit is reached within a few hundred events."""

    num_slabs: int = 4
    slab_bytes: int = 32_768
    lease_ns: int = 500_000_000
    transfer_deadline_ns: int = 100_000_000
    num_workers: int = 2
    queue_bytes_max: int = 1 << 30
    min_tokens: int = 0
    write: Mapping[TierName, WriteMode] = field(default_factory=dict)
    """When blocks are written to a tier; by default as soon as they are stored."""
    flush_after_ns: int = 0
    pin_share: float = 0.0


class NodeHarness:
    """A node under test; see the module. ``tiers`` may outlive it, as disks outlive daemons."""

    def __init__(  # noqa: PLR0913  # what a node takes, and its clock; each has a default
        self,
        tiers: Mapping[TierName, Tier] | None = None,
        settings: HarnessSettings | None = None,
        *,
        clock: FakeClock | None = None,
        boot: str = "boot",
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        history: History | None = None,
        planner: Planner | None = None,
        depth: DepthCurves | None = None,
    ) -> None:
        self.tiers = dict(tiers or {})
        self.clock = clock or FakeClock()
        self.settings = settings = settings or HarnessSettings()
        self.metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
        self.node = Node(
            NodeSettings(
                boot,
                settings.num_slabs,
                settings.slab_bytes,
                settings.lease_ns,
                _slow_tiers(self.tiers, settings),
                settings.pin_share,
            ),
            eviction or LeafLru(),
            admission or AdmitEverything(),
            self.metrics,
            history=history,
            planner=planner,
            depth=depth,
        )
        self.arena = memoryview(bytearray(settings.num_slabs * settings.slab_bytes))
        self.waiting: list[Work] = []
        self.answers: dict[int, ac.Answer] = {}
        self.progress: dict[int, list[ac.LoadUpdate]] = defaultdict(list)
        self.open_calls: dict[int, ev.Event] = {}
        self.num_events = 0
        self.is_checked = True
        """Check all invariants after each event; turn this off for thousands of events."""
        self.is_down = False
        """Set this to let the daemon die; the arena stays mapped in its clients."""
        self._num_calls = 0
        self._excused: set[int] = set()
        """Calls whose answers may be late."""
        self.post(ev.SlabsReserved(settings.num_slabs))

    def recover(self, tiers: Mapping[TierName, Tier]) -> None:
        """Tell the node what persistent tiers hold, as the daemon does at startup."""
        for name, tier in tiers.items():
            for headers in tier.headers():
                self.post(ev.BlocksRecovered(name, headers))

    def post(self, event: ev.Event) -> None:
        """Let the node handle an event; its work waits, its answers are recorded."""
        call = getattr(event, "call", None)
        if call is not None:
            self.open_calls[call] = event
        self.num_events += 1
        lanes = self.node.transfers.lanes.values()
        drained = [
            (lane, set(lane.writes)) for lane in lanes if lane.admin_state is not AdminState.ACTIVE
        ]
        for action in self.node.handle(event, self.clock()):
            if isinstance(action, ac.CallReply | ac.LoadUpdate):
                self._note(action)
            else:
                self._check_asked(action)
                self.waiting.append(action)
        for lane, queued in drained:
            is_kept = lane.admin_state is AdminState.ACTIVE or lane.writes.keys() <= queued
            assert is_kept, f"something new is written to the drained tier {lane.tier.name}"
        if self.is_checked:
            check(self.node)
            if self.num_events % _EVENTS_A_LOOK == 0:
                check_memory(self.node)
        due_ns = self.node.next_deadline_ns()
        is_at_rest = due_ns is None or due_ns > self.clock() or not isinstance(event, ev.Tick)
        assert is_at_rest, "a tick must not leave another tick due"

    def call(self, make: Callable[[int], ev.Event]) -> int:
        """Post a call and return its number. Raises DaemonUnavailable if the node is down."""
        if self.is_down:
            raise DaemonUnavailable("the daemon has died")
        self._num_calls += 1
        self.post(make(self._num_calls))
        return self._num_calls

    def ask(self, make: Callable[[int], ev.Event]) -> ac.Answer:
        """Post a call that the node answers at once, and return the answer."""
        return self.answers.pop(self.call(make))

    def advance(self, elapsed_ns: int) -> None:
        """Let time pass, waking the node at its deadlines."""
        until_ns = self.clock() + elapsed_ns
        while (due_ns := self.node.next_deadline_ns()) is not None and due_ns <= until_ns:
            self.clock.now_ns = max(due_ns, self.clock())
            self.post(ev.Tick())
        self.clock.now_ns = until_ns

    def carry_out(self, work: Work) -> None:
        """Carry out one piece of waiting work and notify the node."""
        self.waiting.remove(work)
        self.post(self.completion(work))

    def settle(self) -> None:
        """Carry out all work for tiers until there is none."""
        while tier_work := [w for w in self.waiting if not isinstance(w, ac.EmptyEngineTier)]:
            self.carry_out(tier_work[0])

    def fail(self, work: Work) -> None:
        """Let one piece of waiting work fail before it has any effect."""
        self.waiting.remove(work)
        self.post(self.fault(work))

    def completion(self, work: Work) -> ev.Event:
        """Carry out a piece of work on tier and arena, and return the event for the node."""
        try:
            match work:
                case ac.Read():
                    return self._read(work)
                case ac.Write():
                    return self._write(work)
                case ac.ExistsQuery():
                    present = self.tiers[work.tier].contains(work.hashes, _NEVER_NS)
                    return ev.ExistsQueryDone(work.query, tuple(present))
                case ac.Purge():
                    removed = self.tiers[work.tier].purge(work.selection, _NEVER_NS)
                    return ev.PurgeDone(work.tier, work.selection, removed)
                case ac.EmptyEngineTier():
                    raise AssertionError("orders go to engines")
        except TierError:
            return self.fault(work)

    @staticmethod
    def fault(work: Work) -> ev.Event:
        """Return the completion of a failed piece of work."""
        match work:
            case ac.Read():
                return ev.ReadDone(work.transfer, (), 0.0, fault="a fault was injected")
            case ac.Write():
                return ev.WriteDone(work.transfer, (), b"", 0.0, fault="a fault was injected")
            case ac.ExistsQuery():
                return ev.ExistsQueryDone(work.query, ())
            case ac.Purge():
                return ev.PurgeDone(
                    work.tier, work.selection, Removed(), fault="a fault was injected"
                )
            case ac.EmptyEngineTier():
                raise AssertionError("orders go to engines")

    def excuse(self) -> None:
        """Allow late answers to open calls, because the clock is about to jump."""
        self._excused.update(self.open_calls)

    def check_idle(self, lost: Sequence[Work] = ()) -> None:
        """Raise AssertionError if anything is pinned, leased, unanswered, queued or half done.

        The node never learned the end of ``lost`` work, and still holds the memory it may touch.
        """
        node = self.node
        check_memory(node)
        check_token_counters(node)
        assert not self.open_calls, f"calls without an answer: {self.open_calls}"
        num_pins = sum(len(work.blocks) for work in lost if isinstance(work, ac.Write))
        assert node.num_pins == num_pins, "pins are left"
        assert node.num_leases == 0, "leases are left"
        transfers = {work.transfer for work in lost if isinstance(work, ac.Read | ac.Write)}
        for lane in node.transfers.lanes.values():
            queued = [*lane.reads, *lane.writes, *lane.closed]
            assert not queued, "queues are left"
            assert lane.in_flight.keys() <= transfers, "transfers are left"
            transfers -= lane.in_flight.keys()
            is_purging = any(isinstance(work, ac.Purge) for work in lost)
            assert is_purging or lane.purging is None, "a tier remains closed after a purge"
        orphans = node.transfers.orphans.keys()
        assert orphans <= transfers, "transfers of a detached tier are left"
        assert not transfers - orphans, "an unfinished transfer was forgotten"
        if not lost:
            assert node.cache.slots.held_bytes == 0, "held slots are left"
        assert node.next_deadline_ns() is None, "an idle node has no deadlines"
        refused = self.metrics.registry.get_sample_value(REFUSED_SAMPLES.name)
        assert refused == 0, "a metric sample was refused"

    def _read(self, work: ac.Read) -> ev.Event:
        reads = [
            BlockRead(
                block.header.block_hash,
                block.header.key_space,
                block.header.tenant,
                block.header.payload_bytes,
                self.view(block.offset, block.slot_bytes),
            )
            for block in work.blocks
        ]
        results = self.tiers[work.tier].read(reads, _NEVER_NS)
        outcomes = tuple(r if isinstance(r, MissReason) else r.checksum for r in results)
        return ev.ReadDone(work.transfer, outcomes, 0.001)

    def _write(self, work: ac.Write) -> ev.Event:
        writes = [
            BlockWrite(b.header, self.view(b.offset, b.header.payload_bytes)) for b in work.blocks
        ]
        is_whole = [write.header.matches(write.payload) for write in writes]
        whole = [write for write, ok in zip(writes, is_whole, strict=True) if ok]
        report = self.tiers[work.tier].write(whole, _NEVER_NS)
        stored = iter(report.outcomes)
        outcomes: list[WriteOutcome | None] = [next(stored) if ok else None for ok in is_whole]
        return ev.WriteDone(work.transfer, tuple(outcomes), b"".join(report.evicted), 0.001)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable part of the arena."""
        return self.arena[offset : offset + num_bytes]

    def holds(self, header: BlockHeader, tier: TierName) -> bool:
        """Return whether the node would serve a block from a tier."""
        row = int(self.node.cache.index.find(as_keys(header.block_hash))[0])
        return row >= 0 and self.node.cache.state(row, tier) == Residency.READY

    def _note(self, action: ac.CallReply | ac.LoadUpdate) -> None:
        event = self.open_calls.get(action.call)
        assert event is not None, f"call {action.call} was answered twice: {action}"
        deadline_ns = getattr(event, "deadline_ns", self.clock())
        is_in_time = self.clock() <= deadline_ns or action.call in self._excused
        assert is_in_time, f"late answer: {event}"
        if isinstance(action, ac.LoadUpdate):
            self.progress[action.call].append(action)
            if not action.end:
                return
        else:
            self.answers[action.call] = action.answer
            if isinstance(event, ev.Drop) and isinstance(action.answer, tuple):
                self._check_drop(event, action.answer)
        del self.open_calls[action.call]

    def _check_asked(self, work: Work) -> None:
        """Check that a detached tier gets no work."""
        if not isinstance(work, ac.EmptyEngineTier):
            admin_state = self.node.transfers.lanes[work.tier].admin_state
            assert admin_state is not AdminState.DETACHED, (
                f"work for the detached tier {work.tier}: {work}"
            )

    def _check_drop(self, event: ev.Drop, answer: tuple[ac.TierDropped, ...]) -> None:
        """Check that dropped blocks are gone and cannot return through work in flight.

        No block may enter before the answer, so at this moment none are left.
        """
        index = self.node.cache.index
        meant = index.selected(index.rows(), event.selection)
        for dropped in answer:
            if dropped.tier is TierName.GPU or dropped.error:
                continue
            is_there = index.residency(meant, dropped.tier) != Residency.ABSENT
            if dropped.kept_blocks:
                is_served = set(meant[is_there].tolist()) - self.node.cache.expelled
                assert not is_served, f"blocks kept by a drop are still served: {event}"
                continue
            assert not is_there.any(), f"blocks survived a drop: {event}"
            tier = self.tiers.get(dropped.tier)
            if tier is not None and not dropped.tier.is_shared:
                spaces = [headers["space"] for headers in tier.headers()]
                kept = any(event.selection.mask(each).any() for each in spaces)
                assert not kept, f"the tier kept what was dropped: {event}"


def _slow_tiers(names: Iterable[TierName], settings: HarnessSettings) -> tuple[SlowTier, ...]:
    return tuple(
        SlowTier(
            name,
            settings.num_workers,
            settings.transfer_deadline_ns,
            settings.queue_bytes_max,
            settings.min_tokens,
            transfer_bytes=0,  # blocks are small here; transfers take eight
            write=settings.write.get(name, WriteMode.STORE),
            flush_after_ns=settings.flush_after_ns if not name.is_shared else 0,
        )
        for name in names
    )
