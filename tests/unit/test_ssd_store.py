import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from ssd_files import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    SEGMENT_BYTES,
    Opener,
    blocks_of,
    damage,
    present,
)

from kvtier.core.identity import EVERYTHING, unpack_headers
from kvtier.errors import StartError, TierError, TierTimeout
from kvtier.testing.block import aligned_memory, make_block, make_chain, read_of
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import MissReason, WriteOutcome
from kvtier.tiers.ssd import store as store_module
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.store import SsdTier


def failing_once(step: str, error: int) -> Callable[[str], None]:
    faults = [OSError(error, os.strerror(error))]

    def hook(reached: str) -> None:
        if reached == step and faults:
            raise faults.pop()

    return hook


def test_keeps_blocks_over_a_restart(ssd: Opener) -> None:
    blocks = make_chain(range(25), BLOCK_BYTES)
    tier = ssd()
    store(tier, *blocks)
    tier.close()
    tier = ssd()
    assert unpack_headers(tier.headers()) == [block.header for block in blocks]
    assert fetch(tier, *blocks) == [None] * 25


def test_goes_on_in_the_same_segment_after_a_restart(ssd: Opener) -> None:
    for number in range(10):
        tier = ssd()
        store(tier, make_block(number, BLOCK_BYTES))
        tier.close()
    assert len(ssd.segments()) == 1
    assert fetch(ssd(), *blocks_of(range(10))) == [None] * 10


def test_never_exceeds_its_capacity_and_reports_what_it_evicts(ssd: Opener) -> None:
    tier = ssd()
    kept: set[bytes] = set()
    for block in blocks_of(range(100)):
        report = tier.write([block], soon())
        assert report.outcomes == (WriteOutcome.STORED,)
        kept.add(block.header.block_hash)
        kept -= set(report.evicted)
        assert ssd.disk_bytes() <= CAPACITY_BYTES
    assert {header.block_hash for header in unpack_headers(tier.headers())} == kept
    assert tier.usage().num_blocks == len(kept)
    assert present(tier, blocks_of(range(100)))[-30:] == [True] * 30


def test_a_call_never_evicts_its_own_blocks(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(60))
    report = tier.write(blocks, soon())
    stored = [outcome is WriteOutcome.STORED for outcome in report.outcomes]
    assert stored == present(tier, blocks)
    assert not report.evicted
    assert stored[0]
    assert not stored[-1]


def test_rejects_a_block_larger_than_a_segment(ssd: Opener) -> None:
    small, large = make_block(1), make_block(2, SEGMENT_BYTES)
    report = ssd().write([large, small, large], soon())
    assert report.outcomes == (
        WriteOutcome.REJECTED,
        WriteOutcome.STORED,
        WriteOutcome.REJECTED,
    )


def test_applies_a_smaller_capacity_before_it_is_ready(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(38)))
    tier.close()
    smaller = 2 * SEGMENT_BYTES + METADATA_BYTES
    tier = ssd(smaller)
    assert ssd.disk_bytes() <= smaller
    assert present(tier, blocks_of(range(38))) == [False] * 20 + [True] * 18
    assert fetch(tier, *blocks_of(range(20, 38))) == [None] * 18


def test_a_smaller_capacity_takes_spoilt_segments_before_sound_ones(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(25)))
    tier.close()
    damage(ssd.segments()[2], 0, bytes(SEGMENT_BYTES))
    tier = ssd(2 * SEGMENT_BYTES + METADATA_BYTES)
    assert present(tier, blocks_of(range(25))) == [True] * 20 + [False] * 5


def test_leaves_the_volume_its_floor(ssd: Opener) -> None:
    tier = ssd(options=SsdOptions(free_space_floor_bytes=1 << 60))
    assert tier.write([make_block(1)], soon()).outcomes == (WriteOutcome.REJECTED,)
    assert not ssd.segments()


def test_removed_blocks_stay_away_over_a_restart(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(25))  # the third segment is being appended to
    store(tier, *blocks)
    gone = [*blocks[:10], blocks[13], blocks[22]]
    assert tier.remove([block.header.block_hash for block in gone], soon()).num_blocks == 12
    expected = [number not in {*range(10), 13, 22} for number in range(25)]
    assert present(tier, blocks) == expected
    assert len(ssd.segments()) == 2
    tier.close()
    tier = ssd()
    assert present(tier, blocks) == expected
    store(tier, *blocks_of(range(25, 45)))  # seals the third
    tier.close()
    assert present(ssd(), blocks) == expected


def test_clearing_leaves_no_file(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(25)))
    tier.purge(EVERYTHING, soon())
    assert [path.name for path in ssd.directory.iterdir()] == ["lock"]
    assert tier.usage().used_bytes == 0


