"""A node with two engines and two tiers, with whatever may go wrong as rules.

The harness checks the node's invariants after each event and that calls are answered once and in
time; the engines check each block they accept against the oracle. So the rules only need to act.
"""

import random
from dataclasses import fields, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtier.core.identity import EVERYTHING, Selection
from kvtier.core.plan import PlanOutcome, StepSample
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import slot_bytes
from kvtier.daemon.policies import Policies, policies
from kvtier.errors import DaemonUnavailable
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.sim.random_config import draw_config, write_modes
from kvtier.sim.simulated_tier import SimulatedTier
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.node_harness import HarnessSettings, NodeHarness

MS = 1_000_000
FAR_NS = 1 << 62
PLACES = st.integers(0, 1000)
ENGINES = st.sampled_from([0, 1, 2, 3])
PATHS = st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(0, 2)).map(
    lambda p: [p[0] * 100 + place for place in range(p[1])] + [50 + p[2]] * bool(p[2])
)
TIERS = st.sampled_from([TierName.SSD, TierName.REMOTE])
LOWER = st.sampled_from([TierName.CPU, TierName.SSD, TierName.REMOTE])
TRAITS = st.builds(
    RequestTraits,
    kind=st.sampled_from(["", "chat"]),
    num_tokens=st.integers(0, 1000),
    continues=st.sampled_from([None, 0.0, 1.0]),
    priority=st.sampled_from([0, 0, 2]),
    ttl_s=st.sampled_from([None, 0.1, 100.0]),
    max_offload_tokens=st.sampled_from([None, None, 0, 130]),
    max_load_tokens=st.sampled_from([None, None, 0, 130]),
)


class NodeMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tiers = {
            TierName.SSD: SimulatedTier(60_000, TierName.SSD, random.Random(1)),
            TierName.REMOTE: SimulatedTier(90_000, TierName.REMOTE, random.Random(2)),
        }
        self.num_boots = 0
        self.num_requests = 0
        self.plans = []
        self.engines = [
            FakeEngine("a", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("b", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("c", key_space=b"key space no. 2.", payload_bytes=9000),
            FakeEngine("d", key_space=b"key space no. 3.", payload_bytes=16_000),
        ]

    @initialize(seed=st.integers(0, 10_000))
    def choose(self, seed):
        """Any policies an operator may configure; seed 0 stands for none at all."""
        self.config = draw_config(random.Random(seed)) if seed else None
        self.boot()

    def boot(self):
        self.num_boots += 1
        chosen, modes = {}, {}
        if self.config is not None:
            made = policies(self.config)
            chosen = {each.name: getattr(made, each.name) for each in fields(Policies)}
            del chosen["rule"]  # a name
            modes = write_modes(self.config)
        self.harness = NodeHarness(
            self.tiers,
            HarnessSettings(num_slabs=4, slab_bytes=16_384, write=modes, pin_share=0.25),
            boot=f"{self.num_boots}",
            **chosen,
        )
        self.harness.recover({TierName.SSD: self.tiers[TierName.SSD]})
        self.loads, self.stores, self.lost, self.plans = [], [], [], []
        for engine in self.engines:
            engine.attach(self.harness)

    @rule(who=ENGINES, path=PATHS)
    def lookup(self, who, path):
        engine = self.engines[who]
        self.ask(engine, engine.chain(path), NO_TRAITS)

    @rule(who=ENGINES, path=PATHS, traits=TRAITS, is_announced=st.booleans())
    def request(self, who, path, traits, is_announced):
        engine = self.engines[who]
        self.num_requests += 1
        traits = replace(traits, request_id=f"r{self.num_requests}")
        if is_announced:
            engine.announce(engine.chain(path), traits, over=(f"r{self.num_requests - 3}",))
        self.ask(engine, engine.chain(path), traits)

    def ask(self, engine, blocks, traits):
        found = self.harness.answers.get(engine.lookup(blocks, traits=traits))
        if isinstance(found, ac.LookupResult) and found.plan is not None:
            self.plans.append((engine, found.plan))

    @precondition(lambda self: self.plans)
    @rule(place=PLACES, seconds=st.floats(), num_blocks=st.integers(-1, 20), tier=LOWER)
    def conclude(self, place, seconds, num_blocks, tier):
        """Say what came of a plan: perhaps the truth."""
        engine, plan = self.plans.pop(place % len(self.plans))
        steps = [StepSample(100, 0, 5000.0, 0, seconds)]
        restored = ((tier, num_blocks),)
        said = PlanOutcome(plan.decision, restored, seconds, 100, seconds, 0.0, 2 * seconds)
        engine.measured(steps, [said])

    @rule(who=ENGINES, path=PATHS, ttl_ms=st.sampled_from([0, 10, 10_000]))
    def pin(self, who, path, ttl_ms):
        chain = self.named(who, path)
        answer = self.harness.ask(lambda call: ev.PinBlocks(call, *chain, ttl_ms * MS))
        assert isinstance(answer, ac.PinResult | ac.Refused)

    @rule(who=ENGINES, path=PATHS)
    def warm(self, who, path):
        deadline_ns = self.harness.clock() + 100 * MS
        chain = self.named(who, path)
        self.harness.call(lambda call: ev.Warm(call, *chain, deadline_ns))

    def named(self, who, path):
        blocks = self.engines[who].chain(path)
        header = blocks[0].header
        return header.key_space, header.tenant, b"".join(b.header.block_hash for b in blocks)

    @rule(who=ENGINES, path=PATHS)
    def store(self, who, path):
        granted = self.engines[who].store(self.engines[who].chain(path))
        if granted.reason == "no_room":
            self.check_nothing_could_go(self.engines[who])

    def check_nothing_could_go(self, engine):
        """A slab of another size can only be had whole."""
        slots = self.harness.node.cache.slots
        others = [size for size in slots.sizes() if size != slot_bytes(engine.layout.block_bytes)]
        assert all(num_held for size in others for num_held, _ in slots.slabs_by_held(size))

    @rule(who=ENGINES, path=PATHS, steps=st.integers(0, 12))
    def begin_store(self, who, path, steps):
        engine = self.engines[who]
        blocks = engine.chain(path)
        granted = engine.prepare(blocks)
        copying = zip(range(steps), engine.copy(granted, blocks), strict=False)
        self.stores.append((engine, granted, [checksum for _, checksum in copying if checksum]))

    @precondition(lambda self: self.stores)
    @rule(place=PLACES)
    def complete(self, place):
        engine, granted, checksums = self.stores.pop(place % len(self.stores))
        engine.complete(granted, checksums)

    @rule(
        who=ENGINES,
        path=PATHS,
        first=st.integers(0, 3),
        within_ms=st.integers(1, 400),
        decision=st.integers(0, 9),
        from_back=st.booleans(),
    )
    def load(self, who, path, first, within_ms, decision, from_back):
        engine = self.engines[who]
        blocks = engine.chain(path)
        load = engine.load(
            blocks,
            min(first, len(blocks)),
            within_ns=within_ms * MS,
            decision=decision,
            from_back=from_back,
        )
        self.loads.append((engine, load))

    @precondition(lambda self: self.loads)
    @rule(place=PLACES)
    def take(self, place):
        self.loads[place % len(self.loads)][1].take()

    @precondition(lambda self: self.loads)
    @rule(place=PLACES)
    def release(self, place):
        _, load = self.loads.pop(place % len(self.loads))
        load.release()

    @precondition(lambda self: self.harness.waiting)
    @rule(place=PLACES)
    def carry_out(self, place):
        work = self.harness.waiting[place % len(self.harness.waiting)]
        if not isinstance(work, ac.EmptyEngineTier):
            self.harness.carry_out(work)
            return
        self.harness.waiting.remove(work)
        for engine in self.engines:
            if engine.session == work.session:
                engine.report(work.order, 1)

    @precondition(lambda self: self.harness.waiting)
    @rule(place=PLACES)
    def fail(self, place):
        work = self.harness.waiting[place % len(self.harness.waiting)]
        if not isinstance(work, ac.EmptyEngineTier):
            self.harness.fail(work)

    @precondition(lambda self: self.harness.waiting and len(self.lost) < 2)
    @rule(place=PLACES, is_done=st.booleans())
    def lose_completion(self, place, is_done):
        """A thread hangs for ever, with its work done or not."""
        work = self.harness.waiting[place % len(self.harness.waiting)]
        if not isinstance(work, ac.EmptyEngineTier):
            self.harness.waiting.remove(work)
            self.lost.append(work)
            if is_done:
                self.harness.completion(work)

    @rule(tier=TIERS, is_full=st.booleans())
    def fill(self, tier, is_full):
        self.tiers[tier].is_full = is_full

    @rule(tier=TIERS, is_age=st.booleans())
    def scrub(self, tier, is_age):
        medium = self.tiers[tier]
        gone = medium.expire() if is_age else medium.scrub(1 << 20, FAR_NS).damaged
        self.harness.post(ev.BlocksLost(tier, b"".join(gone), "expired" if is_age else "corrupt"))

    @rule(elapsed_ms=st.integers(100, 100_000))
    def suspend(self, elapsed_ms):
        self.harness.excuse()
        self.harness.clock.now_ns += elapsed_ms * MS
        self.harness.post(ev.Tick())

    @rule()
    def settle(self):
        self.harness.settle()

    @rule(elapsed_ms=st.integers(1, 300))
    def wait(self, elapsed_ms):
        self.harness.advance(elapsed_ms * MS)

    @rule(tier=TIERS)
    def rot(self, tier):
        self.tiers[tier].rot()

    @rule(tier=TIERS)
    def lose(self, tier):
        self.tiers[tier].purge(EVERYTHING, FAR_NS)

    @rule(place=PLACES)
    def scribble(self, place):
        index = self.harness.node.cache.index
        ready = sorted(index.slot[index.in_state(TierName.CPU, Residency.READY)].tolist())
        if ready:
            self.harness.arena[ready[place % len(ready)] + place] ^= 1

    @rule(tier=TIERS, is_up=st.booleans())
    def tier_up(self, tier, is_up):
        self.harness.post(ev.TierUp(tier, is_up))

    @rule(
        tiers=st.lists(st.sampled_from(list(TierName)), unique=True),
        space=st.sampled_from([b"", b"key space no. 1.", b"key space no. 2."]),
        tenant=st.sampled_from([b"", bytes(16)]),
    )
    def drop(self, tiers, space, tenant):
        deadline_ns = self.harness.clock() + 400 * MS
        selection = Selection(space, tenant)
        self.harness.call(lambda call: ev.Drop(call, tuple(tiers), deadline_ns, selection))

    @rule(who=ENGINES)
    def die(self, who):
        engine = self.engines[who]
        engine.die()
        self.plans = [each for each in self.plans if each[0] is not engine]
        self.loads = [each for each in self.loads if each[0] is not engine]
        self.stores = [each for each in self.stores if each[0] is not engine]
        engine.attach(self.harness)

    @rule()
    def crash(self):
        self.harness.is_down = True
        try:
            self.engines[0].lookup(self.engines[0].chain([1]))
        except DaemonUnavailable:
            self.boot()

    @rule(seed=st.integers(0, 10_000), who=ENGINES)
    def confuse(self, seed, who):
        """Send what no honest client sends: shifted chains, repeats, foreign and broken hashes."""
        draw, engine = random.Random(seed), self.engines[who]
        liar = draw.choice(self.engines)
        hashes = [block.header.block_hash for block in engine.chain(range(4))]
        hashes = [draw.choice([*hashes, draw.randbytes(16)]) for _ in range(draw.randint(0, 5))]
        joined = b"".join(hashes)[: draw.choice([None, None, -1])]
        tenant = draw.choice([bytes(16), b"short", b"tenant number 1."])
        first = draw.randint(0, 6)
        deadline_ns = self.harness.clock() + 50 * MS
        chain = (liar.session, tenant, joined, first)
        match draw.randrange(5):
            case 0:
                self.harness.call(lambda call: ev.Lookup(call, *chain, deadline_ns))
            case 1:
                self.harness.call(lambda call: ev.Load(call, *chain, deadline_ns))
            case 2:
                self.harness.call(
                    lambda call: ev.PinBlocks(call, liar.key_space, *chain[1:3], FAR_NS)
                )
            case 3:
                announced = (ev.AnnouncedRequest(NO_TRAITS, *chain[1:]),)
                self.harness.ask(lambda call: ev.Announce(call, liar.session, announced))
            case 4:
                answer = self.harness.ask(lambda call: ev.PrepareStore(call, *chain))
                if isinstance(answer, ac.StoreGrant) and answer.lease:
                    none = ac.StoreGrant(answer.lease, (), (), 0, 0, "")
                    assert liar.complete(none, ()) == 0

    def teardown(self):
        for engine in self.engines:
            engine.die()
        self.harness.advance(500 * MS)  # what was promised by a deadline is due
        self.harness.settle()
        self.harness.advance(500 * MS)
        self.harness.check_idle(self.lost)


TestNode = pytest.mark.slow(NodeMachine.TestCase)
TestNode.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, derandomize=True
)
