"""Dialogues: what no slower tier has gets a last chance before it has to go."""

import pytest
from dialogue import CPU, REMOTE, SSD, engine_on, metric, open_harness

from kvtier.core.admission import AdmissionDecision, Admit, Offer, RefusalRule, Reject
from kvtier.core.limits import DEMOTION_BLOCKS_MAX
from kvtier.core.slow_tier import WriteMode
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.base import WriteOutcome
from kvtier.tiers.memory import MemoryTier


def fill(harness, engine, numbers):
    """Store blocks one by one while nothing is written below."""
    for number in numbers:
        engine.store(engine.chain([number]))


def down(harness, tier):
    harness.post(ev.TierUp(tier, is_up=False))


def up(harness, tier):
    harness.post(ev.TierUp(tier, is_up=True))


def written(harness, engine, tier, numbers):
    hashes = [engine.chain([number])[0].header.block_hash for number in numbers]
    present = harness.tiers[tier].contains(hashes, 1 << 62)
    return [number for number, is_there in zip(numbers, present, strict=True) if is_there]


def demoted(harness, tier):
    return metric(harness, "kvtier_demoted_blocks_total", tier=tier)


def test_blocks_that_missed_their_write_get_it_before_they_go():
    harness = open_harness(SSD, slots=16)
    engine = engine_on(harness)
    down(harness, SSD)
    fill(harness, engine, range(14))
    up(harness, SSD)
    harness.settle()
    assert written(harness, engine, SSD, range(14)) == []  # nothing is about to go
    fill(harness, engine, [100])
    harness.settle()
    assert written(harness, engine, SSD, range(14)) == list(range(14))
    assert demoted(harness, SSD) == 15  # the last one too: the way was full when it came
    harness.check_idle()


def test_those_that_were_used_go_first():
    harness = open_harness(SSD, slots=16)
    engine = engine_on(harness)
    down(harness, SSD)
    fill(harness, engine, range(16))
    for number in (3, 9):
        load = engine.load(engine.chain([number]))
        load.take()
        load.release()
    up(harness, SSD)
    (write,) = harness.waiting
    hashes = [engine.chain([number])[0].header.block_hash for number in (3, 9, 0, 1)]
    assert [block.header.block_hash for block in write.blocks] == hashes


def test_a_store_does_not_wait_for_it():
    harness = open_harness(SSD, slots=16)
    engine = engine_on(harness)
    down(harness, SSD)
    fill(harness, engine, range(16))
    up(harness, SSD)
    fill(harness, engine, range(100, 140))  # no write ends
    hashes = [engine.chain([number])[0].header for number in range(136, 140)]
    assert all(harness.holds(header, "cpu") for header in hashes)
    assert harness.node.cache.slots.held_bytes == 4 * 4096
    harness.settle()
    harness.check_idle()


def test_a_tier_that_refuses_is_asked_once_for_each_block():
    harness = open_harness(SSD, slots=16)
    engine = engine_on(harness)
    fill(harness, engine, range(16))
    num_offered = 0
    for _ in range(100):
        writes = [work for work in harness.waiting if isinstance(work, ac.Write)]
        if not writes:
            break
        harness.waiting.remove(writes[0])
        num_offered += len(writes[0].blocks)
        refused = (WriteOutcome.REJECTED,) * len(writes[0].blocks)
        harness.post(ev.WriteDone(writes[0].transfer, refused, b"", 0.001))
    assert not harness.waiting
    assert num_offered <= 2 * 16
    harness.check_idle()


def test_the_next_tier_takes_what_the_first_cannot():
    harness = open_harness(SSD, REMOTE, slots=16)
    engine = engine_on(harness)
    for tier in (SSD, REMOTE):
        down(harness, tier)
    fill(harness, engine, range(15))
    up(harness, REMOTE)
    harness.settle()
    assert written(harness, engine, REMOTE, range(15)) == list(range(15))
    assert (demoted(harness, SSD), demoted(harness, REMOTE)) == (0, 15)


def test_what_a_slower_tier_has_is_not_written_again():
    harness = open_harness(SSD, slots=16)
    engine = engine_on(harness)
    for number in range(40):
        fill(harness, engine, [number])
        harness.settle()
    assert demoted(harness, SSD) == 0


@pytest.mark.slow
def test_one_event_demotes_a_bounded_number():
    harness = open_harness(SSD, slots=1024)
    harness.is_checked = False  # a thousand events
    engine = engine_on(harness)
    down(harness, SSD)
    fill(harness, engine, range(1023))
    up(harness, SSD)
    assert demoted(harness, SSD) == DEMOTION_BLOCKS_MAX
    for _ in range(9):
        harness.post(ev.Tick())
    assert demoted(harness, SSD) == 4 * DEMOTION_BLOCKS_MAX  # a quarter of the arena waits then


class RefuseBelow:
    """Takes everything into the CPU tier, and nothing from there; counts what it is offered."""

    num_refused = 0

    def decide(self, offer: Offer) -> AdmissionDecision:
        if offer.tier is CPU:
            return Admit(offer.num_blocks)
        self.num_refused += offer.num_blocks
        return Reject(RefusalRule.WORTH)

    def note_allowance(self, tier, bytes_per_s):
        """Need none."""


def test_one_event_offers_a_bounded_number_also_where_all_are_refused():
    """To be refused takes a block as long as to be taken, and lookups wait meanwhile."""
    admission = RefuseBelow()
    settings = HarnessSettings(
        num_slabs=1, slab_bytes=1024 * 4096, write={SSD: WriteMode.DEMOTE}, num_workers=2
    )
    harness = NodeHarness({SSD: MemoryTier(1 << 20)}, settings, admission=admission)
    harness.is_checked = False  # a thousand events
    engine = engine_on(harness)
    down(harness, SSD)
    fill(harness, engine, range(1023))
    assert admission.num_refused == 0
    up(harness, SSD)
    assert admission.num_refused == DEMOTION_BLOCKS_MAX
    for _ in range(9):
        harness.post(ev.Tick())
    assert admission.num_refused == 4 * DEMOTION_BLOCKS_MAX, "as far as it looks ahead, once each"
