"""After a purge nothing of the blocks is in the files, and nothing of the others is missing."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ssd_files import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    RECORD_BYTES,
    SEGMENT_BYTES,
    Opener,
    blocks_of,
    damage,
    present,
)

from kvtier.core.identity import NO_TENANT, Selection, tenant_digest
from kvtier.errors import TierError, TierTimeout
from kvtier.testing.block import TEST_KEY_SPACE, make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason
from kvtier.tiers.ssd import disk as disk_module
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.segment import entries_of
from kvtier.tiers.ssd.store import SsdTier

ALICE, BOB = tenant_digest("alice"), tenant_digest("bob")
OF_ALICE = Selection(tenant=ALICE)


def traces(directory: Path, blocks: list[BlockWrite]) -> set[str]:
    """Return which parts of which blocks are in the segments of a directory."""
    content = b"".join(path.read_bytes() for path in sorted(directory.glob("*.segment")))
    found = set()
    for number, block in enumerate(blocks):
        payload = bytes(block.payload)
        parts = {
            "hash": block.header.block_hash,
            "tenant": block.header.tenant,
            "start": payload[:32],
            "middle": payload[9000:9032],
            "end": payload[-32:],
        }
        found |= {f"{name} of {number}" for name, part in parts.items() if part in content}
    return found


def interleaved(tier: SsdTier, count: int) -> tuple[list[BlockWrite], list[BlockWrite]]:
    """Store blocks of two tenants in turns, and return those of each."""
    alices, bobs = blocks_of(range(count), ALICE), blocks_of(range(count), BOB)
    for pair in zip(alices, bobs, strict=True):
        store(tier, *pair)
    return alices, bobs


def test_nothing_is_left_of_a_tenant_and_nothing_lost_of_another(ssd: Opener) -> None:
    tier = ssd()
    alices, bobs = interleaved(tier, 13)  # the third segment is being appended to
    assert len(traces(ssd.directory, alices)) == 5 * 13
    removed = tier.purge(OF_ALICE, soon())
    assert (removed.num_blocks, removed.num_bytes) == (13, 13 * BLOCK_BYTES)
    assert not traces(ssd.directory, alices)
    assert fetch(tier, *alices) == [MissReason.ABSENT] * 13
    assert fetch(tier, *bobs) == [None] * 13
    assert ssd.disk_bytes() <= CAPACITY_BYTES
    tier.close()
    tier = ssd()
    assert present(tier, alices) == [False] * 13
    assert fetch(tier, *bobs) == [None] * 13
    store(tier, *alices)
    assert fetch(tier, *alices, *bobs) == [None] * 26


@pytest.mark.parametrize("selection", [Selection(key_space=TEST_KEY_SPACE), Selection(tenant=BOB)])
def test_a_segment_without_another_block_goes_as_a_file(ssd: Opener, selection: Selection) -> None:
    tier = ssd()
    bobs = blocks_of(range(10), BOB)
    store(tier, *bobs)
    assert tier.purge(selection, soon()).num_blocks == 10
    assert not ssd.segments()
    assert tier.usage().used_bytes == 0
    store(tier, *bobs)
    assert fetch(tier, *bobs) == [None] * 10


def test_those_without_a_tenant_can_be_meant_as_well(ssd: Opener) -> None:
    tier = ssd()
    nobodys, bobs = blocks_of(range(4)), blocks_of(range(4), BOB)
    store(tier, *nobodys, *bobs)
    selection = Selection(tenant=NO_TENANT)
    assert tier.purge(selection, soon()).num_blocks == 4
    assert tier.purge(selection, soon()).num_blocks == 0
    assert not {trace for trace in traces(ssd.directory, nobodys) if "tenant" not in trace}
    assert fetch(tier, *bobs) == [None] * 4


def test_what_no_index_knows_goes_too(ssd: Opener) -> None:
    """Removed, damaged, left by a write that failed, stored again elsewhere: all of it."""
    faults: list[OSError] = []

    def hook(step: str) -> None:
        if step == "record.publish" and faults:
            raise faults.pop()

    tier = ssd(options=SsdOptions(hook=hook))
    alices, bobs = interleaved(tier, 6)
    first, second = ssd.segments()
    tier.remove([alices[0].header.block_hash], soon())
    damage(first, 4096 + 2 * RECORD_BYTES)  # the header of the second of Alice's
    damage(first, 4096 + 4 * RECORD_BYTES + 4096)  # the payload of the third
    damage(second, 4096 + RECORD_BYTES, bytes(100))  # and of Bob's last
    assert fetch(tier, *alices)[:3] == [
        MissReason.ABSENT,
        MissReason.HEADER,
        MissReason.CHECKSUM,
    ]
    store(tier, alices[1])  # has two records now
    faults.append(OSError(errno.EIO, "after it was written"))
    unpublished = make_block(77, BLOCK_BYTES, tenant=ALICE)
    with pytest.raises(TierError):
        tier.write([unpublished], soon())
    assert traces(ssd.directory, [unpublished])
    assert tier.purge(OF_ALICE, soon()).num_blocks == 4
    assert not traces(ssd.directory, [*alices, unpublished])
    expected = [None] * 5 + [MissReason.HEADER]
    assert fetch(tier, *bobs) == expected
    tier.close()
    assert fetch(ssd(), *bobs)[:5] == [None] * 5


@pytest.mark.parametrize("mode", [DirectIO.AUTO, DirectIO.OFF])
def test_a_file_system_that_cannot_zero_is_written_to(
    ssd: Opener, mode: DirectIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test's own double of a file system: tmpfs is one that cannot, and is not everywhere.
    monkeypatch.setattr(disk_module, "_zero_range", lambda *args: False)
    tier = ssd(options=SsdOptions(mode))
    alices, bobs = interleaved(tier, 8)
    before_bytes = tier.usage().detail["written_metadata_bytes"]
    tier.purge(OF_ALICE, soon())
    assert tier.usage().detail["written_metadata_bytes"] >= before_bytes + 8 * 20_480
    assert not traces(ssd.directory, alices)
    assert fetch(tier, *bobs) == [None] * 8


class BlockCopier:
    """A hook that keeps what the directory was like before each step, as a killed process does."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.target = target
        self.steps: list[str] = []
        self.is_on = False

    def __call__(self, step: str) -> None:
        if self.is_on:
            self.is_on = False  # the copy itself makes no steps
            shutil.copytree(self.directory, self.target / str(len(self.steps)))
            self.steps.append(step)
            self.is_on = True

    def images(self) -> list[Path]:
        return [self.target / str(number) for number in range(len(self.steps))]


