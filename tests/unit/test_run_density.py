"""What every eviction that learns from a history owes to the CPU tier, and what density adds."""

import numpy as np
import pytest
from rows import add, chain

from kvtier.core.eviction.run_density import CreditLru, RunDensity
from kvtier.core.eviction.s3_fifo import S3Fifo
from kvtier.core.fate import Fate
from kvtier.core.identity import split_hashes
from kvtier.core.index import IS_KEPT, BlockIndex
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse import History, Use
from kvtier.core.slots import SlabAllocator, slot_bytes

CPU = TierName.CPU
SIZE = slot_bytes(5000)
S = 1_000_000_000


class Tier:
    """A CPU tier in small: index, slots and a policy, as the cache keeps them."""

    def __init__(self, kind):
        self.index, self.history = BlockIndex(), History()
        self.policy = kind(self.history)
        self.slots = SlabAllocator(1, 64 * SIZE)
        self.slots.reserve(1)

    def use(self, *numbers, at=0):
        """Let a request come, and whatever it lacks come in; returns the rows and its mark."""
        headers = chain(*numbers)
        keys = [header.block_hash for header in headers]
        self.history.touch(Use(keys, 5000, 64), at * S)
        rows = add(self.index, headers)
        mark = self.policy.touch(self.index, rows)
        for row in rows[self.index.residency(rows, CPU) == Residency.ABSENT].tolist():
            self.index.slot[row] = self.slots.allocate(SIZE, row)
            self.index.move(row, CPU, Residency.READY)
            self.history.enter(CPU, [self.index.hash_of(row)], [row])
            self.policy.offer(self.index, row)
        return rows.tolist(), mark

    def pin(self, row, count=1):
        self.index.pins[row] = count
        if not count:
            self.policy.offer(self.index, row)

    def victims(self, before=None, size=SIZE):
        return list(self.policy.victims(self.index, self.slots, size, before))

    def evict(self, count):
        """Evict as the cache does: all at once, and then the generator is closed."""
        victims = self.policy.victims(self.index, self.slots, SIZE)
        rows = [row for row, _ in zip(victims, range(count), strict=False)]
        for row in rows:
            self.slots.free(int(self.index.slot[row]))
        gone = np.array(rows, np.int64)
        self.history.leave(CPU, split_hashes(self.index.keys_of(gone).tobytes()), Fate.EVICTED)
        self.index.slot[gone] = -1
        self.index.move(gone, CPU, Residency.ABSENT)
        victims.close()
        self.index.forget_absent(gone)
        return rows


@pytest.fixture(params=[RunDensity, CreditLru, S3Fifo])
def tier(request):
    return Tier(request.param)


def test_leaves_go_before_parents_and_everything_can_go(tier):
    one, _ = tier.use(1, 2, 3)
    two, _ = tier.use(1, 2, 4, at=1)
    three, _ = tier.use(7, at=2)
    order = tier.victims()
    assert sorted(order) == sorted({*one, *two, *three})
    for path in (one, two):
        assert [row for row in order if row in path] == path[::-1]


def test_what_was_not_taken_is_proposed_again(tier):
    tier.use(1, 2, 3)
    tier.use(7, 8)
    order = tier.victims()
    assert tier.victims() == order
    assert tier.policy.next_victims(tier.index, tier.slots, SIZE, 3).tolist() == order[:3]
    assert tier.evict(2) == order[:2]
    assert tier.victims() == order[2:]


def test_the_chain_in_use_is_spared(tier):
    _, mark = tier.use(1, 2)
    two, _ = tier.use(7, 8)
    assert tier.victims(before=mark) == []
    _, mark = tier.use(1, 2, at=1)
    assert tier.victims(before=mark) == two[::-1]


def test_what_is_pinned_or_kept_stays_and_what_it_hangs_on_goes_last(tier):
    one, _ = tier.use(1, 2)
    two, _ = tier.use(7, 8)
    tier.pin(one[1])
    assert tier.victims() == [*two[::-1], one[0]]
    tier.index.flags[two[1]] |= IS_KEPT
    assert sorted(tier.victims()) == sorted([two[0], one[0]])
    tier.index.flags[two[1]] = 0
    tier.pin(one[1], 0)
    assert sorted(tier.victims()) == sorted([*one, *two])


def test_sizes_have_orders_of_their_own(tier):
    tier.use(1, 2)
    assert tier.victims(size=SIZE + 4096) == []
    assert tier.policy.next_victims(tier.index, tier.slots, SIZE + 4096, 8).tolist() == []


def test_what_the_history_was_not_told_of_can_go_too(tier):
    rows = add(tier.index, chain(5, 6))
    tier.policy.touch(tier.index, rows)
    for row in rows.tolist():
        tier.index.slot[row] = tier.slots.allocate(SIZE, row)
    tier.index.move(rows, CPU, Residency.READY)
    assert tier.victims() == rows.tolist()[::-1]


def test_a_row_that_another_block_has_now_is_not_taken_for_the_old_one(tier):
    one, _ = tier.use(1, 2, 3)
    assert tier.evict(3) == one[::-1]
    two, _ = tier.use(7, 8, 9, at=1)
    assert sorted(two) == sorted(one)
    assert sorted(tier.victims()) == sorted(two)


def test_whom_nobody_expects_back_goes_first():
    """Short prompts come back after a minute, long ones never: so it was for some time."""
    tier = Tier(RunDensity)

    def ask(name, num_blocks, at):
        keys = [bytes([name, place]) * 8 for place in range(num_blocks)]
        tier.history.touch(Use(keys, 5000, 64), at * S)

    for user in range(0, 240, 2):
        ask(user, 1, user)
        ask(user + 1, 20, user)
        if user >= 60:
            ask(user - 60, 1, user)
    short, _ = tier.use(1, at=300)
    long, _ = tier.use(*range(100, 120), at=300)
    assert tier.victims() == [*long[::-1], *short]
