"""What goes wrong in a run besides single calls: to media, engines, the node and the clock."""

from collections.abc import Sequence

from kvtier.core.identity import EVERYTHING, BlockHash, Selection
from kvtier.core.residency import Residency, TierName
from kvtier.node import event as ev
from kvtier.sim.fleet import Fleet
from kvtier.sim.operator import Operator
from kvtier.sim.world import MS, TENANTS, World

__all__ = ["Misfortune"]

_FAR_NS = 1 << 62


class Misfortune:
    """Strikes every now and then, as the weather says."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet
        self._operator = Operator(world, fleet)

    def strike(self) -> None:
        """Let things go wrong, each with its chance, and come again."""
        world, weather = self._world, self._world.weather
        if not world.is_open:
            return
        for chance, act in (
            (weather.rot, self._rot),
            (weather.lose, self._lose),
            (weather.outage, self._outage),
            (weather.stall, self._stall),
            (weather.full, self._fill),
            (weather.scribble, self._scribble),
            (weather.die, self._die),
            (weather.drop, self._drop),
            (weather.detach, self._detach),
            (weather.suspend, self._suspend),
            (weather.crash, world.crash),
            (0.1, self._scrub),
            (0.05, self._expire),
            (0.1, self._visit),
            (0.05, self._pin),
            (0.05, self._warm),
        ):
            if world.happens(chance, act.__name__.strip("_")):
                act()
        world.at(world.draw.randint(5, 30) * MS, self.strike)

    # Media

    def _rot(self) -> None:
        self._world.tiers[self._world.some_tier()].rot()

    def _lose(self) -> None:
        name = self._world.some_tier()
        self._world.tiers[name].lose()
        if name is TierName.REMOTE:
            self._verify(name)

    def _verify(self, name: TierName) -> None:
        """Mark all blocks of a tier as unverified, as after a restart, and then verify them."""
        world, draw = self._world, self._world.draw
        stage, num_leaves, index = world.stage, world.num_leaves[name], world.stage.node.cache.index

        def is_same() -> bool:
            return stage is world.stage and num_leaves == world.num_leaves[name]

        def ask() -> None:
            rows = index.in_state(name, Residency.UNVERIFIED)
            hashes = [index.hash_of(row) for row in rows.tolist()]
            present: list[bool | None] = [*world.tiers[name].contains(hashes, _FAR_NS)]
            if hashes and draw.random() < 0.2:
                present[0] = None
            event = ev.Verified(name, b"".join(hashes), tuple(present))
            world.at(draw.randint(0, 20) * MS, lambda: stage.post(event) if is_same() else None)

        stage.post(ev.MarkUnverified(name, 0, index.extent))
        world.at(draw.randint(0, 200) * MS, lambda: ask() if is_same() else None)

    def _scrub(self) -> None:
        name = self._world.some_tier()
        self._tell_lost(name, self._world.tiers[name].scrub(1 << 20, _FAR_NS).damaged, "corrupt")

    def _expire(self) -> None:
        name = self._world.some_tier()
        self._tell_lost(name, self._world.tiers[name].expire(), "expired")

    def _tell_lost(self, name: TierName, hashes: Sequence[BlockHash], reason: str) -> None:
        world, draw = self._world, self._world.draw
        stage, num_leaves = world.stage, world.num_leaves[name]

        def tell() -> None:
            if stage is world.stage and num_leaves == world.num_leaves[name]:
                stage.post(ev.Lost(name, b"".join(hashes), reason))

        if hashes:
            world.at(draw.randint(0, 20) * MS, tell)

    def _outage(self) -> None:
        world, name = self._world, self._world.some_tier()
        stage, draw = world.stage, world.draw
        if name in world.outages:
            return
        world.outages.add(name)

        def note(*, is_up: bool) -> None:
            if stage is world.stage:
                stage.post(ev.TierUp(name, is_up))

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
        """Let another node write to the remote tier."""
        blocks = self._world.draw.choice(self._fleet.customers).prompt()
        self._world.tiers[TierName.REMOTE].write(blocks, _FAR_NS)

    # Engines, the node and its operator

    def _scribble(self) -> None:
        """Damage a block in the arena, though none that is leased to be copied out just now.

        An engine that writes there between another one's check and its copy is noticed by nobody.
        """
        stage, draw = self._world.stage, self._world.draw
        index, sessions = stage.node.cache.index, stage.node.sessions.values()
        leased = {row for s in sessions for lease in s.loads.values() for row in lease.rows}
        ready = set(index.in_state(TierName.CPU, Residency.READY).tolist()) - leased
        if ready:
            offset = int(index.slot[draw.choice(sorted(ready))])
            stage.arena[offset + draw.randrange(3000)] ^= 0x10

    def _die(self) -> None:
        self._fleet.kill(self._world.draw.choice(self._fleet.customers))

    def _drop(self) -> None:
        world, draw = self._world, self._world.draw
        tiers = tuple(draw.sample(list(TierName), draw.randint(1, 4)))
        deadline_ns = world.clock() + draw.randint(260, 900) * MS
        spaces = [customer.engine.key_space for customer in self._fleet.customers]
        selection = draw.choice(
            (
                EVERYTHING,
                Selection(tenant=draw.choice(TENANTS)),
                Selection(key_space=draw.choice(spaces)),
                Selection(draw.choice(spaces), draw.choice(TENANTS)),
            )
        )
        world.stage.call(lambda call: ev.Drop(call, tiers, deadline_ns, selection))

    def _detach(self) -> None:
        self._operator.act()

    def _pin(self) -> None:
        """Have a chain kept for a while, or no longer."""
        world, draw = self._world, self._world.draw
        ttl_ns = draw.choice((0, 50, 5000, 10**7)) * MS
        key_space, tenant, hashes = self._some_chain()
        world.stage.call(lambda call: ev.PinBlocks(call, key_space, tenant, hashes, ttl_ns))

    def _warm(self) -> None:
        world = self._world
        deadline_ns = world.clock() + world.draw.randint(1, 900) * MS
        key_space, tenant, hashes = self._some_chain()
        world.stage.call(lambda call: ev.Warm(call, key_space, tenant, hashes, deadline_ns))

    def _some_chain(self) -> tuple[bytes, bytes, bytes]:
        blocks = self._world.draw.choice(self._fleet.customers).prompt()
        header = blocks[0].header
        return header.key_space, header.tenant, b"".join(b.header.block_hash for b in blocks)

    def _suspend(self) -> None:
        """Let time pass in which nothing happens, and nobody can be blamed for being late."""
        self._world.stage.excuse()
        self._world.clock.now_ns += self._world.draw.choice((100, 1000, 60_000)) * MS
