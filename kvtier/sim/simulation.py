"""One run: a real node, several engines, two tiers, an operator, and one seed that decides all.

Theory
------
Everything that happens is an entry of one heap, ordered by simulated time; the node is the code
that runs in production, and sees nothing but events and the time. Work for a tier takes effect at
one moment and is told at a later one, so that completions overtake each other, and a crash may fall
between the two. Nothing depends on hash order, threads or the real clock: a seed repeats exactly.

What must hold is checked as it happens: the node's invariants after every event, one answer a call
and none too late, and above all that every block an engine accepts is the one it asked for, byte
for byte. When all engines are gone, the node must be idle.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvtier.core.identity import unpack_headers
from kvtier.core.residency import Residency, TierName
from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.sim.customer import MS, Customer, Job, Tally
from kvtier.sim.weather import CALM, draw_weather
from kvtier.testing.block import payload_of
from kvtier.testing.clock import FakeClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.stage import Stage, StageSettings, Work
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.memory import MemoryTier

__all__ = ["Report", "Simulation"]

_FAR_NS = 1 << 62
_SETTINGS = StageSettings(num_slabs=5, slab_bytes=40_960)
_JOBS_PER_ENGINE = 2
_DRAIN_NS = 20_000 * MS


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did."""

    seed: int
    num_events: int
    simulated_s: float
    num_crashes: int
    tally: Tally


