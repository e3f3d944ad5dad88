"""The scrub finds what is damaged or too old before anybody asks, and is in nobody's way."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.core.identity import EVERYTHING, BlockHash
from kvtier.errors import TierError, TierTimeout
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason, Scrubbed
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.store import SsdTier

SEGMENT_BYTES = 256 << 10
CAPACITY_BYTES = 4 * SEGMENT_BYTES + METADATA_BYTES
BLOCK_BYTES = 20_000
"""Ten of them to a segment: with its header page a record takes 24 KiB."""

RECORD_BYTES = 24_576
ALL = 1 << 60


class Store:
    """A directory, a clock, and tiers on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 10**9
        self.tiers: list[SsdTier] = []
        self.failing: list[OSError] = []
        self.seal = Seal(SealMode.OFF, None, "ssd")

    def hook(self, step: str) -> None:
        if step == "record.read" and self.failing:
            raise self.failing.pop()

    def open(self, *, max_age_s: int = 0) -> SsdTier:
        options = SsdOptions(
            max_age_s=max_age_s, hook=self.hook, now_s=lambda: self.now_s, seal=self.seal
        )
        self.tiers.append(SsdTier(self.directory, CAPACITY_BYTES, SEGMENT_BYTES, options))
        return self.tiers[-1]

    def damage(self, segment: int, record: int, offset: int) -> None:
        path = sorted(self.directory.glob("*.segment"))[segment]
        with path.open("r+b") as file:
            file.seek(4096 + record * RECORD_BYTES + offset)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def kept(tmp_path: Path):
    kept = Store(tmp_path / "ssd")
    yield kept
    for tier in kept.tiers:
        tier.close()


def blocks_of(numbers: range) -> list[BlockWrite]:
    return [make_block(number, BLOCK_BYTES) for number in numbers]


def hash_of(number: int) -> BlockHash:
    return make_block(number, BLOCK_BYTES).header.block_hash


def full_pass(tier: SsdTier, max_bytes: int = 3 * RECORD_BYTES) -> Scrubbed:
    """Scrub step by step to the end of a pass; returns the sum."""
    steps = [tier.scrub(max_bytes, soon())]
    while not steps[-1].is_pass_over:
        steps.append(tier.scrub(max_bytes, soon()))
    return Scrubbed(
        sum(step.num_blocks for step in steps),
        sum(step.num_bytes for step in steps),
        tuple(block_hash for step in steps for block_hash in step.damaged),
        tuple(block_hash for step in steps for block_hash in step.expired),
    )


def test_a_pass_sees_every_block_once(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(25)))
    for _ in range(2):
        seen = full_pass(tier)
        assert (seen.num_blocks, seen.num_bytes) == (25, 25 * RECORD_BYTES)
        assert not seen.damaged
    assert fetch(tier, *blocks_of(range(25))) == [None] * 25


def test_an_empty_store_has_nothing_to_scrub(kept: Store) -> None:
    assert kept.open().scrub(ALL, soon()) == Scrubbed()


def test_a_step_is_bounded_and_goes_on_where_the_last_ended(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(10)))
    steps = [tier.scrub(1, soon()) for _ in range(10)]
    assert [step.num_blocks for step in steps] == [1] * 10
    assert [step.is_pass_over for step in steps] == [False] * 9 + [True]


@pytest.mark.slow
@pytest.mark.parametrize("offset", [30, 150, 4096, 4096 + BLOCK_BYTES - 1])
def test_damage_is_quarantined_for_good_and_neighbours_stay(kept: Store, offset: int) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(25)))
    kept.damage(1, 4, offset)
    kept.damage(2, 0, offset)
    seen = full_pass(tier)
    assert sorted(seen.damaged) == sorted([hash_of(14), hash_of(20)])
    assert tier.usage().num_blocks == 23
    assert tier.usage().detail["quarantined_blocks"] == 2
    assert not full_pass(tier).damaged
    sound = [block for number, block in enumerate(blocks_of(range(25))) if number not in {14, 20}]
    assert fetch(tier, *sound) == [None] * 23
    tier.close()
    tier = kept.open()
    assert tier.usage().num_blocks == 23
    assert not full_pass(tier).damaged
    store(tier, *blocks_of(range(25)))
    assert fetch(tier, *blocks_of(range(25))) == [None] * 25


def test_another_blocks_record_is_damage(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(3)))
    path = next(kept.directory.glob("*.segment"))
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(content[4096 + RECORD_BYTES : 4096 + 2 * RECORD_BYTES])
    assert full_pass(tier).damaged == (hash_of(0),)


def test_a_file_cut_short_or_taken_away_is_damage(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(25)))
    paths = sorted(kept.directory.glob("*.segment"))
    os.truncate(paths[0], 4096 + 3 * RECORD_BYTES)
    paths[1].unlink()
    assert sorted(full_pass(tier).damaged) == sorted(hash_of(number) for number in range(3, 20))
    assert fetch(tier, *blocks_of(range(3))) == [None] * 3


def test_a_fault_on_the_way_deletes_nothing(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(5)))
    kept.failing = [OSError(errno.EIO, os.strerror(errno.EIO))]
    with pytest.raises(TierError):
        tier.scrub(ALL, soon())
    assert full_pass(tier).num_blocks == 4  # the pass goes on behind it
    assert fetch(tier, *blocks_of(range(5))) == [None] * 5


