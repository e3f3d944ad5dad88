"""What is kept when space is needed: what has been read, within bounds, and whole."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.identity import PACKED_HEADER, BlockHash, unpack_headers
from kvtier.testing.block import make_block, read_of
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason, WriteOutcome
from kvtier.tiers.ssd.index import READS_MAX, SegmentIndex
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.segment import ENTRY_DTYPE
from kvtier.tiers.ssd.store import SsdTier
from kvtier.tiers.ssd.victim import MOVED_SHARE, choose_victim

SEGMENT_BYTES = 1 << 20
CAPACITY_BYTES = 6 * SEGMENT_BYTES + METADATA_BYTES
BLOCK_BYTES = 16_000
"""Fifty of them to a segment: with its header page a record takes 20 KiB."""

PER_SEGMENT = 50


def block_of(number: int) -> BlockWrite:
    return make_block(number, BLOCK_BYTES)


def blocks_of(numbers: range) -> list[BlockWrite]:
    return [block_of(number) for number in numbers]


@pytest.fixture
def opened(tmp_path: Path):
    tiers: list[SsdTier] = []

    def open_tier(options: SsdOptions | None = None) -> SsdTier:
        tiers.append(SsdTier(tmp_path / "ssd", CAPACITY_BYTES, SEGMENT_BYTES, options))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def present(tier: SsdTier, blocks: list[BlockWrite]) -> list[bool]:
    return tier.contains([block.header.block_hash for block in blocks], soon())


def amplification(tier: SsdTier) -> float:
    detail = tier.usage().detail
    blocks, moved = int(detail["written_blocks_bytes"]), int(detail["written_moved_bytes"])
    return (blocks + moved) / blocks


def scan(tier: SsdTier, numbers: range, hot: list[BlockWrite], period: int = 25) -> None:
    """Store one-off blocks, and read the hot ones now and then."""
    for count, number in enumerate(numbers):
        tier.write([block_of(number)], soon())
        if count % period == 0:
            fetch(tier, *hot)


@pytest.mark.slow
def test_hot_blocks_survive_a_scan_of_twice_the_capacity(opened) -> None:
    tier = opened()
    hot = blocks_of(range(12))
    store(tier, *hot)
    scan(tier, range(1000, 1000 + 4 * 6 * PER_SEGMENT), hot)
    assert fetch(tier, *hot) == [None] * 12
    assert int(tier.usage().detail["written_moved_bytes"]) > 0
    assert 1 < amplification(tier) <= 1 / (1 - MOVED_SHARE)


@pytest.mark.slow
def test_a_segment_with_more_hot_blocks_than_can_be_moved_outlasts_the_others(opened) -> None:
    tier = opened()
    hot = blocks_of(range(40))
    store(tier, *hot)
    scan(tier, range(1000, 1000 + 2 * 6 * PER_SEGMENT), hot)
    assert fetch(tier, *hot) == [None] * 40


@pytest.mark.slow
def test_what_is_not_read_any_more_goes(opened) -> None:
    tier = opened()
    once_hot = blocks_of(range(20))
    store(tier, *once_hot)
    for _ in range(READS_MAX):
        fetch(tier, *once_hot)
    for block in blocks_of(range(1000, 1000 + 20 * PER_SEGMENT)):
        tier.write([block], soon())
    assert present(tier, once_hot) == [False] * 20


@pytest.mark.slow
def test_without_reads_the_oldest_goes_and_nothing_is_moved(opened) -> None:
    tier = opened()
    evicted: list[BlockHash] = []
    for block in blocks_of(range(10 * PER_SEGMENT)):
        evicted += tier.write([block], soon()).evicted
    expected = [block.header.block_hash for block in blocks_of(range(len(evicted)))]
    assert sorted(evicted) == sorted(expected)
    assert tier.usage().detail["written_moved_bytes"] == 0


@pytest.mark.slow
def test_at_most_a_share_of_a_segment_is_moved_those_read_most_first(opened) -> None:
    tier = opened()
    old = blocks_of(range(PER_SEGMENT))
    store(tier, *old)
    fetch(tier, *old)
    best = old[30:40]
    fetch(tier, *best)
    for block in blocks_of(range(100, 100 + 5 * PER_SEGMENT)):
        tier.write([block], soon())
        if present(tier, old) != [True] * PER_SEGMENT:
            break
        # Read as well, so that the first segment is the one that is worth least.
        fetch(tier, block)
    kept = [block for block, is_there in zip(old, present(tier, old), strict=True) if is_there]
    moved_bytes = int(tier.usage().detail["written_moved_bytes"])
    assert 0 < moved_bytes <= MOVED_SHARE * SEGMENT_BYTES
    assert set(best) <= set(kept)
    assert fetch(tier, *best) == [None] * 10


@pytest.mark.slow
def test_every_block_is_told_of_that_goes_and_none_that_stays(opened) -> None:
    tier = opened()
    hot = blocks_of(range(20))
    store(tier, *hot)
    kept = {block.header.block_hash for block in hot}
    for count, block in enumerate(blocks_of(range(1000, 1000 + 12 * PER_SEGMENT))):
        report = tier.write([block], soon())
        kept.add(block.header.block_hash)
        kept -= set(report.evicted)
        if count % 25 == 0:
            fetch(tier, *hot)
    headers = unpack_headers(tier.headers())
    assert {header.block_hash for header in headers} == kept
    assert len(headers) == len(kept) == tier.usage().num_blocks


@pytest.mark.slow
def test_a_damaged_block_is_not_moved(opened, tmp_path: Path) -> None:
    tier = opened()
    hot = blocks_of(range(12))
    store(tier, *hot)
    fetch(tier, *hot)
    path = next((tmp_path / "ssd").glob("*.segment"))
    with path.open("r+b") as file:
        file.seek(4096 + 3 * 20_480 + 5000)  # in the payload of the fourth
        file.write(b"rotten")
    numbers = iter(range(1000, 2000))
    while path.exists():
        tier.write([block_of(next(numbers))], soon())
    assert fetch(tier, *hot[:6]) == [None] * 3 + [MissReason.ABSENT] + [None] * 2


@pytest.mark.slow
def test_a_spent_budget_evicts_instead_of_moving(opened) -> None:
    written = 7 * SEGMENT_BYTES
    tier = opened(SsdOptions(write_budget_bytes=written, now_s=lambda: 10**9))
    hot = blocks_of(range(20))
    store(tier, *hot)
    scan(tier, range(1000, 1000 + 8 * PER_SEGMENT), hot)
    detail = tier.usage().detail
    total = sum(int(detail[f"written_{kind}_bytes"]) for kind in ("blocks", "moved", "metadata"))
    assert total <= written + 64 * 1024


@pytest.mark.slow
def test_a_fault_while_moving_fails_no_write(opened) -> None:
    faults: list[str] = []

    def hook(step: str) -> None:
        if step == "record.read" and is_writing:
            faults.append(step)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    is_writing = False
    tier = opened(SsdOptions(hook=hook))
    hot = blocks_of(range(12))
    store(tier, *hot)
    for _ in range(READS_MAX):
        fetch(tier, *hot)
    for block in blocks_of(range(1000, 1000 + 12 * PER_SEGMENT)):
        is_writing = True
        assert tier.write([block], soon()).outcomes == (WriteOutcome.STORED,)
        is_writing = False
    assert faults
    assert present(tier, hot) == [False] * 12


def entries_of(numbers: range, payload_bytes: int) -> np.ndarray:
    entries = np.zeros(len(numbers), ENTRY_DTYPE)
    headers = np.zeros(len(numbers), PACKED_HEADER)
    headers["block_hash"][:, 0] = np.array(numbers) + 1
    headers["payload_bytes"] = payload_bytes
    entries["header"], entries["written_s"] = headers, 1
    return entries


def test_the_choice_weighs_age_against_what_is_worth_keeping() -> None:
    index = SegmentIndex()
    for segment in (1, 2, 3):
        index.put(entries_of(range(segment * 100, segment * 100 + 20), 40_000), segment)
    assert choose_victim(index, [], 1 << 20) is None
    assert choose_victim(index, [1, 2, 3], 1 << 20) == 1  # the oldest of equals
    assert choose_victim(index, [2, 3], 1 << 20) == 2
    index.touch(index.rows_of(1))
    assert choose_victim(index, [1, 2, 3], 1 << 20) == 2  # nobody read it
    index.touch(index.rows_of(2)[:10])
    index.touch(index.rows_of(3)[:10])
    assert choose_victim(index, [1, 2, 3], 1 << 20) == 2  # half of it, and older than the third
    index.drop(index.rows_of(3))
    assert choose_victim(index, [1, 2, 3], 1 << 20) == 3  # it costs nothing


def test_the_bytes_of_all_blocks_are_those_of_their_rows() -> None:
    index = SegmentIndex()
    index.put(entries_of(range(3), 100), 1)
    assert index.payload_total_bytes == 300
    twice = np.concatenate([entries_of(range(2, 4), 200), entries_of(range(2, 3), 50)])
    index.put(twice, 2)  # moved, new, and the one that was moved once more
    assert index.payload_total_bytes == 100 + 100 + 50 + 200
    index.drop(index.rows_of(1))
    assert index.payload_total_bytes == 50 + 200
    index.put(entries_of(range(10, 3000), 1), 3)  # the columns grow
    assert index.payload_total_bytes == 250 + 2990
    for segment in (2, 3):
        index.drop(index.rows_of(segment))
    assert index.payload_total_bytes == 0


def test_reads_are_counted_to_a_limit_and_wear_off() -> None:
    index = SegmentIndex()
    index.put(entries_of(range(1), 100), 1)
    rows = index.rows_of(1)
    for _ in range(300):
        index.touch(rows)
    assert index.reads[rows].tolist() == [READS_MAX]
    index.halve_reads()
    assert index.reads[rows].tolist() == [READS_MAX // 2]
    index.put(entries_of(range(1), 100), 2)
    assert index.reads[rows].tolist() == [0]


class Killed(BaseException):
    """Ends a write as a signal would."""


SMALL_BYTES = 128 << 10
"""Of a segment: ten records of 12 KiB."""


class Mover:
    """A store in which the write of ``number`` moves two hot blocks, and dies at one of its steps.

    Without a number, the first write that moves anything.
    """

    def __init__(self, directory: Path, number: int = 0, steps_left: int = 0) -> None:
        self.steps: list[str] = []
        self.steps_left = steps_left
        self.hot = [make_block(number, 8000) for number in range(2)]
        self.directory = directory
        tier = self.open(SsdOptions(hook=self.hook))
        store(tier, *self.hot)
        self.number = 100
        while not tier.usage().detail["written_moved_bytes"] and self.number != number + 1:
            for _ in range(READS_MAX):
                fetch(tier, *self.hot)
            self.is_watched = self.number == number
            self.steps.clear()
            try:
                tier.write([make_block(self.number, 8000)], soon())
            except Killed:
                tier._directory_lock.release()
                return
            self.number += 1
        done = list(self.steps)
        tier.close()
        self.steps = done

    is_watched = False

    def hook(self, step: str) -> None:
        self.steps.append(step)
        self.steps_left -= self.is_watched
        if self.is_watched and not self.steps_left:
            raise Killed

    def open(self, options: SsdOptions | None = None) -> SsdTier:
        capacity_bytes = 4 * SMALL_BYTES + METADATA_BYTES
        return SsdTier(self.directory, capacity_bytes, SMALL_BYTES, options)


@pytest.mark.slow
def test_killed_at_any_step_of_a_move_each_block_is_there_once(tmp_path: Path) -> None:
    first = Mover(tmp_path / "first")
    steps, number = list(first.steps), first.number - 1
    wanted = ["record.read", "record.write", "record.publish", "segment.sync", "segment.unlink"]
    assert [step for step in steps if step in wanted][:2] == ["record.read", "record.read"]
    assert set(wanted) <= set(steps)
    for place, step in enumerate(steps):
        killed = Mover(tmp_path / f"{place}-{step}", number, place + 1)
        assert killed.steps == steps[: place + 1]
        tier = killed.open()
        assert fetch(tier, *killed.hot) == [None] * 2
        hashes = [header.block_hash for header in unpack_headers(tier.headers())]
        assert len(hashes) == len(set(hashes)) == tier.usage().num_blocks
        tier.close()


@pytest.mark.slow
def test_a_slow_move_leaves_the_write_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock, moved by the test, runs a second with each record read; a write has four."""
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])

    def hook(step: str) -> None:
        now_ns[0] += (step == "record.read") * 10**9

    capacity_bytes = 4 * (8 << 20) + METADATA_BYTES
    tier = SsdTier(tmp_path, capacity_bytes, 8 << 20, SsdOptions(hook=hook))
    hot = [make_block(number, 1_000_000) for number in range(2)]
    store(tier, *hot)
    for number in range(100, 160):
        for _ in range(READS_MAX):
            tier.read([read_of(block) for block in hot], now_ns[0] + 10**12)
        report = tier.write([make_block(number, 1_000_000)], now_ns[0] + 4 * 10**9)
        assert report.outcomes == (WriteOutcome.STORED,)
    assert tier.usage().detail["written_moved_bytes"]
    tier.close()
