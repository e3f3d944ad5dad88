"""The engines of a run: each lives, serves prompts, dies or loses its daemon, and comes again."""

from functools import partial

from kvtier.node import action as ac
from kvtier.sim.customer import Customer, Job, WorkloadTally
from kvtier.sim.world import MS, World
from kvtier.testing.fake_engine import FakeEngine

__all__ = ["Fleet"]

_JOBS_PER_ENGINE = 2


class Fleet:
    """Engines of three block sizes, two of them alike; the largest fills most of a slab."""

    def __init__(self, world: World, tally: WorkloadTally) -> None:
        self._world = world
        engines = [
            FakeEngine("a", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("b", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("c", key_space=b"key space no. 2.", payload_bytes=9000),
            FakeEngine("d", key_space=b"key space no. 3.", payload_bytes=30_000),
        ]
        engines = engines[: world.draw.choice((3, 3, 4))]
        for engine in engines:
            engine.can_split = world.draw.random() < 0.5
        self.customers = [Customer(engine, world, tally) for engine in engines]
        self._lives = dict.fromkeys((engine.name for engine in engines), 0)

    def start(self) -> None:
        """Let every engine begin its first life."""
        for customer in self.customers:
            self._world.at(0, partial(self._begin, customer))

    def kill(self, customer: Customer) -> None:
        """Let an engine die in the middle of whatever it does; a new one comes soon."""
        engine = customer.engine
        if not self._is_lost(engine):
            self._lives[engine.name] += 1
            engine.die()
            self._world.at(self._world.draw.randint(1, 100) * MS, lambda: self._begin(customer))

    def end(self) -> None:
        """Let all engines die for good."""
        for customer in self.customers:
            if not self._is_lost(customer.engine):
                customer.engine.die()

    def obey(self, order: ac.EmptyEngineTier) -> None:
        """Have the engine that an order is for empty its own tier."""
        for customer in self.customers:
            engine = customer.engine
            if engine.session == order.session and not self._is_lost(engine):
                engine.report(order.order, 3)

    def _begin(self, customer: Customer) -> None:
        if not self._world.is_open:
            return
        engine = customer.engine
        engine.attach(self._world.stage)
        self._lives[engine.name] += 1
        for _ in range(_JOBS_PER_ENGINE):
            self._resume(customer, customer.work(), self._lives[engine.name])

    def _resume(self, customer: Customer, job: Job, life: int) -> None:
        world = self._world
        if life != self._lives[customer.engine.name] or not world.is_open:
            job.close()
            return
        delay_ns = next(job, None)
        if delay_ns is None:  # the daemon is gone: attach again
            self._lives[customer.engine.name] += 1
            world.at(world.draw.randint(1, 50) * MS, lambda: self._begin(customer))
            return
        world.at(delay_ns, lambda: self._resume(customer, job, life))

    def _is_lost(self, engine: FakeEngine) -> bool:
        return not engine.session or engine.stage is not self._world.stage
