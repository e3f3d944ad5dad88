"""Dialogues: a lookup asks the shared tier only when that can pay."""

import pytest
from dialogue import CPU, MS, REMOTE, drop, empty_cpu, engine_on, metric, open_harness

from kvtier.core.limits import ABSENT_NS, EXISTENCE_CHECK_PAUSE_NS
from kvtier.core.slow_tier import AdminState
from kvtier.node.flow.pending_lookup import _Absent
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.memory import MemoryTier


def asking(min_tokens=0):
    settings = HarnessSettings(num_slabs=1, slab_bytes=64 * 4096, min_tokens=min_tokens)
    harness = NodeHarness({REMOTE: MemoryTier(1 << 20, name=REMOTE)}, settings)
    return harness, engine_on(harness)


def outcomes(harness):
    names = ("found", "absent", "late", "too_few", "known_absent", "out", "busy")
    counts = {n: metric(harness, "kvtier_probed_lookups_total", outcome=n) for n in names}
    return {name: count for name, count in counts.items() if count}


def look(harness, engine, blocks):
    """Look up, let the tier answer if it is asked; returns whether it was."""
    call = engine.lookup(blocks)
    is_asked = bool(harness.waiting)
    harness.settle()
    engine.answer(call)
    return is_asked


def test_too_few_missing_tokens_are_not_asked_for():
    harness, engine = asking(min_tokens=256)  # four blocks of 64
    assert not look(harness, engine, engine.chain(range(3)))
    assert look(harness, engine, engine.chain(range(4)))
    harness.settle()
    engine.store(engine.chain(range(10, 16)))
    harness.settle()
    assert not look(harness, engine, engine.chain(range(10, 18)))  # two are missing
    assert look(harness, engine, engine.chain(range(10, 20)))
    assert outcomes(harness) == {"too_few": 2, "absent": 2}


def test_what_is_all_here_needs_no_query():
    harness, engine = asking()
    engine.store(engine.chain(range(3)))
    harness.settle()
    assert not look(harness, engine, engine.chain(range(3)))
    assert outcomes(harness) == {}


def test_what_was_absent_a_moment_ago_is_not_asked_for_again():
    harness, engine = asking()
    blocks, longer = engine.chain(range(4)), engine.chain(range(9))
    assert look(harness, engine, blocks)
    assert not look(harness, engine, blocks)
    assert not look(harness, engine, longer)
    assert look(harness, engine, engine.chain([7]))
    harness.advance(ABSENT_NS)
    assert look(harness, engine, blocks)
    assert outcomes(harness) == {"absent": 3, "known_absent": 2}


def test_the_first_block_lacking_behind_those_found_is_remembered():
    harness, engine = asking()
    blocks = engine.chain(range(4))
    harness.tiers[REMOTE].write(blocks[:2], 1 << 62)
    assert look(harness, engine, blocks)
    assert not look(harness, engine, blocks)
    assert outcomes(harness) == {"found": 1, "known_absent": 1}


def test_what_this_node_wrote_is_asked_for_again():
    harness, engine = asking()
    blocks = engine.chain(range(2))
    assert look(harness, engine, blocks)
    engine.store(blocks)
    harness.settle()
    empty_cpu(harness)
    harness.tiers[REMOTE].remove([blocks[0].header.block_hash], 1 << 62)
    load = engine.load(blocks)
    harness.settle()
    load.take()
    load.release()
    assert look(harness, engine, blocks)


def test_a_tier_that_is_out_is_not_asked():
    harness, engine = asking()
    harness.post(ev.TierUp(REMOTE, is_up=False))
    assert not look(harness, engine, engine.chain(range(4)))
    harness.post(ev.TierUp(REMOTE, is_up=True))
    call = engine.lookup(engine.chain(range(4)))
    harness.fail(harness.waiting[0])
    assert engine.answer(call) == ac.LookupResult((), "absent")
    assert look(harness, engine, engine.chain(range(4)))  # no answer is not an absence
    assert outcomes(harness) == {"out": 2, "absent": 1}


def test_a_deadline_that_leaves_no_time_is_respected():
    harness, engine = asking()
    call = engine.lookup(engine.chain(range(4)), within_ns=20 * MS)
    assert engine.answer(call) == ac.LookupResult((), "absent")
    assert outcomes(harness) == {"late": 1}


@pytest.mark.parametrize("num_late", [2, 3, 5, 12])
def test_late_queries_are_followed_by_a_pause(num_late):
    harness, engine = asking()
    calls = [
        engine.lookup(engine.chain([number]), within_ns=100 * MS) for number in range(num_late)
    ]
    harness.advance(100 * MS)
    assert all(call in harness.answers for call in calls)
    harness.waiting.clear()
    pause_ns = min(EXISTENCE_CHECK_PAUSE_NS << (num_late - 2), 8_000 * MS) - 20 * MS
    harness.advance(pause_ns - 1)
    assert not look(harness, engine, engine.chain([1000]))
    harness.advance(1)
    assert look(harness, engine, engine.chain([1000]))
    calls = [engine.lookup(engine.chain([n]), within_ns=100 * MS) for n in (2000,)]
    harness.advance(100 * MS)
    harness.waiting.clear()
    assert look(harness, engine, engine.chain([3000]))  # one late again is not many in a row
    assert outcomes(harness)["late"] == num_late + 1


