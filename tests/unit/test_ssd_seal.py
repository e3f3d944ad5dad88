"""Sealed blocks in the store: encrypted at rest, opened with any key of the ring, else a miss."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ssd_files import BLOCK_BYTES, CAPACITY_BYTES, RECORD_BYTES, Opener, blocks_of, damage, present

from kvtier.core.identity import unpack_headers
from kvtier.testing.block import make_block, make_chain
from kvtier.testing.tier_contract import TierContract, fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason, Tier, WriteOutcome
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.store import SsdTier

FIRST, SECOND = "first " + "11" * 32, "second " + "22" * 32


def ring_of(directory: Path, *lines: str) -> KeyRing:
    path = directory / "keys"
    path.touch(mode=0o600)
    path.write_text("\n".join(lines))
    return KeyRing.load(path)


def sealed(tmp_path: Path, *lines: str, mode: SealMode = SealMode.ENCRYPT) -> SsdOptions:
    return SsdOptions(seal=Seal(mode, ring_of(tmp_path, *lines), "ssd"))


class TestSealedTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = SsdTier(tmp_path / "ssd", 16 << 20, 1 << 20, sealed(tmp_path, FIRST))
        yield tier
        tier.close()

    def test_lists_its_headers(self, tier: Tier) -> None:
        """As they are on the disk: with the tag, which tells nothing, for the checksum."""
        blocks = make_chain(range(6))
        store(tier, *blocks)
        listed = unpack_headers(tier.headers())
        assert [header.identity() for header in listed] == [b.header.identity() for b in blocks]
        assert not {header.checksum for header in listed} & {b.header.checksum for b in blocks}


def content(ssd: Opener) -> bytes:
    return b"".join(path.read_bytes() for path in ssd.segments())


@pytest.mark.parametrize("direct_io", [DirectIO.AUTO, DirectIO.OFF])
@pytest.mark.parametrize("payload_bytes", [0, 1, 4096, 5000, BLOCK_BYTES])
def test_what_is_on_the_disk_is_not_what_was_stored(
    ssd: Opener, tmp_path: Path, direct_io: DirectIO, payload_bytes: int
) -> None:
    seal = Seal(SealMode.ENCRYPT, ring_of(tmp_path, FIRST), "ssd")
    options = SsdOptions(direct_io, Durability.BATCH, seal=seal)
    blocks = make_chain(range(9), payload_bytes)
    before = [bytes(block.payload) for block in blocks]
    tier = ssd(options=options)
    store(tier, *blocks)
    assert [bytes(block.payload) for block in blocks] == before
    assert fetch(tier, *blocks) == [None] * 9
    for block in blocks:
        assert len(block.payload) < 16 or bytes(block.payload[:16]) not in content(ssd)
        assert block.header.checksum not in content(ssd)
    tier.close()
    assert fetch(ssd(options=options), *blocks) == [None] * 9


def test_keys_are_rotated_without_losing_a_block(ssd: Opener, tmp_path: Path) -> None:
    blocks = blocks_of(range(4))
    for lines, number in (((FIRST,), 0), ((SECOND, FIRST), 1), ((SECOND, FIRST), 2)):
        tier = ssd(options=sealed(tmp_path, *lines))
        store(tier, blocks[number])
        tier.close()
    tier = ssd(options=sealed(tmp_path, SECOND))
    assert fetch(tier, *blocks[:3]) == [MissReason.SEAL, None, None]
    store(tier, blocks[0])
    assert fetch(tier, *blocks[:3]) == [None] * 3
    assert tier.usage().detail["quarantined_blocks"] == 0


def test_without_the_key_a_block_is_a_miss_and_is_there_again_with_it(
    ssd: Opener, tmp_path: Path
) -> None:
    blocks = blocks_of(range(3))
    tier = ssd(options=sealed(tmp_path, FIRST))
    store(tier, *blocks)
    tier.close()
    tier = ssd()
    assert fetch(tier, *blocks) == [MissReason.SEAL] * 3
    assert present(tier, blocks) == [False] * 3
    tier.close()
    assert fetch(ssd(options=sealed(tmp_path, FIRST)), *blocks) == [None] * 3


def test_a_raised_mode_serves_nothing_that_was_written_with_less(
    ssd: Opener, tmp_path: Path
) -> None:
    plain, secret = blocks_of(range(2))
    tier = ssd()
    store(tier, plain)
    tier.close()
    tier = ssd(options=sealed(tmp_path, FIRST))
    store(tier, secret)
    assert fetch(tier, plain, secret) == [MissReason.SEAL, None]
    store(tier, plain)
    assert fetch(tier, plain, secret) == [None, None]


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(4096 + 7, MissReason.SEAL), (90, MissReason.HEADER), (160, MissReason.HEADER)],
    ids=["payload", "header", "stamp"],
)
def test_a_sealed_block_that_was_altered_is_quarantined(
    ssd: Opener, tmp_path: Path, offset: int, reason: MissReason
) -> None:
    options = sealed(tmp_path, FIRST)
    tier = ssd(options=options)
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    damage(ssd.segments()[0], 4096 + RECORD_BYTES + offset)
    assert fetch(tier, *blocks) == [None, reason, None]
    assert tier.usage().detail["quarantined_blocks"] == 1
    tier.close()
    assert present(ssd(options=options), blocks) == [True, False, True]


@pytest.mark.slow
def test_blocks_larger_than_a_run_and_many_small_ones_are_sealed(tmp_path: Path) -> None:
    segment_bytes = 48 << 20
    options = sealed(tmp_path, FIRST)
    tier = SsdTier(tmp_path / "ssd", 3 * segment_bytes, segment_bytes, options)
    try:
        large = make_block(1, 11_000_001)
        small = make_chain(range(100, 400), 50_001)
        store(tier, large, *small)
        assert fetch(tier, large, *small) == [None] * 301
    finally:
        tier.close()


def test_a_full_tier_rejects_sealed_blocks_as_any_others(ssd: Opener, tmp_path: Path) -> None:
    tier = ssd(options=sealed(tmp_path, FIRST))
    outcomes = tier.write(blocks_of(range(60)), soon()).outcomes
    assert set(outcomes) == {WriteOutcome.STORED, WriteOutcome.REJECTED}
    stored: list[BlockWrite] = [
        block
        for block, outcome in zip(blocks_of(range(60)), outcomes, strict=True)
        if outcome is WriteOutcome.STORED
    ]
    assert fetch(tier, *stored) == [None] * len(stored)
    assert ssd.disk_bytes() <= CAPACITY_BYTES
