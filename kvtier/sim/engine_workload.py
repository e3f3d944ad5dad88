"""Simulated engines that announce, look up, load, store and report, and die and reconnect.

Sometimes they omit a step, do not follow their plan, or report nonsense. Each job is a generator
that yields how long to wait, in nanoseconds, so that any number of jobs interleave in any order
under one seed.
"""

import math
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvtier.core.plan import EngineLoad, PlanOutcome, RestorePlan, StepSample
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.errors import DaemonUnavailable
from kvtier.node.messages import actions as ac
from kvtier.sim.world import MS, TENANTS, World
from kvtier.testing.fake_engine import Blocks, FakeEngine, FakeLoad

__all__ = ["EngineWorkload", "Fleet", "Job", "WorkloadCounters"]


Job = Generator[int, None, None]
"""Yields how long to wait before it is resumed."""

_DOCUMENTS = 2
_PROMPT_BLOCKS_MAX = 14

_RECENT_PROMPTS = 4
"""Recent prompts that may be continued: their blocks are most likely still cached."""


@dataclass(slots=True)
class WorkloadCounters:
    """Counts what a run did, to show that it made progress."""

    served: dict[str, int] = field(default_factory=dict)
    """Accepted blocks by tier."""
    ends: dict[str, int] = field(default_factory=dict)
    """Loads by why they ended."""
    plans: dict[str, int] = field(default_factory=dict)
    """Plans by reason."""

    def count(self, load: FakeLoad) -> None:
        """Add one load."""
        for tier in load.accepted:
            self.served[tier] = self.served.get(tier, 0) + 1
        end = load.end or "given_up"
        self.ends[end] = self.ends.get(end, 0) + 1

    def count_plan(self, plan: RestorePlan) -> None:
        """Add one plan."""
        self.plans[plan.reason] = self.plans.get(plan.reason, 0) + 1