@pytest.mark.slow
def test_killed_at_any_step_of_a_purge_the_next_one_ends_it(ssd: Opener, tmp_path: Path) -> None:
    copies = BlockCopier(ssd.directory, tmp_path / "images")
    tier = ssd(options=SsdOptions(hook=copies))
    alices, bobs = interleaved(tier, 15)
    tier.remove([alices[3].header.block_hash], soon())
    copies.is_on = True
    tier.purge(OF_ALICE, soon())
    copies.is_on = False
    assert {"record.erase", "segment.zero", "footer.drop"} <= set(copies.steps)
    for image in copies.images():
        reopened = SsdTier(image, CAPACITY_BYTES, SEGMENT_BYTES)
        try:
            allowed = {None, MissReason.ABSENT, MissReason.CHECKSUM}
            assert set(fetch(reopened, *alices)) <= allowed
            assert fetch(reopened, *bobs) == [None] * 15
            reopened.purge(OF_ALICE, soon())
            assert not traces(image, alices)
            assert fetch(reopened, *bobs) == [None] * 15
        finally:
            reopened.close()


def after(steps: list[str], wanted: str, then: Callable[[], None]) -> Callable[[str], None]:
    def hook(step: str) -> None:
        steps.append(step)
        if step == wanted:
            then()

    return hook


def test_a_deadline_is_kept_between_segments(ssd: Opener) -> None:
    deadlines: list[int] = []

    def pass_time() -> None:
        while deadlines and time.monotonic_ns() < deadlines[0]:
            pass

    steps: list[str] = []
    tier = ssd(options=SsdOptions(hook=after(steps, "record.erase", pass_time)))
    alices, bobs = interleaved(tier, 15)
    deadlines.append(time.monotonic_ns() + 100_000_000)
    with pytest.raises(TierTimeout):
        tier.purge(OF_ALICE, deadlines[0])
    assert steps.count("record.erase") == 1
    assert present(tier, alices) == [False] * 5 + [True] * 10
    assert fetch(tier, *bobs) == [None] * 15
    deadlines.clear()
    assert tier.purge(OF_ALICE, soon()).num_blocks == 10
    assert not traces(ssd.directory, alices)


