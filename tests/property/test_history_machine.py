"""A history against sets: who is where, who may go, and that nothing is stranded or forgotten.

Invariants of its columns, queues and orders are checked after each step.
"""

from collections import defaultdict
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.core.fate import Fate
from kvtier.core.request import RequestTraits
from kvtier.core.residency import LOWER_TIERS
from kvtier.core.reuse import History, Use
from kvtier.core.reuse.eviction_queue import Credit
from kvtier.core.reuse.invariants import check_history, residents

S = 1_000_000_000
# Four documents whose continuations fork now and then.
PATHS = st.tuples(st.integers(0, 3), st.lists(st.sampled_from([0, 0, 0, 1]), max_size=12))
TIERS = st.sampled_from(LOWER_TIERS)
SIZES = st.sampled_from([3000, 3000, 3000, 9000])
HINTS = st.sampled_from(
    [RequestTraits(), RequestTraits(continues=0.0), RequestTraits(continues=1.0, gap_s=30)]
)
PAUSES = st.sampled_from([0, 1, 3, 100, 1000, 5000, 60_000])


def chain(path):
    first, more = path
    return [key(first, *more[:end]) for end in range(len(more) + 1)]


def key(*path):
    return blake2b(repr(path).encode(), digest_size=16).digest()


class HistoryMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.history = History(lambda end_tokens, block_tokens: block_tokens + end_tokens / 100)
        self.history.queues.rank(LOWER_TIERS[2], Credit(300.0))
        self.now_ns = 0
        self.model = {tier: set() for tier in LOWER_TIERS}
        self.children = defaultdict(set)

    @rule(path=PATHS, size=SIZES, traits=HINTS, num_stored=st.integers(0, 3))
    def touch(self, path, size, traits, num_stored):
        keys = chain(path)
        before = [self.history.times_seen(each) for each in keys]
        touched = self.history.touch(Use(keys, size, 64, traits=traits), self.now_ns, num_stored)
        assert all(before[: touched.num_known])
        for each, seen in zip(keys, before, strict=True):
            assert self.history.times_seen(each) >= seen + 1

    @rule(path=PATHS, num_prompt=st.integers(-1, 5))
    def extend(self, path, num_prompt):
        use = Use(chain(path), 3000, 64, num_prompt_blocks=num_prompt)
        before = [self.history.times_seen(each) for each in use.keys]
        self.history.extend(use, self.now_ns)
        assert [self.history.times_seen(each) for each in use.keys] == [n or 1 for n in before]

    @rule(keys=st.permutations(chain((9, [0, 0, 1, 0]))), size=SIZES)
    def confuse(self, keys, size):
        """A chain that cannot be: in another order each time, and one block twice."""
        self.history.touch(Use([*keys, keys[0]], size, 64), self.now_ns)

    @rule(tier=TIERS, path=PATHS, first=st.integers(0, 4), size=SIZES)
    def enter(self, tier, path, first, size):
        own = chain(path)
        keys, parents = own[first:], [key("root"), *own][first:-1]
        unmet = np.flatnonzero(self.history.needs_adoption(keys)) if keys else []
        if len(unmet):
            named = [[each[place] for place in unmet] for each in (keys, parents)]
            self.history.adopt(*named, unmet + first, size)
        self.history.enter(tier, keys)
        self.model[tier].update(keys)
        for parent, child in pairwise(own):
            self.children[parent].add(child)

    @rule(tier=TIERS, path=PATHS, places=st.sets(st.integers(0, 12)))
    def leave(self, tier, path, places):
        """Blocks are dropped or found corrupt wherever in their chain they are."""
        keys = [each for place, each in enumerate(chain(path)) if place in places]
        self.history.leave(tier, keys, Fate.FAILED_CHECK)
        self.model[tier].difference_update(keys)

    @rule(tier=TIERS, size=SIZES, count=st.integers(1, 12), skipped=st.sets(st.integers(0, 12)))
    def evict(self, tier, size, count, skipped):
        stays = set()
        for place, block in enumerate(self.history.queues.victims(tier, size)):
            assert block in self.model[tier], "it is not there"
            assert not self.children[block] & self.model[tier], "a child is still there"
            assert block not in stays, "it was skipped"
            if place in skipped:
                stays.add(block)
            else:
                self.history.leave(tier, [block], Fate.EVICTED)
                self.model[tier].remove(block)
            if place == count:
                break

    @rule(tier=TIERS)
    def evict_all(self, tier):
        for size in (3000, 9000):
            for block in self.history.queues.victims(tier, size):
                self.history.leave(tier, [block], Fate.EVICTED)
                self.model[tier].remove(block)
        # Blocks of two sizes in one chain may block each other; a real chain has one size.
        assert all(self.children[block] & self.model[tier] for block in self.model[tier])

    @rule(path=PATHS, tier=TIERS, size=SIZES, count=st.integers(0, 12))
    def ask(self, path, tier, size, count):
        keys = chain(path)
        use = Use(keys, size, 64)
        assert 0 <= self.history.queues.would_stay(use, count, tier) <= count
        for block, chance, score in zip(
            keys, self.history.p_reuse(keys), self.history.queues.scores(keys), strict=True
        ):
            assert 0 <= chance < 1
            assert (score > 0) == (chance > 0) == (self.history.times_seen(block) > 0)

    @rule(pause_s=PAUSES)
    def wait(self, pause_s):
        self.now_ns += pause_s * S
        self.history.advance(self.now_ns)

    @invariant()
    def is_consistent(self):
        check_history(self.history)
        for tier in LOWER_TIERS:
            assert residents(self.history, tier) == self.model[tier]


TestHistory = pytest.mark.slow(HistoryMachine.TestCase)
TestHistory.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, derandomize=True
)
