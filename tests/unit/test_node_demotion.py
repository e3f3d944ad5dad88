"""Dialogues: what no slower tier has gets a last chance before it has to go."""

import pytest
from dialogue import CPU, REMOTE, SSD, engine_on, metric, open_stage

from kvtier.core.admission import AdmissionDecision, Admit, Offer, RefusalRule, Reject
from kvtier.core.limits import DEMOTION_BLOCKS_MAX
from kvtier.core.slow_tier import WriteMode
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.base import WriteOutcome
from kvtier.tiers.memory import MemoryTier


def fill(stage, engine, numbers):
    """Store blocks one by one while nothing is written below."""
    for number in numbers:
        engine.store(engine.chain([number]))


def down(stage, tier):
    stage.post(ev.TierUp(tier, is_up=False))


def up(stage, tier):
    stage.post(ev.TierUp(tier, is_up=True))


def written(stage, engine, tier, numbers):
    hashes = [engine.chain([number])[0].header.block_hash for number in numbers]
    present = stage.tiers[tier].contains(hashes, 1 << 62)
    return [number for number, is_there in zip(numbers, present, strict=True) if is_there]


def demoted(stage, tier):
    return metric(stage, "kvtier_demoted_blocks_total", tier=tier)


def test_blocks_that_missed_their_write_get_it_before_they_go():
    stage = open_stage(SSD, slots=16)
    engine = engine_on(stage)
    down(stage, SSD)
    fill(stage, engine, range(14))
    up(stage, SSD)
    stage.settle()
    assert written(stage, engine, SSD, range(14)) == []  # nothing is about to go
    fill(stage, engine, [100])
    stage.settle()
    assert written(stage, engine, SSD, range(14)) == list(range(14))
    assert demoted(stage, SSD) == 15  # the last one too: the way was full when it came
    stage.check_idle()


def test_those_that_were_used_go_first():
    stage = open_stage(SSD, slots=16)
    engine = engine_on(stage)
    down(stage, SSD)
    fill(stage, engine, range(16))
    for number in (3, 9):
        load = engine.load(engine.chain([number]))
        load.take()
        load.release()
    up(stage, SSD)
    (write,) = stage.waiting
    hashes = [engine.chain([number])[0].header.block_hash for number in (3, 9, 0, 1)]
    assert [block.header.block_hash for block in write.blocks] == hashes


def test_a_store_does_not_wait_for_it():
    stage = open_stage(SSD, slots=16)
    engine = engine_on(stage)
    down(stage, SSD)
    fill(stage, engine, range(16))
    up(stage, SSD)
    fill(stage, engine, range(100, 140))  # no write ends
    hashes = [engine.chain([number])[0].header for number in range(136, 140)]
    assert all(stage.holds(header, "cpu") for header in hashes)
    assert stage.node.cache.slots.held_bytes == 4 * 4096
    stage.settle()
    stage.check_idle()


def test_a_tier_that_refuses_is_asked_once_for_each_block():
    stage = open_stage(SSD, slots=16)
    engine = engine_on(stage)
    fill(stage, engine, range(16))
    num_offered = 0
    for _ in range(100):
        writes = [work for work in stage.waiting if isinstance(work, ac.Write)]
        if not writes:
            break
        stage.waiting.remove(writes[0])
        num_offered += len(writes[0].blocks)
        refused = (WriteOutcome.REJECTED,) * len(writes[0].blocks)
        stage.post(ev.WriteDone(writes[0].transfer, refused, b"", 0.001))
    assert not stage.waiting
    assert num_offered <= 2 * 16
    stage.check_idle()


def test_the_next_tier_takes_what_the_first_cannot():
    stage = open_stage(SSD, REMOTE, slots=16)
    engine = engine_on(stage)
    for tier in (SSD, REMOTE):
        down(stage, tier)
    fill(stage, engine, range(15))
    up(stage, REMOTE)
    stage.settle()
    assert written(stage, engine, REMOTE, range(15)) == list(range(15))
    assert (demoted(stage, SSD), demoted(stage, REMOTE)) == (0, 15)


def test_what_a_slower_tier_has_is_not_written_again():
    stage = open_stage(SSD, slots=16)
    engine = engine_on(stage)
    for number in range(40):
        fill(stage, engine, [number])
        stage.settle()
    assert demoted(stage, SSD) == 0


@pytest.mark.slow
def test_one_event_demotes_a_bounded_number():
    stage = open_stage(SSD, slots=1024)
    stage.is_checked = False  # a thousand events
    engine = engine_on(stage)
    down(stage, SSD)
    fill(stage, engine, range(1023))
    up(stage, SSD)
    assert demoted(stage, SSD) == DEMOTION_BLOCKS_MAX
    for _ in range(9):
        stage.post(ev.Tick())
    assert demoted(stage, SSD) == 4 * DEMOTION_BLOCKS_MAX  # a quarter of the arena waits then


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
    stage = NodeHarness({SSD: MemoryTier(1 << 20)}, settings, admission=admission)
    stage.is_checked = False  # a thousand events
    engine = engine_on(stage)
    down(stage, SSD)
    fill(stage, engine, range(1023))
    assert admission.num_refused == 0
    up(stage, SSD)
    assert admission.num_refused == DEMOTION_BLOCKS_MAX
    for _ in range(9):
        stage.post(ev.Tick())
    assert admission.num_refused == 4 * DEMOTION_BLOCKS_MAX, "as far as it looks ahead, once each"
