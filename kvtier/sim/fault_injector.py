"""Injects faults into devices, engines, the node and the clock, and plays the operator."""

from collections.abc import Generator, Sequence
from dataclasses import replace

from kvtier.core.identity import EVERYTHING, BlockHash, Selection
from kvtier.core.residency import Residency, TierName
from kvtier.core.slow_tier import AdminState
from kvtier.node.messages import events as ev
from kvtier.sim.engine_workload import Fleet
from kvtier.sim.world import MS, TENANTS, World
from kvtier.testing.node_harness import NodeHarness

__all__ = ["FaultInjector", "Operator"]


_FAR_NS = 1 << 62


class FaultInjector:
    """Injects faults periodically, with the chances of the fault profile."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet
        self._operator = Operator(world, fleet)

    def inject(self) -> None:
        """Inject each fault with its chance, and schedule the next round."""
        world, fault_profile = self._world, self._world.fault_profile
        if not world.is_open:
            return
        for chance, act in (
            (fault_profile.rot, self._rot),
            (fault_profile.lose, self._lose),
            (fault_profile.outage, self._outage),
            (fault_profile.stall, self._stall),
            (fault_profile.full, self._fill),
            (fault_profile.scribble, self._scribble),
            (fault_profile.die, self._die),
            (fault_profile.drop, self._drop),
            (fault_profile.detach, self._detach),
            (fault_profile.suspend, self._suspend),
            (fault_profile.crash, world.crash),
            (0.1, self._scrub),
            (0.05, self._expire),
            (0.1, self._visit),
            (0.05, self._pin),
            (0.05, self._warm),
        ):
            if world.happens(chance, act.__name__.strip("_")):
                act()
        world.at(world.draw.randint(5, 30) * MS, self.inject)

    # Devices

    def _rot(self) -> None:
        self._world.tiers[self._world.some_tier()].rot()

    def _lose(self) -> None:
        name = self._world.some_tier()
        self._world.tiers[name].lose()
        if name.is_shared:
            self._verify(name)

    def _verify(self, name: TierName) -> None:
        """Mark all blocks of a tier as unverified, as after a restart, and then verify them."""
        world, draw = self._world, self._world.draw
        harness, num_detaches, index = (
            world.harness,
            world.num_detaches[name],
            world.harness.node.cache.index,
        )

        def is_same() -> bool:
            return harness is world.harness and num_detaches == world.num_detaches[name]

        def ask() -> None:
            rows = index.in_state(name, Residency.UNVERIFIED)
            hashes = index.hashes_of(rows)
            present: list[bool | None] = [*world.tiers[name].contains(hashes, _FAR_NS)]
            if hashes and draw.random() < 0.2:
                present[0] = None
            event = ev.BlocksVerified(name, b"".join(hashes), tuple(present))
            world.at(draw.randint(0, 20) * MS, lambda: harness.post(event) if is_same() else None)

        harness.post(ev.MarkUnverified(name, 0, index.extent))
        world.at(draw.randint(0, 200) * MS, lambda: ask() if is_same() else None)

    def _scrub(self) -> None:
        name = self._world.some_tier()
        self._report_lost(name, self._world.tiers[name].scrub(1 << 20, _FAR_NS).damaged, "corrupt")

    def _expire(self) -> None:
        name = self._world.some_tier()
        self._report_lost(name, self._world.tiers[name].expire(), "expired")

    def _report_lost(self, name: TierName, hashes: Sequence[BlockHash], reason: str) -> None:
        world, draw = self._world, self._world.draw
        harness, num_detaches = world.harness, world.num_detaches[name]

        def report() -> None:
            if harness is world.harness and num_detaches == world.num_detaches[name]:
                harness.post(ev.BlocksLost(name, b"".join(hashes), reason))

        if hashes:
            world.at(draw.randint(0, 20) * MS, report)

    def _outage(self) -> None:
        world, name = self._world, self._world.some_tier()
        harness, draw = world.harness, world.draw
        if name in world.outages:
            return
        world.outages.add(name)

        def note(*, is_up: bool) -> None:
            if harness is world.harness:
                harness.post(ev.TierUp(name, is_up))

        def recover() -> None:
            world.outages.discard(name)
            world.at(draw.randint(0, 20) * MS, lambda: note(is_up=True))

        world.at(draw.randint(0, 50) * MS, lambda: note(is_up=False))
        world.at(draw.randint(50, 200) * MS, recover)

    def _stall(self) -> None:
        world, name = self._world, self._world.some_tier()
        world.stalls.add(name)
        world.at(world.draw.randint(50, 300) * MS, lambda: world.stalls.discard(name))

    def _fill(self) -> None:
        tier = self._world.tiers[self._world.some_tier()]
        tier.is_full = True

        def make_room() -> None:
            tier.is_full = False

        self._world.at(self._world.draw.randint(20, 300) * MS, make_room)

    def _visit(self) -> None:
        """Let another node write to the shared tiers."""
        blocks = self._world.draw.choice(self._fleet.workloads).prompt()
        for name, tier in self._world.tiers.items():
            if name.is_shared:
                tier.write(blocks, _FAR_NS)

    # Engines, the node and its operator

    def _scribble(self) -> None:
        """Damage a block in the arena, except one that is leased to be copied out now.

        A write there between another engine's check and its copy cannot be detected.
        """
        harness, draw = self._world.harness, self._world.draw
        index, sessions = harness.node.cache.index, harness.node.sessions.values()
        leased = {row for s in sessions for lease in s.loads.values() for row in lease.rows}
        ready = set(index.in_state(TierName.CPU, Residency.READY).tolist()) - leased
        if ready:
            offset = int(index.slot[draw.choice(sorted(ready))])
            harness.arena[offset + draw.randrange(3000)] ^= 0x10

    def _die(self) -> None:
        self._fleet.kill(self._world.draw.choice(self._fleet.workloads))

    def _drop(self) -> None:
        world, draw = self._world, self._world.draw
        tiers = tuple(draw.sample(list(TierName), draw.randint(1, 4)))
        deadline_ns = world.clock() + draw.randint(260, 900) * MS
        spaces = [workload.engine.key_space for workload in self._fleet.workloads]
        selection = draw.choice(
            (
                EVERYTHING,
                Selection(tenant=draw.choice(TENANTS)),
                Selection(key_space=draw.choice(spaces)),
                Selection(draw.choice(spaces), draw.choice(TENANTS)),
            )
        )
        world.harness.call(lambda call: ev.Drop(call, tiers, deadline_ns, selection))

    def _detach(self) -> None:
        self._operator.act()

    def _pin(self) -> None:
        """Pin a chain for a while, or unpin it."""
        world, draw = self._world, self._world.draw
        ttl_ns = draw.choice((0, 50, 5000, 10**7)) * MS
        key_space, tenant, hashes = self._some_chain()
        world.harness.call(lambda call: ev.PinBlocks(call, key_space, tenant, hashes, ttl_ns))

    def _warm(self) -> None:
        world = self._world
        deadline_ns = world.clock() + world.draw.randint(1, 900) * MS
        key_space, tenant, hashes = self._some_chain()
        world.harness.call(lambda call: ev.Warm(call, key_space, tenant, hashes, deadline_ns))

    def _some_chain(self) -> tuple[bytes, bytes, bytes]:
        blocks = self._world.draw.choice(self._fleet.workloads).prompt()
        header = blocks[0].header
        return header.key_space, header.tenant, b"".join(b.header.block_hash for b in blocks)

    def _suspend(self) -> None:
        """Let time pass without events, and excuse late answers."""
        self._world.harness.excuse()
        self._world.clock.now_ns += self._world.draw.choice((100, 1000, 60_000)) * MS


_FAR_NS = 1 << 62

_ROWS_AT_ONCE = 8
"""Rows per event: small, so that other events fall in between."""

_Task = Generator[int, None, None]
"""Yields how long to wait before it is resumed."""


class Operator:
    """Drains, detaches and attaches tiers at any moment, one or two at a time.

    While a tier is detached, another daemon may use and change its device. Work in flight for a
    detached tier still completes, or never does; it no longer changes the device, except that a
    server may still receive what was sent.
    """

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet
        self._busy: set[tuple[NodeHarness, TierName]] = set()
        """Tiers being detached or attached, which happens one at a time per tier."""

    def act(self) -> None:
        """Change the state of a tier."""
        world, draw = self._world, self._world.draw
        harness, name = world.harness, world.some_tier()
        lane = harness.node.transfers.lanes[name]
        if (harness, name) in self._busy:
            return
        choice = draw.choice(("state", "leave", "leave"))
        if choice == "state":
            is_active = lane.admin_state is AdminState.ACTIVE
            state = AdminState.READ_ONLY if is_active else AdminState.ACTIVE
            harness.post(ev.SetAdminState(name, state))
            return
        self._busy.add((harness, name))
        self._resume(harness, self._detach_and_attach(harness, name))

    def _resume(self, harness: NodeHarness, task: _Task) -> None:
        """Run the next step of a task, unless its node has died."""
        if harness is not self._world.harness:
            task.close()
        elif (delay_ns := next(task, None)) is not None:
            self._world.at(delay_ns, lambda: self._resume(harness, task))

    def _detach_and_attach(self, harness: NodeHarness, name: TierName) -> _Task:
        draw = self._world.draw
        yield from self._detach_tier(harness, name)
        yield draw.randint(0, 100) * MS
        if not name.is_shared:
            self._change_device(name)
        yield draw.randint(0, 100) * MS
        yield from self._attach(harness, name)
        self._busy.discard((harness, name))

    def _detach_tier(self, harness: NodeHarness, name: TierName) -> _Task:
        """Detach a tier once it is idle, or sooner; then forget all its blocks."""
        draw, lane = self._world.draw, harness.node.transfers.lanes[name]
        if draw.random() < 0.7:
            harness.post(ev.SetAdminState(name, AdminState.DETACHING))
            for _ in range(draw.choice((0, 5, 50))):
                if lane.is_idle and lane.purging is None:
                    break
                yield 10 * MS
        self._world.note_detached(name)
        harness.post(ev.SetAdminState(name, AdminState.DETACHED))
        index, first = harness.node.cache.index, 0
        while first < index.extent:
            yield draw.choice((0, 0, 0, 1)) * MS
            harness.post(ev.ForgetRows(name, first, first + _ROWS_AT_ONCE))
            first += _ROWS_AT_ONCE
        assert not len(index.held(index.rows(), name)), "a detached tier still has blocks"

    def _change_device(self, name: TierName) -> None:
        """Let another daemon use the device: it drops blocks and stores its own."""
        device, draw = self._world.tiers[name], self._world.draw
        if draw.random() < 0.3:
            device.purge(EVERYTHING, _FAR_NS)
        for _ in range(draw.randint(0, 3)):
            device.write(draw.choice(self._fleet.workloads).prompt(), _FAR_NS)
            device.lose()

    def _attach(self, harness: NodeHarness, name: TierName) -> _Task:
        """Tell the node what a tier holds, a few blocks at a time, and attach it."""
        draw, lane = self._world.draw, harness.node.transfers.lanes[name]
        workers = draw.choice((1, 2, lane.tier.num_workers))
        harness.post(ev.ConfigureTier(replace(lane.tier, num_workers=workers)))
        if not name.is_shared:  # a shared tier lists no blocks
            for headers in self._world.tiers[name].headers():
                for first in range(0, len(headers), _ROWS_AT_ONCE):
                    yield draw.choice((0, 0, 0, 1)) * MS
                    harness.post(ev.BlocksRecovered(name, headers[first : first + _ROWS_AT_ONCE]))
        yield draw.randint(0, 5) * MS
        harness.post(ev.SetAdminState(name, AdminState.ACTIVE))