class EngineWorkload:
    """The workload of one engine."""

    def __init__(self, engine: FakeEngine, world: World, counters: WorkloadCounters) -> None:
        self.engine = engine
        self._draw = world.draw
        self._weather = world.fault_profile
        self._counters = counters
        self._num_requests = 0
        self._recent: deque[tuple[list[int], bytes]] = deque(maxlen=_RECENT_PROMPTS)
        """Recent prompts as numbers of their blocks, and their tenants."""
        self._token_s = world.draw.choice((1e-6, 1e-4, 1e-4, 1e-3))
        """Simulated time to compute a token."""
        self._restored_lag = world.draw.choice((1.0, 1.0, 30.0))
        """Factor by which first tokens are late if blocks were restored."""
        self._over: list[str] = []
        """Finished requests that were not reported to the node yet."""

    def prompt(self) -> Blocks:
        """Return a chain that shares a prefix: the next turn of another, or part of a document."""
        draw = self._draw
        if self._recent and self._happens(0.6):
            numbers, tenant = draw.choice(self._recent)
            numbers = [*numbers, *(draw.randrange(100_000, 100_020) for _ in range(2))]
            return self._begin(numbers[:_PROMPT_BLOCKS_MAX], tenant)
        document = draw.randrange(_DOCUMENTS)
        shared = draw.randint(1, _PROMPT_BLOCKS_MAX)
        own = draw.choice((0, 0, 1, 3))
        numbers = [1000 * document + place for place in range(shared)]
        numbers += [draw.randrange(100_000, 100_020) for _ in range(own)]
        return self._begin(numbers, draw.choice((*TENANTS, TENANTS[0])))

    def _begin(self, numbers: list[int], tenant: bytes) -> Blocks:
        self._recent.append((numbers, tenant))
        return self.engine.chain(numbers, tenant)

    def work(self) -> Job:
        """Serve one prompt after another until the daemon is gone."""
        while True:
            yield self._draw.randint(1, 30) * MS
            try:
                yield from self._serve(self.prompt())
            except DaemonUnavailable:
                return

    def _serve(self, blocks: Blocks) -> Job:
        draw, traits = self._draw, self._traits(blocks)
        if self._happens(0.3):
            first = draw.choice((0, 0, 0, len(blocks)))
            self.engine.announce(blocks, traits, first, over=self._over)
            self._over.clear()
            yield draw.randint(0, 60) * MS
            if first or self._happens(0.1):
                return  # all in the engine's own tier, or cancelled before its turn
        within_ns = draw.randint(10, 200) * MS
        load = EngineLoad(draw.choice((0, 0, 500, 10**6)), draw.randint(0, 8))
        call = self.engine.lookup(blocks, within_ns=within_ns, traits=traits, load=load)
        while call not in self.engine.harness.answers:
            yield from self._wait()
        found = self.engine.answer(call)
        assert isinstance(found, ac.LookupResult), found
        assert found.plan is not None
        self._counters.count_plan(found.plan)
        num_loaded, tiers = yield from self._load(blocks, found, found.plan)
        yield draw.randint(0, 10) * MS
        yield from self._store(blocks, num_loaded, traits)
        if self._happens(0.5):
            self._report(found.plan, tiers)

    def _load(
        self, blocks: Blocks, found: ac.LookupResult, plan: RestorePlan
    ) -> Generator[int, None, tuple[int, list[TierName]]]:
        """Restore blocks, as planned or not. Returns the number of leading blocks and their tiers.

        Blocks loaded from the back are useful only with what is computed before them.
        """
        draw = self._draw
        num_wanted = len(blocks) if self._happens(0.3) else plan.num_blocks
        if not found.num_blocks:
            num_wanted = 0
        if not num_wanted:
            return 0, []
        first = draw.choice((0, 0, 0, num_wanted // 2))
        from_back = plan.is_split or self._happens(0.2)
        load = self.engine.load(
            blocks[:num_wanted],
            first,
            within_ns=draw.randint(5, 300) * MS,
            decision=draw.choice((plan.decision, plan.decision, 0, 1)),
            from_back=from_back,
        )
        yield from self._take(load)
        self._counters.count(load)
        num_loaded = first + len(load.accepted)
        if from_back and num_loaded < num_wanted:
            num_loaded = first
        return num_loaded, load.accepted

    def _take(self, load: FakeLoad) -> Job:
        while not load.end:
            for _ in load.steps():
                yield from self._pause()
            if self._happens(self._weather.forget / 4):
                break
            if not load.end:
                yield from self._wait()
        if not self._happens(self._weather.forget):
            load.release()

    def _store(self, blocks: Blocks, first: int, traits: RequestTraits) -> Job:
        num_prompt_blocks = self._draw.choice((-1, self._draw.randint(0, len(blocks))))
        granted = self.engine.prepare(
            blocks, first, traits=traits, num_prompt_blocks=num_prompt_blocks
        )
        if traits.request_id:
            self._over.append(traits.request_id)
        if not granted.lease:
            return
        checksums: list[bytes] = []
        for checksum in self.engine.copy(granted, blocks):
            checksums += [checksum] if checksum else []
            yield from self._pause()
            if self._happens(self._weather.forget / 8):
                break
        if not self._happens(self._weather.forget / 4):
            self.engine.complete(granted, checksums)

    # Traits and reports

    def _traits(self, blocks: Blocks) -> RequestTraits:
        """Return the traits of a request: none, or some of each."""
        draw = self._draw
        if self._happens(0.3):
            return NO_TRAITS
        self._num_requests += 1
        limits = (*[None] * 20, 0, draw.randint(1, 64 * len(blocks)))
        return RequestTraits(
            request_id=f"{self.engine.name}.{self._num_requests}",
            num_tokens=64 * len(blocks) + draw.randrange(64),
            kind=draw.choice(("", "chat", "agent")),
            continues=draw.choice((None, 0.0, 0.5, 1.0)),
            gap_s=draw.choice((None, 1.0, 600.0)),
            priority=draw.choice((0, 0, 0, 1, 3)),
            ttl_s=draw.choice((None, None, 0.1, 60.0)),
            max_offload_tokens=draw.choice(limits),
            max_load_tokens=draw.choice(limits),
        )

    def _report(self, plan: RestorePlan, tiers: list[TierName]) -> None:
        """Report step times and the outcome of a plan, truthfully or not."""
        draw = self._draw
        num_tokens = draw.randint(1, 512)
        seconds = num_tokens * self._token_s * draw.choice((0.9, 1.0, 1.1, 5.0))
        restored = tuple(Counter(tiers).items())
        steps = [StepSample(num_tokens, 0, num_tokens**2 / 2, 0, seconds)]
        ttft_s = (seconds + 0.01) * (self._restored_lag if tiers else 1.0)
        outcomes = [PlanOutcome(plan.decision, restored, 0.01, num_tokens, seconds, 0.0, ttft_s)]
        if self._happens(self._weather.lie):
            wrong = draw.choice((math.nan, math.inf, -1.0, 0.0, 1e-300, 1e12))
            steps.append(StepSample(num_tokens, 0, draw.choice((wrong, 1.0)), 0, wrong))
            number = draw.choice((plan.decision, plan.decision + 1, -1, 10**12))
            restored = ((SLOW_TIERS[0], draw.choice((-1, 10**9))),)
            outcomes.insert(
                draw.randrange(2), PlanOutcome(number, restored, wrong, -1, wrong, wrong, wrong)
            )
        self.engine.measured(steps, outcomes)

    def _pause(self) -> Iterator[int]:
        if self._happens(self._weather.dawdle):
            yield self._draw.randint(20, 800) * MS
        elif self._happens(0.3):
            yield self._draw.randint(0, 3) * MS

    def _wait(self) -> Iterator[int]:
        """Wait for the node. Raises DaemonUnavailable if it is gone."""
        yield MS
        if self.engine.harness.is_down:
            raise DaemonUnavailable("the connection broke")

    def _happens(self, chance: float) -> bool:
        return self._draw.random() < chance


_JOBS_PER_ENGINE = 2


class Fleet:
    """Engines of three block sizes, two of them alike; the largest block fills most of a slab."""

    def __init__(self, world: World, counters: WorkloadCounters) -> None:
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
        self.workloads = [EngineWorkload(engine, world, counters) for engine in engines]
        self._lives = dict.fromkeys((engine.name for engine in engines), 0)

    def start(self) -> None:
        """Start every engine."""
        for workload in self.workloads:
            self._world.at(0, partial(self._begin, workload))

    def kill(self, workload: EngineWorkload) -> None:
        """Kill an engine at any point; a new one starts soon."""
        engine = workload.engine
        if not self._is_lost(engine):
            self._lives[engine.name] += 1
            engine.die()
            self._world.at(self._world.draw.randint(1, 100) * MS, lambda: self._begin(workload))

    def end(self) -> None:
        """Kill all engines for good."""
        for workload in self.workloads:
            if not self._is_lost(workload.engine):
                workload.engine.die()

    def empty_tier(self, order: ac.EmptyEngineTier) -> None:
        """Let the engine that an order addresses empty its own tier."""
        for workload in self.workloads:
            engine = workload.engine
            if engine.session == order.session and not self._is_lost(engine):
                engine.report(order.order, 3)

    def _begin(self, workload: EngineWorkload) -> None:
        if not self._world.is_open:
            return
        engine = workload.engine
        engine.attach(self._world.harness)
        self._lives[engine.name] += 1
        for _ in range(_JOBS_PER_ENGINE):
            self._resume(workload, workload.work(), self._lives[engine.name])

    def _resume(self, workload: EngineWorkload, job: Job, life: int) -> None:
        world = self._world
        if life != self._lives[workload.engine.name] or not world.is_open:
            job.close()
            return
        delay_ns = next(job, None)
        if delay_ns is None:  # the daemon is gone: reconnect
            self._lives[workload.engine.name] += 1
            world.at(world.draw.randint(1, 50) * MS, lambda: self._begin(workload))
            return
        world.at(delay_ns, lambda: self._resume(workload, job, life))

    def _is_lost(self, engine: FakeEngine) -> bool:
        return not engine.session or engine.harness is not self._world.harness