def test_absences_are_bounded(monkeypatch):
    monkeypatch.setattr("kvtier.node.flow.pending_lookup.ABSENT_HASHES_MAX", 3)
    absent = _Absent()
    for number in range(5):
        absent.add(bytes([number]), number)
    assert [absent.has(bytes([n]), 5) for n in range(5)] == [False, False, True, True, True]
    absent.discard(bytes([4]))
    assert not absent.has(bytes([4]), 5)
    assert not absent.has(bytes([3]), 3 + ABSENT_NS)


def test_a_node_without_a_shared_tier_asks_nobody():
    harness = open_harness()
    engine = engine_on(harness)
    engine.store(engine.chain([1]))
    assert engine.found(engine.chain([1, 2])) == (CPU,)
    assert outcomes(harness) == {}


def with_unverified_blocks(num_blocks=4, *, in_cpu=False):
    """Return a harness whose remote tier has unverified blocks."""
    harness, engine = asking()
    blocks = engine.chain(range(num_blocks))
    engine.store(blocks)
    harness.settle()
    if not in_cpu:
        empty_cpu(harness)
    harness.post(ev.MarkUnverified(REMOTE, 0, harness.node.cache.index.extent))
    return harness, engine, blocks


def verified(harness, blocks, *present):
    hashes = b"".join(block.header.block_hash for block in blocks)
    harness.post(ev.BlocksVerified(REMOTE, hashes, present))


def test_unverified_blocks_are_asked_for_before_they_count():
    harness, engine, blocks = with_unverified_blocks()
    assert not any(harness.holds(block.header, REMOTE) for block in blocks)
    harness.tiers[REMOTE].remove([blocks[3].header.block_hash], 1 << 62)
    call = engine.lookup(blocks)
    assert isinstance(harness.waiting[0], ac.ExistsQuery)
    harness.settle()
    assert engine.answer(call).runs == ((REMOTE, 3),)
    harness.check_idle()


def test_an_unverified_block_is_stored_again():
    harness, engine, blocks = with_unverified_blocks()
    engine.store(blocks)
    (work,) = harness.waiting
    assert (work.tier, len(work.blocks)) == (REMOTE, 4)
    verified(harness, blocks, *[False] * 4)  # a reply from before the write is ignored
    harness.settle()
    assert all(harness.holds(block.header, REMOTE) for block in blocks)


def test_what_is_verified_counts_again_and_what_is_lost_does_not():
    harness, _, blocks = with_unverified_blocks()
    verified(harness, blocks, True, False, None, True)
    assert [harness.holds(block.header, REMOTE) for block in blocks] == [True, False, False, True]
    assert len(harness.node.cache.index) == 3, "the lost block is forgotten"
    assert metric(harness, "kvtier_evicted_blocks_total", tier="remote", reason="lost") == 1
    verified(harness, blocks, *[True] * 4)
    assert harness.holds(blocks[2].header, REMOTE)
    harness.check_idle()


@pytest.mark.parametrize("how", ["verified", "lost"])
def test_what_a_tier_lost_is_written_to_it_again_from_the_cpu_tier(how):
    harness, engine, blocks = with_unverified_blocks(in_cpu=True)
    hashes = [block.header.block_hash for block in blocks]
    harness.tiers[REMOTE].remove(hashes[:2], 1 << 62)
    verified(harness, blocks, how == "lost", how == "lost", True, True)
    if how == "lost":
        harness.post(ev.BlocksLost(REMOTE, b"".join(hashes[:2]), "lost"))
    harness.settle()
    assert harness.tiers[REMOTE].contains(hashes, 1 << 62) == [True] * 4
    empty_cpu(harness)
    assert engine.found(blocks) == (REMOTE,) * 4


def test_unverified_blocks_are_dropped_like_others():
    harness, _, _ = with_unverified_blocks()
    call = drop(harness, REMOTE)
    harness.settle()
    assert harness.answers[call][0].num_blocks == 4
    assert len(harness.node.cache.index) == 0


def test_a_detached_tier_keeps_no_unverified_blocks():
    harness, _, _ = with_unverified_blocks()
    harness.post(ev.SetAdminState(REMOTE, AdminState.DETACHED))
    harness.post(ev.ForgetRows(REMOTE, 0, harness.node.cache.index.extent))
    assert len(harness.node.cache.index) == 0


def test_a_gap_that_is_unknown_is_asked_for_again():
    harness, engine = asking()
    blocks = engine.chain(range(3))
    call = engine.lookup(blocks)
    (query,) = harness.waiting
    harness.waiting.clear()
    harness.post(ev.ExistsQueryDone(query.query, (None, True, True)))
    engine.answer(call)
    assert look(harness, engine, blocks), "the server with the first block may be back"
