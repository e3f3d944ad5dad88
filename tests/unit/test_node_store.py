"""Dialogues: prepare, copy, complete."""

from dialogue import CPU, REMOTE, SSD, empty_cpu, engine_on, open_harness

from kvtier.core.identity import BlockHash
from kvtier.node.flow import store
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.node.state import cache


def test_what_is_stored_is_found_and_loaded():
    harness = open_harness(slots=20)
    engine = engine_on(harness)
    blocks = engine.chain(range(5))
    assert engine.found(blocks) == ()
    granted = engine.store(blocks)
    assert granted.indexes == (0, 1, 2, 3, 4)
    assert engine.found(blocks) == (CPU,) * 5
    load = engine.load(blocks)
    assert load.take() == [CPU] * 5
    assert load.end == "complete"
    assert load.release()
    harness.check_idle()


def test_a_store_is_not_served_before_it_is_complete():
    harness = open_harness()
    engine, other = engine_on(harness), engine_on(harness, "other")
    blocks = engine.chain(range(3))
    granted = engine.prepare(blocks)
    checksums = [checksum for checksum in engine.copy(granted, blocks) if checksum]
    load = other.load(blocks)
    assert load.take() == []
    assert engine.complete(granted, checksums) == 3
    assert load.take() == [CPU] * 3


def test_a_store_that_was_copied_in_part_publishes_that_part():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(4))
    granted = engine.prepare(blocks)
    checksums = [checksum for checksum in engine.copy(granted, blocks) if checksum]
    assert engine.complete(granted, checksums[:2]) == 2
    assert engine.found(blocks) == (CPU, CPU)
    assert engine.store(blocks).indexes == (2, 3)


def test_a_failed_store_leaves_no_trace():
    harness = open_harness()
    engine = engine_on(harness)
    granted = engine.prepare(engine.chain(range(4)))
    assert engine.complete(granted, []) == 0
    assert len(harness.node.cache.index) == 0
    assert harness.node.cache.slots.used_bytes() == 0
    harness.check_idle()


def test_a_store_is_completed_once():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(2))
    granted = engine.prepare(blocks)
    checksums = [checksum for checksum in engine.copy(granted, blocks) if checksum]
    assert engine.complete(granted, checksums) == 2
    assert engine.complete(granted, checksums) == 0


def test_two_racing_stores_write_once():
    harness = open_harness(slots=24)
    first, second = engine_on(harness, "first"), engine_on(harness, "second")
    blocks = first.chain(range(6))
    granted = first.prepare(blocks[:4])
    rest = second.prepare(blocks)
    assert rest.indexes == (4, 5)
    assert rest.present_blocks == 4
    assert set(granted.offsets).isdisjoint(rest.offsets)


def test_what_a_slower_tier_keeps_is_not_stored_again():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    assert engine.prepare(engine.chain(range(5))).indexes == (3, 4)


def test_what_a_tier_that_is_down_keeps_is_stored_again():
    harness = open_harness(SSD)
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    harness.post(ev.TierUp(SSD, is_up=False))
    assert engine.store(blocks).indexes == (0, 1, 2)
    assert engine.found(blocks) == (CPU,) * 3
    assert not harness.waiting  # the SSD has them


def test_a_store_makes_room_from_the_least_recently_used_and_from_tails():
    harness = open_harness(slots=8)
    engine = engine_on(harness)
    old, new = engine.chain([1, 2, 3, 4]), engine.chain([5, 6, 7, 8])
    for length in (2, 4):  # a quarter of the arena at a time
        engine.store(old[:length])
    for length in (2, 4):
        engine.store(new[:length])
    engine.store(engine.chain([9, 10]))
    assert engine.found(old) == (CPU, CPU)
    assert engine.found(new) == (CPU,) * 4


def test_blocks_named_in_a_call_are_never_evicted_by_that_call():
    harness = open_harness(slots=8)
    engine = engine_on(harness)
    blocks = engine.chain(range(20))
    engine.store(blocks[:2])
    engine.store(engine.chain([100, 101]))
    granted = engine.prepare(blocks)
    assert granted.indexes == (2, 3)  # a quarter of the arena for one engine's open stores
    assert engine.found(blocks[:2]) == (CPU, CPU)


def test_an_engine_holds_a_share_of_the_arena_and_no_more():
    harness = open_harness(slots=16)
    engine, other = engine_on(harness), engine_on(harness, "other")
    held = engine.prepare(engine.chain(range(10)))
    assert len(held.indexes) == 4
    assert held.rejected_blocks == 6
    assert held.reason == "throttled"
    refused = engine.prepare(engine.chain([50]))
    assert refused.lease == 0
    assert refused.reason == "queue_full"
    assert len(other.prepare(other.chain([60])).indexes) == 1
    engine.complete(held, [])
    assert len(engine.prepare(engine.chain([50])).indexes) == 1


