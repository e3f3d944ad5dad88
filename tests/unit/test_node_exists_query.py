"""Dialogues: a lookup asks the shared tier only when that can pay."""

import pytest
from dialogue import CPU, MS, REMOTE, drop, empty_cpu, engine_on, metric, open_stage

from kvtier.core.limits import ABSENT_NS, EXISTENCE_CHECK_PAUSE_NS
from kvtier.core.slow_tier import AdminState
from kvtier.node.flow.pending_lookup import _Absent
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.memory import MemoryTier


def asking(min_tokens=0):
    settings = HarnessSettings(num_slabs=1, slab_bytes=64 * 4096, min_tokens=min_tokens)
    stage = NodeHarness({REMOTE: MemoryTier(1 << 20, name=REMOTE)}, settings)
    return stage, engine_on(stage)


def outcomes(stage):
    names = ("found", "absent", "late", "too_few", "known_absent", "out", "busy")
    counts = {n: metric(stage, "kvtier_probed_lookups_total", outcome=n) for n in names}
    return {name: count for name, count in counts.items() if count}


def look(stage, engine, blocks):
    """Look up, let the tier answer if it is asked; returns whether it was."""
    call = engine.lookup(blocks)
    is_asked = bool(stage.waiting)
    stage.settle()
    engine.answer(call)
    return is_asked


def test_too_few_missing_tokens_are_not_asked_for():
    stage, engine = asking(min_tokens=256)  # four blocks of 64
    assert not look(stage, engine, engine.chain(range(3)))
    assert look(stage, engine, engine.chain(range(4)))
    stage.settle()
    engine.store(engine.chain(range(10, 16)))
    stage.settle()
    assert not look(stage, engine, engine.chain(range(10, 18)))  # two are missing
    assert look(stage, engine, engine.chain(range(10, 20)))
    assert outcomes(stage) == {"too_few": 2, "absent": 2}


def test_what_is_all_here_needs_no_query():
    stage, engine = asking()
    engine.store(engine.chain(range(3)))
    stage.settle()
    assert not look(stage, engine, engine.chain(range(3)))
    assert outcomes(stage) == {}


def test_what_was_absent_a_moment_ago_is_not_asked_for_again():
    stage, engine = asking()
    blocks, longer = engine.chain(range(4)), engine.chain(range(9))
    assert look(stage, engine, blocks)
    assert not look(stage, engine, blocks)
    assert not look(stage, engine, longer)
    assert look(stage, engine, engine.chain([7]))
    stage.advance(ABSENT_NS)
    assert look(stage, engine, blocks)
    assert outcomes(stage) == {"absent": 3, "known_absent": 2}


def test_the_first_block_lacking_behind_those_found_is_remembered():
    stage, engine = asking()
    blocks = engine.chain(range(4))
    stage.tiers[REMOTE].write(blocks[:2], 1 << 62)
    assert look(stage, engine, blocks)
    assert not look(stage, engine, blocks)
    assert outcomes(stage) == {"found": 1, "known_absent": 1}


def test_what_this_node_wrote_is_asked_for_again():
    stage, engine = asking()
    blocks = engine.chain(range(2))
    assert look(stage, engine, blocks)
    engine.store(blocks)
    stage.settle()
    empty_cpu(stage)
    stage.tiers[REMOTE].remove([blocks[0].header.block_hash], 1 << 62)
    load = engine.load(blocks)
    stage.settle()
    load.take()
    load.release()
    assert look(stage, engine, blocks)


def test_a_tier_that_is_out_is_not_asked():
    stage, engine = asking()
    stage.post(ev.TierUp(REMOTE, is_up=False))
    assert not look(stage, engine, engine.chain(range(4)))
    stage.post(ev.TierUp(REMOTE, is_up=True))
    call = engine.lookup(engine.chain(range(4)))
    stage.fail(stage.waiting[0])
    assert engine.answer(call) == ac.LookupResult((), "absent")
    assert look(stage, engine, engine.chain(range(4)))  # no answer is not an absence
    assert outcomes(stage) == {"out": 2, "absent": 1}


def test_a_deadline_that_leaves_no_time_is_respected():
    stage, engine = asking()
    call = engine.lookup(engine.chain(range(4)), within_ns=20 * MS)
    assert engine.answer(call) == ac.LookupResult((), "absent")
    assert outcomes(stage) == {"late": 1}


