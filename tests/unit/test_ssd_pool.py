"""A volume that is full, or filled by others, or read-only; and files that will not go."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.core.identity import EVERYTHING
from kvtier.errors import TierError
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, HealthState, WriteOutcome
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES, metadata_bytes
from kvtier.tiers.ssd.store import SsdTier

SEGMENT_BYTES = 256 << 10
CAPACITY_BYTES = 4 * SEGMENT_BYTES + METADATA_BYTES
BLOCK_BYTES = 20_000
"""Ten of them to a segment: with its header page a record takes 24 KiB."""

PAGE = 4096


class Volume:
    """The test's own double of a file system: what statvfs says, and steps that fail."""

    def __init__(self) -> None:
        self.free_bytes = 1 << 40
        self.free_inodes = 1 << 20
        self.flags = 0
        self.failing: dict[str, int] = {}
        self.steps: list[str] = []
        self.now_s = 10**9

    def statvfs(self, _path: object) -> os.statvfs_result:
        free = self.free_bytes // PAGE
        inodes = self.free_inodes
        return os.statvfs_result(
            (PAGE, PAGE, 1 << 30, free, free, 1 << 30, *[inodes] * 2, *[0] * 2)
        )

    def hook(self, step: str) -> None:
        self.steps.append(step)
        if error := self.failing.get(step):
            raise OSError(error, os.strerror(error))


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Volume:
    volume = Volume()
    monkeypatch.setattr(os, "statvfs", volume.statvfs)
    return volume


@pytest.fixture
def open_tier(tmp_path: Path, volume: Volume):
    tiers: list[SsdTier] = []

    def opened(
        capacity_bytes: int = CAPACITY_BYTES, *, floor_bytes: int = 0, inodes_floor: int = 0
    ) -> SsdTier:
        options = SsdOptions(
            free_space_floor_bytes=floor_bytes,
            free_inodes_floor=inodes_floor,
            hook=volume.hook,
            now_s=lambda: volume.now_s,
        )
        tiers.append(SsdTier(tmp_path / "ssd", capacity_bytes, SEGMENT_BYTES, options))
        return tiers[-1]

    yield opened
    volume.failing.clear()
    for tier in tiers:
        tier.close()


def blocks_of(numbers: range) -> list[BlockWrite]:
    return [make_block(number, BLOCK_BYTES) for number in numbers]


def write_one(tier: SsdTier, number: int) -> WriteOutcome:
    (outcome,) = tier.write([make_block(number, BLOCK_BYTES)], soon()).outcomes
    return outcome


def num_segments(tier: SsdTier) -> int:
    return int(tier.usage().detail["segments"])


def assert_read_only(tier: SsdTier, word: str) -> None:
    assert tier.usage().detail["read_only"] is True
    assert tier.health().state is HealthState.DEGRADED
    assert word in tier.health().reason


def assert_writable(tier: SsdTier) -> None:
    assert tier.usage().detail["read_only"] is False
    assert tier.health().state is HealthState.UP


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["segment.create", "segment.header", "record.write"])
def test_a_full_disk_makes_it_read_only_and_it_comes_back_by_itself(
    open_tier: Callable[..., SsdTier], volume: Volume, step: str, error: int
) -> None:
    tier = open_tier()
    store(tier, *blocks_of(range(10)))
    volume.failing[step] = error
    assert write_one(tier, 50) is WriteOutcome.REJECTED
    assert_read_only(tier, os.strerror(error))
    volume.steps.clear()
    for number in range(51, 60):
        assert write_one(tier, number) is WriteOutcome.REJECTED
    assert not volume.steps, "the disk was touched"
    volume.failing.clear()
    assert write_one(tier, 60) is WriteOutcome.REJECTED
    volume.now_s += 1
    assert write_one(tier, 60) is WriteOutcome.STORED
    assert_writable(tier)
    assert fetch(tier, make_block(60, BLOCK_BYTES)) == [None]