class Simulation:
    """See the module. Use ``run`` once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._draw = draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
        self._weather = draw_weather(draw)
        self._clock = FakeClock()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._tally = Tally()
        self._tiers = {
            TierName.SSD: MemoryTier(150_000),
            TierName.REMOTE: MemoryTier(300_000, name=TierName.REMOTE),
        }
        self._outages: set[TierName] = set()
        self._num_boots = 0
        self._num_events = 0
        self._armed_ns = 0
        self._is_open = True
        self._num_cleared = 0
        self._stage = self._boot()
        engines = [
            FakeEngine("a", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("b", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("c", key_space=b"key space no. 2.", payload_bytes=9000),
        ]
        self._customers = [Customer(e, draw, self._weather, self._tally) for e in engines]
        self._lives = dict.fromkeys((e.name for e in engines), 0)

    def run(self, num_events: int) -> Report:
        """Go on for ``num_events`` events of the node, then let everything come to rest."""
        for customer in self._customers:
            self._at(0, partial(self._begin, customer))
        self._at(20 * MS, self._misfortune)
        while self._num_events + self._stage.num_events < num_events:
            self._step()
        self._end()
        num_events = self._num_events + self._stage.num_events
        seconds = self._clock() / 1e9
        return Report(self.seed, num_events, seconds, self._num_boots - 1, self._tally)

    # The agenda

    def _at(self, delay_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._clock() + delay_ns, next(self._order), action))

    def _step(self) -> None:
        at_ns, _, action = heapq.heappop(self._agenda)
        self._clock.now_ns = at_ns
        action()
        for work in self._stage.waiting:
            self._undertake(work)
        self._stage.waiting.clear()
        due_ns = self._stage.node.next_deadline_ns()
        if due_ns is not None and due_ns != self._armed_ns:
            self._armed_ns = due_ns
            self._at(due_ns - at_ns, lambda: self._tick(due_ns))

    def _tick(self, due_ns: int) -> None:
        if self._armed_ns == due_ns:
            self._armed_ns = 0
            self._stage.post(ev.Tick())

    def _end(self) -> None:
        """Let all engines die and all work end; then the node must be idle."""
        can_be_scribbled = self._weather.scribble > 0
        self._is_open = False
        self._weather = CALM
        for customer in self._customers:
            if not self._is_lost(customer.engine):
                customer.engine.die()
        until_ns = self._clock() + _DRAIN_NS
        while self._agenda and self._agenda[0][0] <= until_ns:
            self._step()
        self._stage.check_idle()
        self._check_drops()
        if not can_be_scribbled:
            self._check_arena()

    def _check_drops(self) -> None:
        """Require that no block was said to be dropped from a slow tier that was not."""
        answers = [a for a in self._stage.answers.values() if isinstance(a, tuple)]
        num_dropped = sum(d.num_blocks for drops in answers for d in drops if d.tier in self._tiers)
        assert num_dropped <= self._num_cleared, "a block was dropped twice"
        self._num_cleared = 0

    def _check_arena(self) -> None:
        """Require that every block that could be served is right, asked for or not."""
        cache = self._stage.node.cache
        for row in cache.index.in_state(TierName.CPU, Residency.READY).tolist():
            header = cache.header(row)
            payload = self._stage.view(int(cache.index.slot[row]), header.payload_bytes)
            assert payload == payload_of(header), f"a wrong block in the arena: {header}"
            assert header.matches(payload), f"a wrong checksum: {header}"

    # Engines

    def _begin(self, customer: Customer) -> None:
        """Start an engine's next life."""
        if not self._is_open:
            return
        engine = customer.engine
        engine.attach(self._stage)
        self._lives[engine.name] += 1
        for _ in range(_JOBS_PER_ENGINE):
            self._resume(customer, customer.work(), self._lives[engine.name])

    def _resume(self, customer: Customer, job: Job, life: int) -> None:
        if life != self._lives[customer.engine.name] or not self._is_open:
            job.close()
            return
        delay_ns = next(job, None)
        if delay_ns is None:  # the daemon is gone: attach again
            self._lives[customer.engine.name] += 1
            self._at(self._draw.randint(1, 50) * MS, lambda: self._begin(customer))
            return
        self._at(delay_ns, lambda: self._resume(customer, job, life))

    def _is_lost(self, engine: FakeEngine) -> bool:
        return not engine.session or engine.stage is not self._stage

    # Tiers

    def _undertake(self, work: Work) -> None:
        """Decide when a piece of work takes effect, when it is told, and how it fails."""
        stage, draw, weather = self._stage, self._draw, self._weather
        if isinstance(work, ac.Order):
            self._at(draw.randint(1, 400) * MS, lambda: self._obey(work))
            return
        latency_ns = draw.randint(1, 20_000) * 1_000
        if draw.random() < weather.hang:
            latency_ns = draw.randint(100, 400) * MS
        fails = draw.random() < weather.fail_before or work.tier in self._outages
        told_as_failed = draw.random() < weather.fail_after
        ended: list[ev.Event] = []

        def take_effect() -> None:
            if stage is self._stage:
                ended.append(stage.fault(work) if fails else stage.completion(work))
            elif isinstance(work, ac.Write):
                self._tear(stage, work)

        def tell() -> None:
            if stage is self._stage:
                event = stage.fault(work) if told_as_failed else ended[0]
                if isinstance(event, ev.PurgeDone):
                    self._num_cleared += event.removed.num_blocks
                stage.post(event)

        self._at(draw.randint(0, latency_ns), take_effect)
        self._at(latency_ns, tell)

    def _tear(self, stage: Stage, work: ac.Write) -> None:
        """Let a write that a crash cut short leave something behind: all of it, none, or a part."""
        match self._draw.randrange(3):
            case 0:
                stage.completion(work)
            case 1:
                header = work.blocks[0].header
                torn = payload_of(header)[: header.payload_bytes // 2].ljust(
                    header.payload_bytes, b"\0"
                )
                self._tiers[work.tier].write([BlockWrite(header, memoryview(torn))], _FAR_NS)

    def _obey(self, order: ac.Order) -> None:
        for customer in self._customers:
            engine = customer.engine
            if engine.session == order.session and not self._is_lost(engine):
                engine.report(order.order, 3)

    # What goes wrong

    def _misfortune(self) -> None:
        """Let things go wrong, each with its chance, every now and then."""
        if not self._is_open:
            return
        weather = self._weather
        for chance, act in (
            (weather.rot, self._rot),
            (weather.lose, self._lose),
            (weather.outage, self._outage),
            (weather.scribble, self._scribble),
            (weather.die, self._die),
            (weather.drop, self._drop),
            (weather.crash, self._crash),
            (0.1, self._visit),
        ):
            if self._draw.random() < chance:
                act()
        self._at(self._draw.randint(5, 30) * MS, self._misfortune)

    def _rot(self) -> None:
        tier = self._tiers[self._some_tier()]
        headers = unpack_headers(tier.headers())
        if headers:
            header = self._draw.choice(headers)
            payload = bytearray(payload_of(header))
            payload[self._draw.randrange(len(payload))] ^= 1 << self._draw.randrange(8)
            tier.remove([header.block_hash], _FAR_NS)
            tier.write([BlockWrite(header, memoryview(payload))], _FAR_NS)

    def _lose(self) -> None:
        tier = self._tiers[self._some_tier()]
        headers = unpack_headers(tier.headers())
        lost = self._draw.sample(headers, min(len(headers), 3))
        tier.remove([header.block_hash for header in lost], _FAR_NS)

    def _outage(self) -> None:
        name, stage = self._some_tier(), self._stage
        if name in self._outages:
            return
        self._outages.add(name)

        def note(*, is_up: bool) -> None:
            if stage is self._stage:
                stage.post(ev.TierUp(name, is_up))

        def recover() -> None:
            self._outages.discard(name)
            self._at(self._draw.randint(0, 20) * MS, lambda: note(is_up=True))

        self._at(self._draw.randint(0, 50) * MS, lambda: note(is_up=False))
        self._at(self._draw.randint(50, 200) * MS, recover)

    def _scribble(self) -> None:
        """Damage a block in the arena, though none that is leased to be copied out just now.

        An engine that writes there between another one's check and its copy is noticed by nobody.
        """
        index, sessions = self._stage.node.cache.index, self._stage.node.sessions.values()
        leased = {row for s in sessions for lease in s.loads.values() for row in lease.rows}
        ready = set(index.in_state(TierName.CPU, Residency.READY).tolist()) - leased
        if ready:
            offset = int(index.slot[self._draw.choice(sorted(ready))])
            self._stage.arena[offset + self._draw.randrange(3000)] ^= 0x10

    def _die(self) -> None:
        customer = self._draw.choice(self._customers)
        engine = customer.engine
        if not self._is_lost(engine):
            self._lives[engine.name] += 1
            engine.die()
            self._at(self._draw.randint(1, 100) * MS, lambda: self._begin(customer))

    def _drop(self) -> None:
        tiers = tuple(self._draw.sample(list(TierName), self._draw.randint(1, 4)))
        deadline_ns = self._clock() + self._draw.randint(260, 900) * MS
        self._stage.call(lambda call: ev.Drop(call, tiers, deadline_ns))

    def _visit(self) -> None:
        """Let another node write to the remote tier."""
        blocks = self._draw.choice(self._customers).prompt()
        self._tiers[TierName.REMOTE].write(blocks, _FAR_NS)

    def _crash(self) -> None:
        self._num_events += self._stage.num_events
        self._check_drops()
        self._stage.is_down = True
        self._stage = self._boot()

    def _boot(self) -> Stage:
        self._num_boots += 1
        self._armed_ns = 0
        boot = f"{self.seed}.{self._num_boots}"
        stage = Stage(self._tiers, _SETTINGS, clock=self._clock, boot=boot)
        persistent = {TierName.SSD: self._tiers[TierName.SSD]}
        stage.recover(persistent)
        return stage

    def _some_tier(self) -> TierName:
        return self._draw.choice(list(self._tiers))
