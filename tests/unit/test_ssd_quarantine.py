"""Damaged blocks: a miss with its reason, out of service at once and for good, neighbours sound."""

import errno
import os
from pathlib import Path

import pytest
from ssd_files import RECORD_BYTES, Opener, blocks_of, damage, present

from kvtier.errors import TierError
from kvtier.testing.block import make_block, read_of
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import MissReason
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState


def state_of(path: Path, place: int) -> RecordState | None:
    """Return the state of a segment's record as it is on the disk."""
    with path.open("rb") as file:
        file.seek(4096 + place * RECORD_BYTES)
        head = RecordHead.unpack(file.read(RECORD_HEAD_BYTES), int(path.stem, 16))
    return None if head is None else head.state


@pytest.mark.parametrize("count", [3, 15], ids=["appended to", "sealed"])
def test_a_damaged_block_does_not_come_back(ssd: Opener, count: int) -> None:
    tier = ssd()
    blocks = blocks_of(range(count))
    store(tier, *blocks)
    path = ssd.segments()[0]
    damage(path, 4096 + RECORD_BYTES + 4096 + 11)
    assert fetch(tier, *blocks)[:3] == [None, MissReason.CHECKSUM, None]
    assert tier.usage().detail["quarantined_blocks"] == 1
    assert state_of(path, 1) is RecordState.LIVE  # the read did not wait for a write
    store(tier, make_block(99))
    assert state_of(path, 1) is RecordState.QUARANTINED
    tier.close()
    tier = ssd()
    assert present(tier, blocks) == [number != 1 for number in range(count)]
    store(tier, blocks[1])
    assert fetch(tier, *blocks) == [None] * count
    tier.close()
    assert fetch(ssd(), *blocks) == [None] * count


def test_a_clean_stop_marks_what_waits(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(25))
    store(tier, *blocks)
    for path, place in ((ssd.segments()[0], 4), (ssd.segments()[1], 0), (ssd.segments()[2], 2)):
        damage(path, 4096 + place * RECORD_BYTES + 5000)
    bad = [4, 10, 22]
    assert [number for number, verdict in enumerate(fetch(tier, *blocks)) if verdict] == bad
    tier.close()
    assert present(ssd(), blocks) == [number not in bad for number in range(25)]


def test_every_record_of_a_spoilt_file_is_one_miss_each(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    path = ssd.segments()[0]
    damage(path, 4096, bytes(path.stat().st_size - 8192))
    expected = [MissReason.HEADER] * 10 + [None] * 5
    assert fetch(tier, *blocks) == expected
    assert tier.usage().detail["quarantined_blocks"] == 10
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 15
    tier.close()
    assert fetch(ssd(), *blocks) == [None] * 15


def test_a_block_that_is_asked_for_twice_is_damaged_once(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    damage(ssd.segments()[0], 4096 + 5000)
    read = fetch(tier, blocks[0], blocks[1], blocks[0])
    assert read == [MissReason.CHECKSUM, None, MissReason.ABSENT]
    assert tier.usage().detail["quarantined_blocks"] == 1


def test_a_fault_on_the_way_is_not_one_of_the_record(
    ssd: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come wrong once, over a loose cable, are asked for once more."""
    tier = ssd()
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    flips = [1]
    preadv = os.preadv

    def flipping(fd: int, pieces: list[memoryview], offset: int) -> int:
        num_bytes = preadv(fd, pieces, offset)
        if flips:
            pieces[-1][flips.pop()] ^= 1
        return num_bytes

    monkeypatch.setattr(os, "preadv", flipping)
    assert fetch(tier, *blocks) == [None] * 3
    assert not flips
    assert tier.usage().detail["quarantined_blocks"] == 0


def test_a_medium_that_fails_deletes_nothing(ssd: Opener) -> None:
    faults: list[OSError] = []

    def hook(step: str) -> None:
        if step == "record.read" and faults:
            raise faults.pop()

    tier = ssd(options=SsdOptions(hook=hook))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    faults.append(OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(TierError):
        fetch(tier, *blocks)
    assert present(tier, blocks) == [False] * 3
    assert tier.usage().detail["quarantined_blocks"] == 0
    tier.close()
    assert fetch(ssd(), *blocks) == [None] * 3


def test_a_mark_that_cannot_be_written_costs_nothing_but_another_miss(ssd: Opener) -> None:
    faults: list[OSError] = []

    def hook(step: str) -> None:
        if step == "record.remove":
            faults.append(OSError(errno.EIO, os.strerror(errno.EIO)))
            raise faults[-1]

    tier = ssd(options=SsdOptions(hook=hook))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    damage(ssd.segments()[0], 4096 + RECORD_BYTES + 5000)
    assert fetch(tier, *blocks) == [None, MissReason.CHECKSUM, None]
    store(tier, make_block(99))
    assert faults
    tier.close()
    tier = ssd()
    assert fetch(tier, *blocks) == [None, MissReason.CHECKSUM, None]


def test_who_asks_wrongly_takes_nothing_from_the_owner(ssd: Opener) -> None:
    tier = ssd(options=SsdOptions(DirectIO.OFF))
    block = make_block(1)
    store(tier, block)
    wanted = read_of(block)
    # As many bits of both digests as the index keeps are equal: only the record tells them apart.
    key_space = wanted.key_space[:4] + bytes(12)
    wrong = type(wanted)(
        wanted.block_hash, key_space, wanted.tenant, wanted.payload_bytes, wanted.into
    )
    assert tier.read([wrong], soon()) == [MissReason.IDENTITY]
    assert fetch(tier, block) == [None]
    assert tier.usage().detail["quarantined_blocks"] == 0