def test_a_rotten_payload_is_a_miss_and_may_be_written_again(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    damage(ssd.segments()[0], 4096 + 24_576 + 4096 + 11)  # in the payload of the second
    assert fetch(tier, *blocks) == [None, MissReason.CHECKSUM, None]
    assert present(tier, blocks) == [True, False, True]
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 3
    tier.close()
    assert fetch(ssd(), *blocks) == [None] * 3


def test_a_rotten_header_is_a_miss(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    damage(ssd.segments()[0], 4096 + 30)
    assert fetch(tier, *blocks) == [MissReason.HEADER, None, None]


@pytest.mark.parametrize("kept_bytes", [0, 100, 4096, 30_000, 4096 + 24_576 + 100])
def test_a_file_cut_short_loses_only_what_was_behind(ssd: Opener, kept_bytes: int) -> None:
    tier = ssd()
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    os.truncate(ssd.segments()[0], kept_bytes)
    num_whole = max(0, (kept_bytes - 4096) // 24_576)
    expected = [None] * num_whole + [MissReason.LENGTH] * (3 - num_whole)
    assert fetch(tier, *blocks) == expected
    tier.close()
    tier = ssd()
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 3
    assert ssd.disk_bytes() <= CAPACITY_BYTES


def test_a_file_removed_by_someone_is_a_miss(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    ssd.segments()[0].unlink()
    assert fetch(tier, *blocks) == [MissReason.LENGTH] * 3
    with pytest.raises(TierError):
        tier.write(blocks, soon())
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 3


def test_pages_that_cannot_be_written_are_left_behind(ssd: Opener) -> None:
    fault: list[OSError] = []

    def hook(reached: str) -> None:
        if reached == "record.write" and fault:
            raise fault.pop()

    tier = ssd(options=SsdOptions(hook=hook))
    before, after = make_block(1), make_block(2)
    store(tier, before)
    fault += [OSError(errno.EIO, "broken")] * 2
    for _ in range(2):
        with pytest.raises(TierError):
            tier.write([after], soon())
    store(tier, after)
    assert len(ssd.segments()) == 2
    tier.close()
    assert fetch(ssd(), before, after) == [None, None]


def test_files_that_are_no_segments_are_removed_and_others_left_alone(ssd: Opener) -> None:
    ssd().close()
    (ssd.directory / f"{5:016x}.segment").write_bytes(b"\0" * SEGMENT_BYTES)
    (ssd.directory / f"{6:016x}.segment").write_bytes(b"")
    (ssd.directory / "notes.txt").write_text("mine")
    assert ssd().usage().detail["files_dropped_at_start"] == 2
    assert sorted(path.name for path in ssd.directory.iterdir()) == ["lock", "notes.txt"]


def test_what_has_a_segments_name_and_is_no_file_is_left_alone(ssd: Opener) -> None:
    ssd().close()
    pipe = ssd.directory / f"{1:016x}.segment"
    os.mkfifo(pipe)
    assert ssd().usage().detail["segments"] == 0, "and opening it holds up nobody"
    assert pipe.is_fifo()


def test_a_file_that_is_there_is_not_removed_by_making_it(ssd: Opener) -> None:
    tier = ssd()
    path = ssd.directory / f"{1:016x}.segment"
    path.write_text("another's")
    with pytest.raises(TierError):
        tier.write([make_block(1)], soon())
    assert path.read_text() == "another's"
    store(tier, make_block(1))


def test_a_file_that_cannot_be_read_is_kept_and_counted_until_it_is_its_turn(ssd: Opener) -> None:
    ssd().close()
    elsewhere = ssd.directory.parent / "elsewhere"
    elsewhere.write_bytes(b"x" * 100)
    link = ssd.directory / f"{1:016x}.segment"
    link.symlink_to(elsewhere)
    tier = ssd()
    assert tier.usage().detail["files_unreadable_at_start"] == 1
    assert link.is_symlink()
    assert not list(chain.from_iterable(tier.headers())), "and it keeps no daemon from starting"
    for block in blocks_of(range(60)):
        tier.write([block], soon())
    assert not link.is_symlink()
    assert elsewhere.exists()


def test_a_batch_is_one_operation_each_way(ssd: Opener) -> None:
    steps: list[str] = []
    tier = ssd(options=SsdOptions(hook=steps.append))
    store(tier, make_block(0, BLOCK_BYTES))
    slot_bytes = 20_480
    arena = aligned_memory(8 * slot_bytes)
    blocks = []
    for index, block in enumerate(blocks_of(range(1, 9))):
        slot = arena[index * slot_bytes :][:BLOCK_BYTES]
        slot[:] = block.payload
        blocks.append(replace(block, payload=slot))
    steps.clear()
    store(tier, *blocks)
    slots = [arena[index * slot_bytes :][:slot_bytes] for index in range(8)]
    results = tier.read([read_of(*pair) for pair in zip(blocks, slots, strict=True)], soon())
    assert results == [block.header for block in blocks]
    assert steps == ["record.write", "record.publish", "record.read"]


def test_a_footer_that_rots_is_replaced_by_walking(ssd: Opener) -> None:
    tier = ssd()
    blocks = blocks_of(range(15))
    store(tier, *blocks)
    tier.close()
    damage(ssd.segments()[0], SEGMENT_BYTES - 3000)
    damage(ssd.segments()[0], SEGMENT_BYTES - 20)
    assert fetch(ssd(), *blocks) == [None] * 15


def test_leftovers_of_a_failed_write_do_not_come_back(ssd: Opener) -> None:
    hook = failing_once("record.publish", errno.EIO)
    tier = ssd(options=SsdOptions(hook=hook))
    lost = [make_block(1, 4096), make_block(2, 4096)]
    with pytest.raises(TierError):
        tier.write(lost, soon())
    assert present(tier, lost) == [False, False]
    other = make_block(3, 4096)  # ends where the leftover of the second block starts
    store(tier, other)
    tier.close()
    assert present(ssd(), [*lost, other]) == [False, False, True]


def test_a_full_disk_gives_up_a_segment_and_tries_once_more(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(20)))
    tier.close()
    tier = ssd(options=SsdOptions(hook=failing_once("segment.header", errno.ENOSPC)))
    report = tier.write([make_block(50, BLOCK_BYTES)], soon())
    assert report.outcomes == (WriteOutcome.STORED,)
    assert len(report.evicted) == 10
    assert present(tier, blocks_of(range(20))) == [False] * 10 + [True] * 10


@pytest.mark.parametrize("step", ["segment.create", "segment.header", "record.write"])
def test_a_disk_that_stays_full_rejects(ssd: Opener, step: str) -> None:
    def hook(reached: str) -> None:
        if reached == step:
            raise OSError(errno.ENOSPC, "full")

    tier = ssd(options=SsdOptions(hook=hook))
    assert tier.write([make_block(1)], soon()).outcomes == (WriteOutcome.REJECTED,)
    assert tier.usage().num_blocks == 0
    assert tier.usage().used_bytes == sum(path.stat().st_size for path in ssd.segments())


def test_evictions_of_a_failed_call_are_reported_by_the_next(ssd: Opener) -> None:
    fault: list[OSError] = []

    def hook(reached: str) -> None:
        if reached == "record.write" and fault:
            raise fault.pop()

    tier = ssd(options=SsdOptions(hook=hook))
    store(tier, *blocks_of(range(40)))
    fault.append(OSError(errno.EIO, "broken"))
    with pytest.raises(TierError):
        tier.write([make_block(50, BLOCK_BYTES)], soon())
    report = tier.write([make_block(51, BLOCK_BYTES)], soon())
    assert set(report.evicted) == {b.header.block_hash for b in blocks_of(range(10))}


def test_a_bad_sector_is_not_asked_for_twice(ssd: Opener) -> None:
    tier = ssd(options=SsdOptions(hook=failing_once("record.read", errno.EIO)))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    with pytest.raises(TierError):
        fetch(tier, blocks[1])
    assert fetch(tier, *blocks) == [None, MissReason.ABSENT, None]


def test_a_segment_that_is_read_is_not_reclaimed(ssd: Opener) -> None:
    reached, released = threading.Event(), threading.Event()

    def hook(step: str) -> None:
        if step == "record.read":
            reached.set()
            assert released.wait(30)

    tier = ssd(options=SsdOptions(hook=hook))
    first = make_block(0, BLOCK_BYTES)
    store(tier, *blocks_of(range(10)))
    with ThreadPoolExecutor(1) as reader:
        verdict = reader.submit(fetch, tier, first)
        assert reached.wait(30)
        for block in blocks_of(range(10, 60)):
            tier.write([block], soon())
            assert ssd.disk_bytes() <= CAPACITY_BYTES
        assert present(tier, [first]) == [True]
        released.set()
        assert verdict.result(30) == [None]


def test_clearing_while_reading_frees_the_space_at_the_end(ssd: Opener) -> None:
    reached, released = threading.Event(), threading.Event()

    def hook(step: str) -> None:
        if step == "record.read":
            reached.set()
            assert released.wait(30)

    tier = ssd(options=SsdOptions(hook=hook))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    with ThreadPoolExecutor(1) as reader:
        verdict = reader.submit(fetch, tier, *blocks)
        assert reached.wait(30)
        tier.purge(EVERYTHING, soon())
        assert tier.usage().used_bytes == SEGMENT_BYTES
        released.set()
        assert verdict.result(30) == [None] * 3
    assert tier.usage().used_bytes == 0
    assert not ssd.segments()


def test_a_read_does_not_wait_for_a_write_that_is_under_way(ssd: Opener) -> None:
    """Nor do look-ups and listings: only other changes of files do."""
    reached, released = threading.Event(), threading.Event()

    def hook(step: str) -> None:
        if step == "record.write" and first.is_set():
            reached.set()
            assert released.wait(30)

    first = threading.Event()
    tier = ssd(options=SsdOptions(hook=hook))
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    first.set()
    with ThreadPoolExecutor(1) as writer:
        report = writer.submit(tier.write, [make_block(50)], soon())
        assert reached.wait(30)
        try:
            assert fetch(tier, *blocks) == [None] * 3
            assert present(tier, blocks) == [True] * 3
            assert len(unpack_headers(tier.headers())) == 3
            assert tier.usage().num_blocks == 3
            with pytest.raises(TierTimeout):
                tier.remove([blocks[0].header.block_hash], time.monotonic_ns() + 10_000_000)
        finally:
            released.set()
        assert report.result(30).outcomes == (WriteOutcome.STORED,)


def test_closing_does_not_wait_for_ever_for_a_write_that_hangs(
    ssd: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_CLOSE_S", 0.05)
    reached, released = threading.Event(), threading.Event()

    def hook(step: str) -> None:
        if step == "record.write":
            reached.set()
            assert released.wait(30)

    tier = ssd(options=SsdOptions(hook=hook))
    with ThreadPoolExecutor(1) as writer:
        report = writer.submit(tier.write, [make_block(50)], soon())
        assert reached.wait(30)
        try:
            with pytest.raises(TierTimeout, match="did not finish"):
                tier.close()
        finally:
            released.set()
        assert report.result(30).outcomes == (WriteOutcome.STORED,)
    tier.close()
    assert fetch(ssd(), make_block(50)) == [None]


def test_counts_what_it_writes(ssd: Opener) -> None:
    tier = ssd()
    store(tier, *blocks_of(range(15)))
    detail = tier.usage().detail
    assert detail["block_bytes"] == 15 * BLOCK_BYTES
    assert detail["written_blocks_bytes"] == 15 * 20_480
    # Two segments' headers, a page a record, and the footer of the first.
    assert detail["written_metadata_bytes"] == (2 + 15 + 1) * 4096
    assert detail["written_moved_bytes"] == 0


def test_a_second_process_is_told_who_holds_the_directory(ssd: Opener) -> None:
    ssd()
    program = (
        "import sys; from pathlib import Path; from kvtier.tiers.ssd.store import SsdTier\n"
        f"SsdTier(Path(sys.argv[1]), {CAPACITY_BYTES}, {SEGMENT_BYTES})"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, ssd.directory],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert other.returncode != 0
    assert "LockHeld: ssd.directory" in other.stderr
    assert f"held by pid {os.getpid()} on host {socket.gethostname()}" in other.stderr


def test_a_closed_tier_lets_the_next_in_and_answers_nobody(ssd: Opener) -> None:
    tier = ssd()
    tier.close()
    ssd()
    with pytest.raises(TierError, match="closed"):
        tier.contains([], soon())


def test_files_are_private(ssd: Opener) -> None:
    store(ssd(), make_block(1))
    assert stat.S_IMODE(ssd.directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in ssd.directory.iterdir()} == {0o600}


def test_unusable_directories_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "below", Path("/proc/kvtier")):
        with pytest.raises(StartError) as raised:
            SsdTier(directory, CAPACITY_BYTES, SEGMENT_BYTES)
        assert raised.value.field == "ssd.directory"
        assert str(directory) in str(raised.value)


@pytest.mark.parametrize(
    ("capacity_bytes", "segment_bytes", "field"),
    [
        (CAPACITY_BYTES, 5000, "ssd.segment"),
        (CAPACITY_BYTES, 4096, "ssd.segment"),
        (2 * SEGMENT_BYTES, SEGMENT_BYTES, "ssd.capacity"),
    ],
)
def test_bad_sizes_are_named(
    tmp_path: Path, capacity_bytes: int, segment_bytes: int, field: str
) -> None:
    with pytest.raises(StartError) as raised:
        SsdTier(tmp_path / "ssd", capacity_bytes, segment_bytes)
    assert raised.value.field == field
    assert not (tmp_path / "ssd").exists()


def test_another_blocks_record_is_never_served(ssd: Opener) -> None:
    tier = ssd()
    first, second = blocks_of(range(2))
    store(tier, first, second)
    path = ssd.segments()[0]
    content = path.read_bytes()
    damage(path, 4096, content[4096 + 24_576 : 4096 + 2 * 24_576])
    assert fetch(tier, first, second) == [MissReason.IDENTITY, None]
    wrong = replace(read_of(second), tenant=b"someone else....")
    assert tier.read([wrong], soon()) == [MissReason.IDENTITY]