def test_what_was_found_before_a_fault_is_reported_by_the_next_step(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(5)))
    kept.damage(0, 0, 5000)
    reads = 0  # one to find the damage, one more to be sure; then the medium fails

    def hook(step: str) -> None:
        nonlocal reads
        reads += step == "record.read"
        if reads == 3:
            reads += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    tier._disk.hook = hook
    with pytest.raises(TierError):
        tier.scrub(ALL, soon())
    assert full_pass(tier).damaged == (hash_of(0),)


def test_what_is_too_old_is_forgotten_and_its_files_go(kept: Store) -> None:
    tier = kept.open(max_age_s=100)
    store(tier, *blocks_of(range(25)))
    kept.now_s += 60
    store(tier, *blocks_of(range(25, 28)))
    assert not full_pass(tier).expired
    kept.now_s += 60
    seen = full_pass(tier)
    assert sorted(seen.expired) == sorted(hash_of(number) for number in range(25))
    assert seen.num_blocks == 3
    assert len(list(kept.directory.glob("*.segment"))) == 1
    kept.now_s += 60
    assert len(full_pass(tier).expired) == 3
    assert not list(kept.directory.glob("*.segment"))
    assert tier.usage().used_bytes == 0
    store(tier, *blocks_of(range(5)))
    assert fetch(tier, *blocks_of(range(5))) == [None] * 5


def test_a_segment_of_which_nothing_counts_any_more_is_given_back(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(25)))
    for record in range(10):
        kept.damage(0, record, 5000)
    assert len(full_pass(tier).damaged) == 10
    full_pass(tier)
    assert len(list(kept.directory.glob("*.segment"))) == 2


def test_a_file_that_could_not_be_read_at_the_start_is_not_taken_for_dead(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(15)))
    tier.close()
    path = kept.directory / f"{1:016x}.segment"
    elsewhere = path.rename(kept.directory.parent / "elsewhere")
    path.symlink_to(elsewhere)  # which is not followed
    tier = kept.open()
    assert full_pass(tier).num_blocks == 5
    for number in range(20, 40):
        tier.write([make_block(number, BLOCK_BYTES)], soon())
    full_pass(tier)
    assert path.is_symlink()
    tier.close()
    elsewhere.rename(path)
    assert fetch(kept.open(), *blocks_of(range(10))) == [None] * 10


def test_the_first_pass_begins_anywhere(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(35)))
    tier.close()
    kept.damage(2, 0, 5000)
    monkeypatch.setattr(os, "urandom", (2).to_bytes)
    tier = kept.open()
    assert tier.scrub(1, soon()).damaged == (hash_of(20),)
    assert full_pass(tier).num_blocks == 34


def test_neither_reads_nor_writes_wait_for_it(kept: Store) -> None:
    reached, released = threading.Event(), threading.Event()
    scrubbing = threading.local()

    def hook(step: str) -> None:
        if step == "record.read" and getattr(scrubbing, "is_on", False):
            reached.set()
            assert released.wait(30)

    def scrub() -> Scrubbed:
        scrubbing.is_on = True
        return tier.scrub(ALL, soon())

    tier = kept.open()
    store(tier, *blocks_of(range(30)))
    tier._disk.hook = hook
    with ThreadPoolExecutor(1) as scrubber:
        running = scrubber.submit(scrub)
        assert reached.wait(30)
        assert fetch(tier, *blocks_of(range(5))) == [None] * 5
        for block in blocks_of(range(30, 60)):
            tier.write([block], soon())
        tier.purge(EVERYTHING, soon())
        released.set()
        assert not running.result(30).damaged
    assert tier.usage().used_bytes == 0


def test_it_ends_by_its_deadline(kept: Store) -> None:
    tier = kept.open()
    store(tier, *blocks_of(range(5)))
    with pytest.raises(TierTimeout):
        tier.scrub(ALL, 0)


def key_file(path: Path, *names: str) -> Path:
    path.write_text("".join(f"{name} {ord(name[0]):064x}\n" for name in names))
    path.chmod(0o600)
    return path


def test_sealed_blocks_are_verified_and_those_without_a_key_left_alone(
    kept: Store, tmp_path: Path
) -> None:
    path = key_file(tmp_path / "keys", "first")
    kept.seal = Seal(SealMode.ENCRYPT, KeyRing.load(path), "ssd")
    tier = kept.open()
    store(tier, *blocks_of(range(5)))
    kept.damage(0, 2, 5000)
    assert full_pass(tier).damaged == (hash_of(2),)
    tier.close()
    kept.seal = Seal(SealMode.ENCRYPT, KeyRing.load(key_file(path, "other")), "ssd")
    tier = kept.open()
    assert not full_pass(tier).damaged
    tier.close()
    kept.seal = Seal(SealMode.ENCRYPT, KeyRing.load(key_file(path, "other", "first")), "ssd")
    sound = [block for number, block in enumerate(blocks_of(range(5))) if number != 2]
    assert fetch(kept.open(), *sound) == [None] * 4
    assert fetch(kept.tiers[-1], make_block(2, BLOCK_BYTES)) == [MissReason.ABSENT]