def test_an_arena_full_of_leased_blocks_has_no_room():
    harness = open_harness(slots=4)
    for number in range(4):
        engine = engine_on(harness, f"engine {number}")
        blocks = engine.chain([number])
        engine.store(blocks)
        engine.load(blocks)
    refused = engine.prepare(engine.chain([9]))
    assert refused.lease == 0
    assert refused.reason == "no_room"


def test_slabs_are_given_up_to_blocks_of_another_size():
    harness = open_harness(slots=16, slabs=4)
    small, large = engine_on(harness, "small"), engine_on(harness, "large", payload_bytes=9000)
    for number in range(16):
        small.store(small.chain([number]))
    blocks = large.chain(range(1))
    assert len(large.store(blocks).indexes) == 1
    assert large.found(blocks) == (CPU,)
    assert [small.found(small.chain([n])) for n in range(16)].count((CPU,)) == 12


def test_a_slab_with_a_pinned_block_is_not_emptied():
    harness = open_harness(slots=16, slabs=4)
    small, large = engine_on(harness, "small"), engine_on(harness, "large", payload_bytes=9000)
    for number in range(16):
        small.store(small.chain([number]))
    held = large.chain([1])
    small.load(small.chain([4]))  # in the second slab
    assert large.store(held).indexes == (0,)
    assert [small.found(small.chain([n])) for n in range(16)].count((CPU,)) == 12
    assert small.found(small.chain([4])) == (CPU,)


def test_a_block_size_gets_a_slab_though_a_block_is_pinned_in_every_one():
    """At the latest when the leases on one slab end; till then no_room, and one slab is lost."""
    harness = open_harness(slots=16, slabs=4)
    small, large = engine_on(harness, "small"), engine_on(harness, "large", payload_bytes=9000)
    for number in range(16):
        small.store(small.chain([number]))
    pinned = [small.chain([number]) for number in range(0, 16, 4)]
    loads = [small.load(blocks) for blocks in pinned]
    blocks = large.chain([1])
    for _ in range(3):
        assert large.prepare(blocks).reason == "no_room"
    assert [small.found(small.chain([n])) for n in range(16)].count((CPU,)) == 8  # two slabs
    for load, again in zip(loads, pinned, strict=True):  # never a moment without a lease
        small.load(again)
        assert load.take() == [CPU]
        load.release()
    assert large.store(blocks).indexes == (0,)
    assert small.found(pinned[2]) == (CPU,)


def test_an_index_at_its_bound_forgets_what_only_the_remote_tier_has(monkeypatch):
    for module in (cache, store):
        monkeypatch.setattr(module, "INDEX_ROWS_MAX", 6)
    harness = open_harness(REMOTE)
    engine = engine_on(harness)
    remote = engine.chain([1, 2, 3])
    harness.tiers[REMOTE].write(remote, 1 << 62)
    engine.lookup(remote)
    harness.settle()
    assert len(harness.node.cache.index) == 3
    assert len(engine.store(engine.chain([10, 11, 12, 13])).indexes) == 4
    assert not harness.holds(remote[0].header, REMOTE)
    refused = engine.prepare(engine.chain([20, 21, 22]))
    assert (refused.lease, refused.reason) == (0, "index_full")
    call = engine.lookup(remote)
    harness.settle()
    assert engine.answer(call) == ac.LookupResult(
        ((REMOTE, 2),), "absent"
    )  # as many as there is room for
    assert len(harness.node.cache.index) == 6


def test_a_chain_that_names_a_block_twice_is_refused():
    harness = open_harness()
    engine = engine_on(harness)
    block = engine.chain([1])[0].header.block_hash
    answer = harness.ask(
        lambda call: ev.PrepareStore(call, engine.session, bytes(16), block + block, 0)
    )
    assert isinstance(answer, ac.Refused)
    assert answer.kind == "chain"


def test_a_hash_under_another_identity_is_neither_stored_nor_served():
    harness = open_harness()
    engine = engine_on(harness)
    liar = engine_on(harness, "liar", payload_bytes=4000)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    hashes = b"".join(block.header.block_hash for block in blocks)
    more = hashes + BlockHash(b"of the liar only")
    granted = harness.ask(lambda call: ev.PrepareStore(call, liar.session, bytes(16), more, 0))
    assert isinstance(granted, ac.StoreGrant)
    assert granted.lease == 0
    assert granted.reason == "identity"
    found = harness.ask(
        lambda call: ev.Lookup(call, liar.session, bytes(16), more, 0, harness.clock() + 1)
    )
    assert found == ac.LookupResult((), "identity", is_empty=True)
    assert engine.found(blocks) == (CPU,) * 3


def test_a_chain_that_begins_in_the_middle_does_not_get_at_another_position():
    harness = open_harness()
    engine = engine_on(harness)
    blocks = engine.chain(range(3))
    engine.store(blocks)
    shifted = b"".join(block.header.block_hash for block in blocks[1:])
    found = harness.ask(
        lambda call: ev.Lookup(call, engine.session, bytes(16), shifted, 0, harness.clock() + 1)
    )
    assert found == ac.LookupResult((), "identity")