@pytest.mark.parametrize("num_late", [2, 3, 5, 12])
def test_late_queries_are_followed_by_a_pause(num_late):
    stage, engine = asking()
    calls = [
        engine.lookup(engine.chain([number]), within_ns=100 * MS) for number in range(num_late)
    ]
    stage.advance(100 * MS)
    assert all(call in stage.answers for call in calls)
    stage.waiting.clear()
    pause_ns = min(EXISTENCE_CHECK_PAUSE_NS << (num_late - 2), 8_000 * MS) - 20 * MS
    stage.advance(pause_ns - 1)
    assert not look(stage, engine, engine.chain([1000]))
    stage.advance(1)
    assert look(stage, engine, engine.chain([1000]))
    calls = [engine.lookup(engine.chain([n]), within_ns=100 * MS) for n in (2000,)]
    stage.advance(100 * MS)
    stage.waiting.clear()
    assert look(stage, engine, engine.chain([3000]))  # one late again is not many in a row
    assert outcomes(stage)["late"] == num_late + 1


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
    stage = open_stage()
    engine = engine_on(stage)
    engine.store(engine.chain([1]))
    assert engine.found(engine.chain([1, 2])) == (CPU,)
    assert outcomes(stage) == {}


def with_unverified_blocks(num_blocks=4, *, in_cpu=False):
    """Return a stage whose remote tier has unverified blocks."""
    stage, engine = asking()
    blocks = engine.chain(range(num_blocks))
    engine.store(blocks)
    stage.settle()
    if not in_cpu:
        empty_cpu(stage)
    stage.post(ev.MarkUnverified(REMOTE, 0, stage.node.cache.index.extent))
    return stage, engine, blocks


def verified(stage, blocks, *present):
    hashes = b"".join(block.header.block_hash for block in blocks)
    stage.post(ev.BlocksVerified(REMOTE, hashes, present))


def test_unverified_blocks_are_asked_for_before_they_count():
    stage, engine, blocks = with_unverified_blocks()
    assert not any(stage.holds(block.header, REMOTE) for block in blocks)
    stage.tiers[REMOTE].remove([blocks[3].header.block_hash], 1 << 62)
    call = engine.lookup(blocks)
    assert isinstance(stage.waiting[0], ac.ExistsQuery)
    stage.settle()
    assert engine.answer(call).runs == ((REMOTE, 3),)
    stage.check_idle()


def test_an_unverified_block_is_stored_again():
    stage, engine, blocks = with_unverified_blocks()
    engine.store(blocks)
    (work,) = stage.waiting
    assert (work.tier, len(work.blocks)) == (REMOTE, 4)
    verified(stage, blocks, *[False] * 4)  # a reply from before the write is ignored
    stage.settle()
    assert all(stage.holds(block.header, REMOTE) for block in blocks)


def test_what_is_verified_counts_again_and_what_is_lost_does_not():
    stage, _, blocks = with_unverified_blocks()
    verified(stage, blocks, True, False, None, True)
    assert [stage.holds(block.header, REMOTE) for block in blocks] == [True, False, False, True]
    assert len(stage.node.cache.index) == 3, "the lost block is forgotten"
    assert metric(stage, "kvtier_evicted_blocks_total", tier="remote", reason="lost") == 1
    verified(stage, blocks, *[True] * 4)
    assert stage.holds(blocks[2].header, REMOTE)
    stage.check_idle()


@pytest.mark.parametrize("how", ["verified", "lost"])
def test_what_a_tier_lost_is_written_to_it_again_from_the_cpu_tier(how):
    stage, engine, blocks = with_unverified_blocks(in_cpu=True)
    hashes = [block.header.block_hash for block in blocks]
    stage.tiers[REMOTE].remove(hashes[:2], 1 << 62)
    verified(stage, blocks, how == "lost", how == "lost", True, True)
    if how == "lost":
        stage.post(ev.BlocksLost(REMOTE, b"".join(hashes[:2]), "lost"))
    stage.settle()
    assert stage.tiers[REMOTE].contains(hashes, 1 << 62) == [True] * 4
    empty_cpu(stage)
    assert engine.found(blocks) == (REMOTE,) * 4


def test_unverified_blocks_are_dropped_like_others():
    stage, _, _ = with_unverified_blocks()
    call = drop(stage, REMOTE)
    stage.settle()
    assert stage.answers[call][0].num_blocks == 4
    assert len(stage.node.cache.index) == 0


def test_a_detached_tier_keeps_no_unverified_blocks():
    stage, _, _ = with_unverified_blocks()
    stage.post(ev.SetAdminState(REMOTE, AdminState.DETACHED))
    stage.post(ev.ForgetRows(REMOTE, 0, stage.node.cache.index.extent))
    assert len(stage.node.cache.index) == 0


def test_a_gap_that_is_unknown_is_asked_for_again():
    stage, engine = asking()
    blocks = engine.chain(range(3))
    call = engine.lookup(blocks)
    (query,) = stage.waiting
    stage.waiting.clear()
    stage.post(ev.ExistsQueryDone(query.query, (None, True, True)))
    engine.answer(call)
    assert look(stage, engine, blocks), "the server with the first block may be back"
