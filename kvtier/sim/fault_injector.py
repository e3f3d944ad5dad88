"""What goes wrong in a run besides single calls: to media, engines, the node and the clock."""

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
    """Strikes every now and then, as the weather says."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet
        self._operator = Operator(world, fleet)

    def inject(self) -> None:
        """Let things go wrong, each with its chance, and come again."""
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

    # Media

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
        harness, num_leaves, index = (
            world.harness,
            world.num_leaves[name],
            world.harness.node.cache.index,
        )

        def is_same() -> bool:
            return harness is world.harness and num_leaves == world.num_leaves[name]

        def ask() -> None:
            rows = index.in_state(name, Residency.UNVERIFIED)
            hashes = [index.hash_of(row) for row in rows.tolist()]
            present: list[bool | None] = [*world.tiers[name].contains(hashes, _FAR_NS)]
            if hashes and draw.random() < 0.2:
                present[0] = None
            event = ev.BlocksVerified(name, b"".join(hashes), tuple(present))
            world.at(draw.randint(0, 20) * MS, lambda: harness.post(event) if is_same() else None)

        harness.post(ev.MarkUnverified(name, 0, index.extent))
        world.at(draw.randint(0, 200) * MS, lambda: ask() if is_same() else None)

    def _scrub(self) -> None:
        name = self._world.some_tier()
        self._tell_lost(name, self._world.tiers[name].scrub(1 << 20, _FAR_NS).damaged, "corrupt")

    def _expire(self) -> None:
        name = self._world.some_tier()
        self._tell_lost(name, self._world.tiers[name].expire(), "expired")

    def _tell_lost(self, name: TierName, hashes: Sequence[BlockHash], reason: str) -> None:
        world, draw = self._world, self._world.draw
        harness, num_leaves = world.harness, world.num_leaves[name]

        def tell() -> None:
            if harness is world.harness and num_leaves == world.num_leaves[name]:
                harness.post(ev.BlocksLost(name, b"".join(hashes), reason))

        if hashes:
            world.at(draw.randint(0, 20) * MS, tell)

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
        """Damage a block in the arena, though none that is leased to be copied out just now.

        An engine that writes there between another one's check and its copy is noticed by nobody.
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
        """Have a chain kept for a while, or no longer."""
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
        """Let time pass in which nothing happens, and nobody can be blamed for being late."""
        self._world.harness.excuse()
        self._world.clock.now_ns += self._world.draw.choice((100, 1000, 60_000)) * MS


_FAR_NS = 1 << 62

_ROWS_AT_ONCE = 8

_Task = Generator[int, None, None]
"""Yields how long to wait before it is resumed."""


class Operator:
    """Changes one tier at a time, or two at once, as they come."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet
        self._busy: set[tuple[NodeHarness, TierName]] = set()
        """Tiers that are just leaving or coming, which one does once at a time."""

    def act(self) -> None:
        """Change what a tier is used for."""
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
        self._resume(harness, self._leave_and_come(harness, name))

    def _resume(self, harness: NodeHarness, task: _Task) -> None:
        """Take a task's next step, unless its node has died."""
        if harness is not self._world.harness:
            task.close()
        elif (delay_ns := next(task, None)) is not None:
            self._world.at(delay_ns, lambda: self._resume(harness, task))

    def _leave_and_come(self, harness: NodeHarness, name: TierName) -> _Task:
        draw = self._world.draw
        yield from self._leave(harness, name)
        yield draw.randint(0, 100) * MS
        if not name.is_shared:
            self._use_otherwise(name)
        yield draw.randint(0, 100) * MS
        yield from self._come(harness, name)
        self._busy.discard((harness, name))

    def _leave(self, harness: NodeHarness, name: TierName) -> _Task:
        """Take a tier off once it is at rest, or sooner; then have all of it forgotten."""
        draw, lane = self._world.draw, harness.node.transfers.lanes[name]
        if draw.random() < 0.7:
            harness.post(ev.SetAdminState(name, AdminState.DETACHING))
            for _ in range(draw.choice((0, 5, 50))):
                if lane.is_idle and lane.purging is None:
                    break
                yield 10 * MS
        self._world.left(name)
        harness.post(ev.SetAdminState(name, AdminState.DETACHED))
        index, first = harness.node.cache.index, 0
        while first < index.extent:
            yield draw.choice((0, 0, 0, 1)) * MS
            harness.post(ev.ForgetRows(name, first, first + _ROWS_AT_ONCE))
            first += _ROWS_AT_ONCE
        assert not len(index.held(index.rows(), name)), "a detached tier still has blocks"

    def _use_otherwise(self, name: TierName) -> None:
        """Let another daemon have the medium: it drops blocks, and stores its own."""
        medium, draw = self._world.tiers[name], self._world.draw
        if draw.random() < 0.3:
            medium.purge(EVERYTHING, _FAR_NS)
        for _ in range(draw.randint(0, 3)):
            medium.write(draw.choice(self._fleet.workloads).prompt(), _FAR_NS)
            medium.lose()

    def _come(self, harness: NodeHarness, name: TierName) -> _Task:
        """Tell the node what a tier holds, a little at a time, and have it used."""
        draw, lane = self._world.draw, harness.node.transfers.lanes[name]
        workers = draw.choice((1, 2, lane.tier.num_workers))
        harness.post(ev.ConfigureTier(replace(lane.tier, num_workers=workers)))
        if not name.is_shared:  # what a shared one holds only it knows
            for headers in self._world.tiers[name].headers():
                for first in range(0, len(headers), _ROWS_AT_ONCE):
                    yield draw.choice((0, 0, 0, 1)) * MS
                    harness.post(ev.BlocksRecovered(name, headers[first : first + _ROWS_AT_ONCE]))
        yield draw.randint(0, 5) * MS
        harness.post(ev.SetAdminState(name, AdminState.ACTIVE))
