"""One simulated run: a real node, several engines, two tiers, an operator, and one seed.

Theory
------
Everything that happens is an event in one queue, ordered by simulated time. The node is the
production code and sees only events and the time. Work for a tier takes effect at one time and is
reported later, or never, so completions overtake each other and a crash may occur in between.
Nothing depends on hash order, threads or the real clock: a seed repeats exactly.

These properties are checked as it runs: the node's invariants after every event, one answer per
call and none too late, nothing left of dropped blocks, and above all that every block that an
engine accepts is the requested one, byte for byte. After all engines have ended, the node must be
idle.
"""

from dataclasses import dataclass, replace
from functools import partial

from kvtier.core.residency import Residency, TierName
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.sim.engine_workload import Fleet, WorkloadCounters
from kvtier.sim.fault_injector import FaultInjector
from kvtier.sim.fault_profile import NO_FAULTS
from kvtier.sim.world import MS, World
from kvtier.testing.block import payload_of
from kvtier.testing.node_harness import NodeHarness, Work
from kvtier.tiers.base import BlockWrite

__all__ = ["Simulation", "SimulationReport"]

_DRAIN_NS = 120_000 * MS
"""Longer than any deadline, lease or pause."""


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Summary of one run."""

    seed: int
    num_events: int
    simulated_s: float
    num_crashes: int
    counters: WorkloadCounters
    faults: dict[str, int]


class Simulation:
    """One run, as described in the module's docstring. Call ``run`` once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._world = World(seed)
        self._counters = WorkloadCounters()
        self._fleet = Fleet(self._world, self._counters)
        self._fault_injector = FaultInjector(self._world, self._fleet)
        self._armed: tuple[NodeHarness, int] | None = None

    def run(self, num_events: int) -> SimulationReport:
        """Run until ``num_events`` events of the node have passed, then drain."""
        world = self._world
        self._fleet.start()
        world.at(20 * MS, self._fault_injector.inject)
        while world.num_events < num_events:
            self._step()
        self._end()
        return SimulationReport(
            self.seed,
            world.num_events,
            world.clock() / 1e9,
            world.num_boots - 1,
            self._counters,
            dict(world.faults),
        )

    def _step(self) -> None:
        world = self._world
        world.step()
        for work in world.harness.waiting:
            self._schedule_work(work)
        world.harness.waiting.clear()
        due_ns = world.harness.node.next_deadline_ns()
        if due_ns is not None and self._armed != (world.harness, due_ns):
            self._armed = armed = (world.harness, due_ns)
            world.at(due_ns - world.clock(), lambda: self._tick(armed))

    def _tick(self, armed: tuple[NodeHarness, int]) -> None:
        if self._armed == armed:
            self._armed = None
            self._world.harness.post(ev.Tick())

    # Tiers

    def _schedule_work(self, work: Work) -> None:
        """Decide when a piece of work takes effect, when it is reported, and how it fails."""
        world, harness, draw = self._world, self._world.harness, self._world.draw
        if isinstance(work, ac.EmptyEngineTier):
            world.at(draw.randint(1, 400) * MS, lambda: self._fleet.empty_tier(work))
            return
        fault_profile = world.fault_profile
        latency_ns = draw.randint(1, 20_000) * 1_000
        if work.tier in world.stalls:
            latency_ns *= 8
        if world.happens(fault_profile.hang, "hang"):
            latency_ns = draw.randint(100, 400) * MS
        fails = work.tier in world.outages or world.happens(
            fault_profile.fail_before, "fail_before"
        )
        tears = isinstance(work, ac.Write) and world.happens(fault_profile.tear, "tear")
        reports_failure = tears or world.happens(fault_profile.fail_after, "fail_after")
        num_detaches = world.num_detaches[work.tier]
        ended: list[ev.Event] = []
        if isinstance(work, ac.Write) and not work.tier.is_shared:
            world.cut_short[work] = partial(self._cut_short, harness, work)

        def take_effect() -> None:
            if harness is not world.harness:
                # A server may still receive what a dead node sent; the node's own disk does not.
                if isinstance(work, ac.Write) and work.tier.is_shared:
                    self._cut_short(harness, work)
                return
            world.cut_short.pop(work, None)
            was_detached = num_detaches != world.num_detaches[work.tier]
            if was_detached and (not work.tier.is_shared or isinstance(work, ac.Purge)):
                ended.append(harness.fault(work))  # its store was already closed
            elif tears and isinstance(work, ac.Write):
                self._tear(work)
            else:
                event = harness.fault(work) if fails else harness.completion(work)
                if isinstance(event, ev.ReadDone | ev.WriteDone):
                    event = replace(event, seconds=latency_ns / 1e9)
                ended.append(event)

        def report() -> None:
            is_reported = num_detaches == world.num_detaches[work.tier] or not isinstance(
                work, ac.Purge
            )
            if harness is world.harness and is_reported:
                harness.post(harness.fault(work) if reports_failure else ended[0])

        if world.happens(fault_profile.vanish, "vanish"):
            world.lost.append(work)
            if draw.random() < 0.5:
                world.at(draw.randint(0, latency_ns), take_effect)
            return
        world.at(draw.randint(0, latency_ns), take_effect)
        world.at(latency_ns, report)

    def _tear(self, work: ac.Write) -> None:
        """Leave half a block behind a failed write."""
        header = work.blocks[0].header
        self._world.tiers[work.tier].tear(BlockWrite(header, memoryview(payload_of(header))))

    def _cut_short(self, harness: NodeHarness, work: ac.Write) -> None:
        """Let a write interrupted by a crash take effect completely, partly, or not at all."""
        match self._world.draw.randrange(3):
            case 0:
                harness.completion(work)
            case 1:
                self._tear(work)

    # Drain

    def _end(self) -> None:
        """Let all engines die and all work end; then the node must be idle."""
        world = self._world
        can_be_scribbled = world.fault_profile.scribble > 0
        world.is_open = False
        world.fault_profile = NO_FAULTS
        self._fleet.end()
        until_ns = world.clock() + _DRAIN_NS
        while (next_ns := world.next_ns()) is not None and next_ns <= until_ns:
            self._step()
        world.harness.check_idle(world.lost)
        if not can_be_scribbled:
            self._check_arena()

    def _check_arena(self) -> None:
        """Check every block that could be served, requested or not."""
        harness = self._world.harness
        cache = harness.node.cache
        for row in cache.index.in_state(TierName.CPU, Residency.READY).tolist():
            header = cache.index.header_of(row)
            payload = harness.view(int(cache.index.slot[row]), header.payload_bytes)
            assert payload == payload_of(header), f"wrong block in the arena: {header}"
            assert header.matches(payload), f"wrong checksum: {header}"
