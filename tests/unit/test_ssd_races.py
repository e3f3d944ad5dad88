"""A store of which two threads want something at once, or that breaks at the wrong moment."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ssd_files import BLOCK_BYTES, Opener, blocks_of

from kvtier.core.identity import EVERYTHING, Selection, tenant_digest
from kvtier.testing.block import make_chain
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import MissReason
from kvtier.tiers.ssd.options import SsdOptions


class Gates:
    """A hook at which threads stand still at some steps until they are let through."""

    def __init__(self, *steps: str) -> None:
        self.reached = {step: threading.Event() for step in steps}
        self.opened = {step: threading.Event() for step in steps}

    def __call__(self, step: str) -> None:
        if step in self.reached:
            self.reached[step].set()
            assert self.opened[step].wait(30)

    def open_all(self) -> None:
        for gate in self.opened.values():
            gate.set()


def test_a_block_that_is_purged_while_it_is_read_is_no_damaged_one(ssd: Opener) -> None:
    """Else an operator who drops a tenant would be told that the disk is dying."""
    gates = Gates("record.read", "record.erase")
    tenant = tenant_digest("one")
    stays, goes = blocks_of([1]), make_chain([2, 3], BLOCK_BYTES, tenant=tenant)
    tier = ssd(options=SsdOptions(hook=gates))
    store(tier, *stays, *goes)
    with ThreadPoolExecutor(2) as threads:
        try:
            reading = threads.submit(fetch, tier, *goes)
            assert gates.reached["record.read"].wait(30), "it knows where they are"
            purging = threads.submit(tier.purge, Selection(tenant=tenant), soon())
            assert gates.reached["record.erase"].wait(30), "the payloads are zeros"
            gates.opened["record.read"].set()
            assert reading.result(30) == [MissReason.ABSENT] * 2
        finally:
            gates.open_all()
        assert purging.result(30).num_blocks == 2
    assert tier.usage().detail["quarantined_blocks"] == 0
    assert fetch(tier, *stays) == [None]


def test_a_store_that_could_not_be_opened_is_nobodys(ssd: Opener) -> None:
    def break_down(_step: str) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        ssd(options=SsdOptions(hook=break_down))
    store(ssd(), *blocks_of([1]))


def test_what_is_removed_while_it_is_read_does_not_come_back(ssd: Opener) -> None:
    gates, blocks = Gates("record.read"), blocks_of([1, 2])
    tier = ssd(options=SsdOptions(hook=gates))
    store(tier, *blocks)
    with ThreadPoolExecutor(1) as threads:
        try:
            reading = threads.submit(fetch, tier, *blocks)
            assert gates.reached["record.read"].wait(30)
            tier.remove([each.header.block_hash for each in blocks], soon())
            assert not ssd.segments(), "a crash would bring them back"
        finally:
            gates.open_all()
        assert reading.result(30) == [None] * 2
    assert tier.usage().used_bytes == 0


def test_a_read_that_outlives_its_store_takes_nothing_from_the_next(ssd: Opener) -> None:
    """The file that it read had a name, which is another file's by then."""
    gates, before, after = Gates("record.read"), blocks_of([1]), blocks_of([2])
    tier = ssd(options=SsdOptions(hook=gates))
    store(tier, *before)
    with ThreadPoolExecutor(1) as threads:
        try:
            reading = threads.submit(fetch, tier, *before)
            assert gates.reached["record.read"].wait(30)
            tier.purge(EVERYTHING, soon())
            tier.close()
            successor = ssd()
            store(successor, *after)
        finally:
            gates.open_all()
        reading.result(30)
    assert fetch(successor, *after) == [None]
