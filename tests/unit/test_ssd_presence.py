"""A directory that is taken away under the store, or files out of it; and a volume that is full."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from ssd_files import CAPACITY_BYTES, SEGMENT_BYTES, Opener, blocks_of, present

from kvtier.errors import StartError, TierError
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import HealthState, MissReason, WriteOutcome
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.store import SsdTier


@pytest.mark.parametrize("mode", [DirectIO.AUTO, DirectIO.OFF])
def test_a_probe_touches_the_directory_and_leaves_nothing(ssd: Opener, mode: DirectIO) -> None:
    tier = ssd(options=SsdOptions(mode))
    tier.health_check(soon())
    store(tier, *blocks_of(range(3)))
    tier.health_check(soon())
    assert sorted(path.name for path in ssd.directory.iterdir()) == [f"{1:016x}.segment", "lock"]
    assert fetch(tier, *blocks_of(range(3))) == [None] * 3


def test_a_deleted_directory_is_made_again_and_used(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    shutil.rmtree(ssd.directory)
    with pytest.raises(TierError, match="2 files were removed"):
        tier.health_check(soon())
    tier.health_check(soon())
    assert present(tier, blocks) == [False] * 15
    assert (tier.usage().num_blocks, tier.usage().used_bytes) == (0, 0)
    report = tier.write([make_block(99)], soon())
    assert report.outcomes == (WriteOutcome.STORED,)
    assert set(report.evicted) == {block.header.block_hash for block in blocks}
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 15
    with pytest.raises(StartError, match="held by pid"):
        SsdTier(ssd.directory, CAPACITY_BYTES, SEGMENT_BYTES)
    tier.close()
    assert fetch(ssd(), *blocks) == [None] * 15


def test_what_was_taken_away_is_told_without_a_write(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    shutil.rmtree(ssd.directory)
    with pytest.raises(TierError):
        tier.health_check(soon())
    seen = tier.scrub(0, soon())
    assert (seen.num_blocks, set(seen.evicted)) == (0, {each.header.block_hash for each in blocks})
    assert tier.scrub(0, soon()).evicted == ()


def test_while_it_cannot_be_made_again_the_probe_fails(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(3)))
    shutil.rmtree(ssd.directory)
    ssd.directory.write_text("a file in its place")
    for _ in range(2):
        with pytest.raises(TierError, match="is not a directory"):
            tier.health_check(soon())
    with pytest.raises(TierError):
        tier.write([make_block(99)], soon())
    ssd.directory.unlink()
    with pytest.raises(TierError, match="removed or replaced"):
        tier.health_check(soon())
    tier.health_check(soon())
    store(tier, make_block(99))
    assert fetch(tier, make_block(99)) == [None]


def test_an_emptied_directory_is_used_again(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(25))
    store(tier, *blocks)
    for path in ssd.directory.iterdir():
        path.unlink()
    with pytest.raises(TierError, match="3 files"):
        tier.health_check(soon())
    tier.health_check(soon())
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 25
    assert ssd.disk_bytes() <= CAPACITY_BYTES


def test_another_directory_in_its_place_counts_from_nothing(ssd: Opener, tmp_path: Path) -> None:
    """What is in it takes space under the same cap, so it goes."""
    other = SsdTier(tmp_path / "other", CAPACITY_BYTES, SEGMENT_BYTES)
    store(other, *blocks_of(range(100, 130)))
    other.close()
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    ssd.directory.rename(tmp_path / "away")
    (tmp_path / "other").rename(ssd.directory)
    damaged = ssd.segments()
    assert len(damaged) == 3
    tier_verdicts = fetch(tier, *blocks)
    assert set(tier_verdicts) <= {MissReason.IDENTITY, MissReason.HEADER}
    tier.health_check(
        soon()
    )  # files of these numbers are there, and all that is in them is checked
    assert len(ssd.segments()) == 2
    for block in blocks_of(range(200, 260)):
        tier.write([block], soon())
        assert ssd.disk_bytes() <= CAPACITY_BYTES


def test_a_lost_lock_is_taken_again_without_losing_a_block(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    (ssd.directory / "lock").unlink()
    tier.health_check(soon())
    assert fetch(tier, *blocks) == [None] * 15
    with pytest.raises(StartError, match="held by pid"):
        SsdTier(ssd.directory, CAPACITY_BYTES, SEGMENT_BYTES)


@pytest.mark.parametrize("way", ["deleted", "emptied", "exchanged"])
def test_the_file_that_is_written_to_is_looked_at(ssd: Opener, way: str) -> None:
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    full, active = ssd.segments()
    match way:
        case "deleted":
            active.unlink()
        case "emptied":
            os.truncate(active, 0)
        case "exchanged":
            shutil.copy(full, active)
    with pytest.raises(TierError, match="1 file was"):
        tier.health_check(soon())
    tier.health_check(soon())
    assert present(tier, blocks) == [True] * 10 + [False] * 5
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 15


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_volume_that_takes_no_more_is_degraded_and_not_out(ssd: Opener, error: int) -> None:
    full: list[int] = []

    def hook(step: str) -> None:
        if step in {"probe", "record.write", "segment.create"} and full:
            raise OSError(full[0], os.strerror(full[0]))

    now_s = [1_800_000_000]
    tier = ssd(options=SsdOptions(hook=hook, now_s=lambda: now_s[0]))
    blocks = blocks_of(range(5))
    store(tier, *blocks)
    assert tier.health().state is HealthState.UP
    full.append(error)
    tier.health_check(soon())
    health = tier.health()
    assert health.state is HealthState.DEGRADED
    assert health.reason.startswith("read-only: ")
    assert tier.usage().detail["read_only"] is True
    assert fetch(tier, *blocks) == [None] * 5
    assert set(tier.write(blocks_of(range(5, 7)), soon()).outcomes) == {WriteOutcome.REJECTED}
    full.clear()
    now_s[0] += 2
    store(tier, *blocks_of(range(5, 7)))
    assert tier.health().state is HealthState.UP
    assert tier.usage().detail["read_only"] is False


def test_a_page_that_reads_otherwise_than_written_is_a_fault(
    ssd: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = ssd()
    preadv = os.preadv

    def flipping(fd: int, pieces: list[memoryview], offset: int) -> int:
        num_bytes = preadv(fd, pieces, offset)
        pieces[0][0] ^= 1
        return num_bytes

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", flipping)
        with pytest.raises(TierError, match="differs from what was written"):
            tier.health_check(soon())
    tier.health_check(soon())
