"""A node with two engines and two tiers, with whatever may go wrong as rules.

The stage checks the node's invariants after each event and that calls are answered once and in
time; the engines check each block they accept against the oracle. So the rules only need to act.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvtier.core.identity import EVERYTHING, unpack_headers
from kvtier.core.residency import Residency, TierName
from kvtier.errors import DaemonUnavailable
from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.testing.block import payload_of
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.stage import Stage, StageSettings
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.memory import MemoryTier

MS = 1_000_000
FAR_NS = 1 << 62
PLACES = st.integers(0, 1000)
ENGINES = st.sampled_from([0, 1, 2])
PATHS = st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(0, 2)).map(
    lambda p: [p[0] * 100 + place for place in range(p[1])] + [50 + p[2]] * bool(p[2])
)
TIERS = st.sampled_from([TierName.SSD, TierName.REMOTE])


class NodeMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tiers = {
            TierName.SSD: MemoryTier(60_000),
            TierName.REMOTE: MemoryTier(90_000, name=TierName.REMOTE),
        }
        self.num_boots = 0
        self.engines = [
            FakeEngine("a", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("b", key_space=b"key space no. 1.", payload_bytes=3000),
            FakeEngine("c", key_space=b"key space no. 2.", payload_bytes=9000),
        ]
        self.boot()

    def boot(self):
        self.num_boots += 1
        self.stage = Stage(
            self.tiers, StageSettings(num_slabs=4, slab_bytes=16_384), boot=f"{self.num_boots}"
        )
        self.stage.recover({TierName.SSD: self.tiers[TierName.SSD]})
        self.loads, self.stores = [], []
        for engine in self.engines:
            engine.attach(self.stage)

    @rule(who=ENGINES, path=PATHS)
    def lookup(self, who, path):
        engine = self.engines[who]
        engine.lookup(engine.chain(path))

    @rule(who=ENGINES, path=PATHS)
    def store(self, who, path):
        self.engines[who].store(self.engines[who].chain(path))

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

    @rule(who=ENGINES, path=PATHS, first=st.integers(0, 3), within_ms=st.integers(1, 400))
    def load(self, who, path, first, within_ms):
        engine = self.engines[who]
        blocks = engine.chain(path)
        load = engine.load(blocks, min(first, len(blocks)), within_ns=within_ms * MS)
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

    @precondition(lambda self: self.stage.waiting)
    @rule(place=PLACES)
    def carry_out(self, place):
        work = self.stage.waiting[place % len(self.stage.waiting)]
        if not isinstance(work, ac.Order):
            self.stage.carry_out(work)
            return
        self.stage.waiting.remove(work)
        for engine in self.engines:
            if engine.session == work.session:
                engine.report(work.order, 1)

    @precondition(lambda self: self.stage.waiting)
    @rule(place=PLACES)
    def fail(self, place):
        work = self.stage.waiting[place % len(self.stage.waiting)]
        if not isinstance(work, ac.Order):
            self.stage.fail(work)

    @rule()
    def settle(self):
        self.stage.settle()

    @rule(elapsed_ms=st.integers(1, 300))
    def wait(self, elapsed_ms):
        self.stage.advance(elapsed_ms * MS)

    @rule(tier=TIERS, place=PLACES)
    def rot(self, tier, place):
        headers = unpack_headers(self.tiers[tier].headers())
        if headers:
            header = headers[place % len(headers)]
            payload = bytearray(payload_of(header))
            payload[place] ^= 1
            self.tiers[tier].remove([header.block_hash], FAR_NS)
            self.tiers[tier].write([BlockWrite(header, memoryview(payload))], FAR_NS)

    @rule(tier=TIERS)
    def lose(self, tier):
        self.tiers[tier].purge(EVERYTHING, FAR_NS)

    @rule(place=PLACES)
    def scribble(self, place):
        index = self.stage.node.cache.index
        ready = sorted(index.slot[index.in_state(TierName.CPU, Residency.READY)].tolist())
        if ready:
            self.stage.arena[ready[place % len(ready)] + place] ^= 1

    @rule(tier=TIERS, is_up=st.booleans())
    def tier_up(self, tier, is_up):
        self.stage.post(ev.TierUp(tier, is_up))

    @rule(tiers=st.lists(st.sampled_from(list(TierName)), unique=True))
    def drop(self, tiers):
        deadline_ns = self.stage.clock() + 400 * MS
        self.stage.call(lambda call: ev.Drop(call, tuple(tiers), deadline_ns))

    @rule(who=ENGINES)
    def die(self, who):
        engine = self.engines[who]
        engine.die()
        self.loads = [each for each in self.loads if each[0] is not engine]
        self.stores = [each for each in self.stores if each[0] is not engine]
        engine.attach(self.stage)

    @rule()
    def crash(self):
        self.stage.is_down = True
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
        deadline_ns = self.stage.clock() + 50 * MS
        chain = (liar.session, tenant, joined, first)
        match draw.randrange(3):
            case 0:
                self.stage.call(lambda call: ev.Lookup(call, *chain, deadline_ns))
            case 1:
                self.stage.call(lambda call: ev.Load(call, *chain, deadline_ns))
            case 2:
                answer = self.stage.ask(lambda call: ev.PrepareStore(call, *chain))
                if isinstance(answer, ac.Granted) and answer.lease:
                    none = ac.Granted(answer.lease, (), (), 0, 0, "")
                    assert liar.complete(none, ()) == 0

    def teardown(self):
        for engine in self.engines:
            engine.die()
        self.stage.advance(500 * MS)  # what was promised by a deadline is due
        self.stage.settle()
        self.stage.check_idle()


TestNode = pytest.mark.slow(NodeMachine.TestCase)
TestNode.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, derandomize=True
)
