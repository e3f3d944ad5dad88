"""Many blocks claimed and published at once are what they would be one by one."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvtier.core.admission import AdmitEverything
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.identity import NO_TENANT
from kvtier.core.index import NewBlocks, Scope
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import SlabAllocator
from kvtier.core.table import as_keys
from kvtier.node.flow.cpu_allocator import CpuAllocator
from kvtier.node.flow.demotion import Demotion
from kvtier.node.flow.retention import Retention
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.testing.block import TEST_KEY_SPACE, make_chain

CPU = TierName.CPU
CHECKSUM = bytes(15) + b"\1"
SIZE = 4096


def setup_of(*, num_slabs=2, num_slots=4):
    """Return a cache without slower tiers, and its allocator."""
    slots = SlabAllocator(num_slabs, num_slots * SIZE)
    slots.reserve(num_slabs)
    cache = Cache(slots, LeafLru(), Metrics(DAEMON_METRICS, CollectorRegistry()))
    transfers = TierTransfers(cache, ())
    demotion = Demotion(cache, transfers, TierWrites(cache, transfers, AdmitEverything()))
    return cache, CpuAllocator(cache, Retention(cache), demotion)


def add(cache, allocator, numbers, payload_bytes=SIZE):
    """Add a chain that nobody has, and return its rows, and the mark of its use."""
    headers = [block.header for block in make_chain(numbers, payload_bytes)]
    rows = cache.index.add(
        NewBlocks(
            keys=as_keys(b"".join(each.block_hash for each in headers)),
            parents=as_keys(b"".join(each.parent_hash for each in headers)),
            first_position=0,
            scope=cache.index.scope_id(Scope(TEST_KEY_SPACE, NO_TENANT)),
            payload_bytes=payload_bytes,
        )
    )
    return rows, allocator.touch(rows, payload_bytes, 0)


def store(cache, allocator, numbers):
    rows, mark = add(cache, allocator, numbers)
    assert allocator.claim_all(rows, mark) == len(rows)
    assert cache.publish_all(rows.tolist(), [CHECKSUM] * len(rows)) == rows.tolist()
    return rows


def states(cache, rows):
    return [cache.state(row, CPU) for row in rows.tolist()]


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5, 8, 9, 20])
def test_as_many_leading_rows_as_there_is_room_for(num_blocks):
    (together, bulk), (one_by_one, single) = setup_of(), setup_of()
    rows, mark = add(together, bulk, range(num_blocks))
    assert bulk.claim_all(rows, mark) == min(num_blocks, 8)
    others, mark = add(one_by_one, single, range(num_blocks))
    claimed = [single.claim(row, mark) for row in others.tolist()]
    assert sum(claimed) == min(num_blocks, 8)
    assert states(together, rows) == states(one_by_one, others)
    assert states(together, rows[8:]) == [Residency.ABSENT] * (num_blocks - min(num_blocks, 8))
    assert together.offsets(rows[:8].tolist()) == one_by_one.offsets(others[:8].tolist())
    assert together.num_claims == one_by_one.num_claims
    assert together.slots.held_bytes == one_by_one.slots.held_bytes == min(num_blocks, 8) * SIZE


def test_none_at_all():
    cache, allocator = setup_of()
    nothing = np.empty(0, np.int64)
    assert allocator.claim_all(nothing, 0) == 0
    assert cache.publish_all([], []) == []
    assert cache.num_claims == 0


def test_what_is_older_makes_room_and_what_is_pinned_does_not():
    cache, allocator = setup_of()
    old, pinned = store(cache, allocator, [1, 2, 3]), store(cache, allocator, [11, 12])
    for row in pinned.tolist():
        cache.pin(row)
    rows, mark = add(cache, allocator, range(100, 110))
    assert allocator.claim_all(rows, mark) == 6
    assert states(cache, pinned) == [Residency.READY] * 2
    assert states(cache, rows) == [Residency.WRITING] * 6 + [Residency.ABSENT] * 4
    assert cache.index.find(cache.index.keys_of(pinned)).tolist() == pinned.tolist()
    assert len(cache.index) == len(pinned) + len(rows), f"{old} are forgotten"
    assert cache.publish_all(rows[:6].tolist(), [CHECKSUM] * 6) == rows[:6].tolist()
    assert cache.slots.held_bytes == 2 * SIZE, "only what is pinned"


def test_a_block_of_the_same_chain_is_not_evicted_for_the_next():
    """Else a store would push out its own beginning, and nothing of it would be found."""
    cache, allocator = setup_of()
    chain, mark = add(cache, allocator, range(12))
    assert allocator.claim_all(chain[:8], mark) == 8
    cache.publish_all(chain[:8].tolist(), [CHECKSUM] * 8)
    assert allocator.claim_all(chain[8:], mark) == 0
    assert states(cache, chain) == [Residency.READY] * 8 + [Residency.ABSENT] * 4


def test_what_was_expelled_while_it_was_written_is_not_published():
    cache, allocator = setup_of()
    rows, mark = add(cache, allocator, range(6))
    assert allocator.claim_all(rows, mark) == 6
    free, held = rows[1:3], rows[4:5]
    cache.pin(int(held[0]))
    cache.expel(np.concatenate([free, held]))
    kept = [int(row) for row in rows if row not in {*free.tolist(), *held.tolist()}]
    assert cache.publish_all(rows.tolist(), [CHECKSUM] * 6) == kept
    assert states(cache, rows[[0, 3, 5]]) == [Residency.READY] * 3
    assert states(cache, held) == [Residency.EVICTING], "it leaves with its reader"
    cache.unpin(int(held[0]))
    assert not cache.expelled
    assert cache.slots.used_bytes() == 3 * SIZE
    assert cache.slots.held_bytes == 0