def test_a_truncated_segment_does_not_stop_a_purge(ssd: Opener) -> None:
    tier, blocks = ssd(), blocks_of(range(24))
    store(tier, *blocks)
    os.truncate(ssd.segments()[0], 100_000)
    other = make_block(24, BLOCK_BYTES, key_space=b"another space...")
    tier.purge(Selection(key_space=other.header.key_space), soon())
    assert fetch(tier, *blocks[10:]) == [None] * 14
    assert [each is None for each in fetch(tier, *blocks[:10])] == [True] * 3 + [False] * 7
    tier.purge(Selection(key_space=TEST_KEY_SPACE), soon())
    assert present(tier, blocks) == [False] * 24
    tier.health_check(soon())
    store(tier, other)
    assert fetch(tier, other) == [None]


def test_looking_for_records_in_a_damaged_segment_has_a_deadline(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(11)))
    damage(
        ssd.segments()[0], SEGMENT_BYTES - 4096, bytes(4096)
    )  # without a footer, the segment is searched for records
    with pytest.raises(TierTimeout):
        entries_of(tier._disk, tier._pool.segments[1], deadline_ns=time.monotonic_ns())


def test_a_file_that_cannot_be_read_goes_whole(ssd: Opener) -> None:
    tier = ssd()
    alices, bobs = interleaved(tier, 15)
    hidden = ssd.directory.parent / "hidden"
    ssd.segments()[0].rename(hidden)
    (ssd.directory / f"{1:016x}.segment").symlink_to(hidden)  # opening it fails
    assert tier.purge(OF_ALICE, soon()).num_blocks >= 15
    assert present(tier, [*alices, *bobs]) == [False] * 20 + [True] * 10
    assert not traces(ssd.directory, alices)
    report = tier.write([make_block(1)], soon())
    assert {block.header.block_hash for block in bobs[:5]} <= set(report.evicted)


@pytest.mark.parametrize("step", ["record.erase", "segment.zero", "footer.drop"])
def test_a_file_that_cannot_be_changed_goes_whole(ssd: Opener, step: str) -> None:
    faults = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def hook(reached: str) -> None:
        if reached == step and faults:
            raise faults.pop()

    tier = ssd(options=SsdOptions(hook=hook))
    alices, bobs = interleaved(tier, 15)
    tier.purge(OF_ALICE, soon())
    assert not traces(ssd.directory, alices)
    assert present(tier, bobs) == [False] * 5 + [True] * 10


def test_a_removal_that_cannot_be_marked_is_a_removal_all_the_same(ssd: Opener) -> None:
    faults = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def hook(reached: str) -> None:
        if reached == "record.remove" and faults:
            raise faults.pop()

    tier = ssd(options=SsdOptions(hook=hook))
    blocks = blocks_of(range(25))
    store(tier, *blocks)
    gone = [blocks[3], blocks[13], blocks[23]]
    assert tier.remove([block.header.block_hash for block in gone], soon()).num_blocks == 3
    tier.close()
    expected = [number >= 10 and number not in {13, 23} for number in range(25)]
    assert present(ssd(), blocks) == expected


def test_a_file_that_stays_is_said_to_stay(ssd: Opener) -> None:
    def hook(reached: str) -> None:
        if reached == "segment.unlink" and faults:
            raise faults[0]

    faults: list[OSError] = []
    tier = ssd(options=SsdOptions(hook=hook))
    store(tier, *blocks_of(range(5), ALICE))
    faults.append(OSError(errno.EPERM, os.strerror(errno.EPERM)))
    with pytest.raises(TierError, match="cannot be removed"):
        tier.purge(OF_ALICE, soon())
    faults.clear()
    tier.purge(OF_ALICE, soon())
    assert not ssd.segments()


@pytest.mark.slow
def test_readers_go_on_while_others_blocks_are_purged(ssd: Opener) -> None:
    tier = ssd()
    alices, bobs = blocks_of(range(8), ALICE), blocks_of(range(8), BOB)
    store(tier, *bobs)
    over = threading.Event()

    def read() -> set[MissReason | None]:
        seen: set[MissReason | None] = set()
        while not over.is_set():
            seen |= set(fetch(tier, *alices))
            assert fetch(tier, *bobs) == [None] * 8
        return seen

    with ThreadPoolExecutor(2) as readers:
        verdicts = [readers.submit(read) for _ in range(2)]
        try:
            for _ in range(15):
                store(tier, *alices)
                tier.purge(OF_ALICE, soon())
                assert not traces(ssd.directory, alices)
        finally:
            over.set()
        seen = set().union(*(verdict.result(30) for verdict in verdicts))
    assert seen <= {None, MissReason.ABSENT, MissReason.CHECKSUM, MissReason.LENGTH}
    assert fetch(tier, *bobs) == [None] * 8
    assert tier.usage().detail["quarantined_blocks"] == 0