def test_a_footer_that_finds_no_room_costs_nothing(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier()
    volume.failing["segment.footer"] = errno.ENOSPC
    store(tier, *blocks_of(range(30)))
    assert_writable(tier)
    volume.failing.clear()
    tier.close()
    tier = open_tier()
    assert fetch(tier, *blocks_of(range(30))) == [None] * 30


def test_blocks_are_still_read_while_it_is_read_only(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier(2 * SEGMENT_BYTES + METADATA_BYTES)
    store(tier, *blocks_of(range(20)))
    volume.failing["segment.create"] = errno.ENOSPC
    assert write_one(tier, 50) is WriteOutcome.REJECTED
    assert fetch(tier, *blocks_of(range(10, 20))) == [None] * 10
    stored_again = tier.write(blocks_of(range(10, 20)), soon())
    assert set(stored_again.outcomes) == {WriteOutcome.STORED}


@pytest.mark.parametrize(
    ("step", "numbers"), [("record.write", [5]), ("segment.create", [10]), ("segment.footer", [10])]
)
def test_a_file_system_remounted_read_only(
    open_tier: Callable[..., SsdTier], volume: Volume, step: str, numbers: list[int]
) -> None:
    tier = open_tier()
    store(tier, *blocks_of(range(numbers[0])))
    volume.failing[step] = errno.EROFS
    assert write_one(tier, 50) is WriteOutcome.REJECTED
    assert_read_only(tier, "read-only")
    kept = blocks_of(range(numbers[0]))
    assert fetch(tier, *kept) == [None] * len(kept)
    volume.failing.clear()
    volume.now_s += 1
    assert write_one(tier, 50) is WriteOutcome.STORED
    assert_writable(tier)


def test_another_write_fault_is_the_mediums(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier()
    volume.failing["record.write"] = errno.EIO
    with pytest.raises(TierError):
        write_one(tier, 1)
    assert_writable(tier)


def test_the_floors_of_the_volume_are_left_to_others(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier(floor_bytes=1 << 20, inodes_floor=100)
    volume.free_inodes = 100
    assert write_one(tier, 1) is WriteOutcome.REJECTED
    assert_read_only(tier, "ssd.free_inodes_floor")
    volume.free_inodes, volume.free_bytes = 101, (1 << 20) + SEGMENT_BYTES - PAGE
    volume.now_s += 1
    assert write_one(tier, 1) is WriteOutcome.REJECTED
    assert_read_only(tier, "ssd.free_space_floor")
    volume.free_bytes += PAGE
    volume.now_s += 1
    assert write_one(tier, 1) is WriteOutcome.STORED
    assert_writable(tier)


def test_it_is_read_only_below_a_floor_whether_somebody_writes_or_not(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier(inodes_floor=100)
    volume.free_inodes = 99
    assert write_one(tier, 1) is WriteOutcome.REJECTED
    for _ in range(3):
        volume.now_s += 40
        tier.health_check(soon())
        assert_read_only(tier, "ssd.free_inodes_floor")
    volume.free_inodes = 200
    volume.now_s += 1
    tier.health_check(soon())
    assert_writable(tier)


def test_a_volume_at_its_floor_is_written_to_in_place_of_old_segments(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier(floor_bytes=1 << 20)
    for block in blocks_of(range(20)):
        tier.write([block], soon())
    before = volume.hook
    volume.free_bytes = 1 << 20
    gained = {"segment.unlink": SEGMENT_BYTES, "segment.create": -SEGMENT_BYTES}

    def counting(step: str) -> None:
        before(step)
        volume.free_bytes += gained.get(step, 0)

    tier._disk.hook = counting
    for number in range(20, 80):
        assert write_one(tier, number) is WriteOutcome.STORED
        assert volume.free_bytes >= 1 << 20
        assert num_segments(tier) == 2
    assert_writable(tier)


@pytest.mark.slow
def test_others_who_fill_the_volume_do_not_drive_the_cache_out(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier(20 * SEGMENT_BYTES + metadata_bytes(20), floor_bytes=1 << 20)
    store(tier, *blocks_of(range(190)))
    volume.free_bytes = 0  # and whatever is given back, somebody takes
    before = num_segments(tier)
    for minute in range(3):
        for number in range(200, 260):
            assert write_one(tier, number) is WriteOutcome.REJECTED
            volume.now_s += 1
        assert before - num_segments(tier) <= minute + 1
    assert before - num_segments(tier) == 3
    assert_read_only(tier, "free_space_floor")


def test_a_quota_that_statvfs_does_not_show_costs_a_segment_a_minute_at_most(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier(20 * SEGMENT_BYTES + metadata_bytes(20))
    store(tier, *blocks_of(range(190)))
    volume.failing["segment.create"] = errno.EDQUOT
    before = num_segments(tier)
    for number in range(200, 320):
        assert write_one(tier, number) is WriteOutcome.REJECTED
        volume.now_s += 1
    assert before - num_segments(tier) == 2


@pytest.mark.parametrize("leap_s", [-10_000_000, 10_000_000])
def test_a_clock_that_leaps_does_not_keep_it_read_only(
    open_tier: Callable[..., SsdTier], volume: Volume, leap_s: int
) -> None:
    tier = open_tier()
    store(tier, *blocks_of(range(10)))
    volume.failing["segment.create"] = errno.ENOSPC
    assert write_one(tier, 50) is WriteOutcome.REJECTED
    volume.failing.clear()
    volume.now_s += leap_s
    assert write_one(tier, 50) is WriteOutcome.STORED


def test_a_file_that_cannot_be_removed_counts_until_it_can(
    open_tier: Callable[..., SsdTier], volume: Volume, tmp_path: Path
) -> None:
    tier = open_tier()
    store(tier, *blocks_of(range(40)))
    volume.failing["segment.unlink"] = errno.EPERM
    assert write_one(tier, 50) is WriteOutcome.REJECTED
    assert tier.usage().used_bytes == 4 * SEGMENT_BYTES
    with pytest.raises(TierError):
        tier.purge(EVERYTHING, soon())
    assert len(list((tmp_path / "ssd").glob("*.segment"))) == 4
    volume.failing.clear()
    assert tier.purge(EVERYTHING, soon()).num_blocks == 0
    assert not list((tmp_path / "ssd").glob("*.segment"))
    assert tier.usage().used_bytes == 0
    store(tier, *blocks_of(range(40)))


def test_a_stranger_in_the_place_of_the_next_segment_is_passed_by(
    open_tier: Callable[..., SsdTier], tmp_path: Path
) -> None:
    tier = open_tier()
    (tmp_path / "ssd" / f"{1:016x}.segment").write_bytes(b"somebody else's")
    with pytest.raises(TierError):
        write_one(tier, 1)
    assert write_one(tier, 1) is WriteOutcome.STORED


@pytest.mark.parametrize("number", [0, 1 << 32, (1 << 64) - 1])
def test_files_with_numbers_that_no_segment_has_are_left_alone(
    open_tier: Callable[..., SsdTier], tmp_path: Path, number: int
) -> None:
    (tmp_path / "ssd").mkdir()
    path = tmp_path / "ssd" / f"{number:016x}.segment"
    path.write_bytes(b"somebody else's")
    tier = open_tier()
    store(tier, *blocks_of(range(15)))
    assert fetch(tier, *blocks_of(range(15))) == [None] * 15
    assert path.exists()


def test_a_block_stored_anew_is_not_reported_as_evicted(
    open_tier: Callable[..., SsdTier], volume: Volume
) -> None:
    tier = open_tier()
    store(tier, *blocks_of(range(40)))
    volume.failing["record.write"] = errno.EIO
    with pytest.raises(TierError):
        write_one(tier, 50)
    volume.failing.clear()
    report = tier.write(blocks_of(range(3)), soon())
    assert set(report.outcomes) == {WriteOutcome.STORED}
    gone = {block.header.block_hash for block in blocks_of(range(3, 10))}
    assert set(report.evicted) == gone


def test_what_is_kept_back_grows_with_the_number_of_files() -> None:
    assert metadata_bytes(1) == METADATA_BYTES
    assert metadata_bytes(4096) == 4096 * PAGE
