"""fsck on a store that nobody has open: it finds every kind of fault, and repairs it for good."""

import argparse
import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from kvtier.cli import fsck as command
from kvtier.core.identity import unpack_headers
from kvtier.errors import StartError
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO, Disk, no_hook
from kvtier.tiers.ssd.fsck import Fsck, FsckPurpose, FsckReport
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.segment import _CHECK, _HEADER, _TRAILER, ENTRY_DTYPE, footer_bytes
from kvtier.tiers.ssd.store import SsdTier

SEGMENT_BYTES = 256 << 10
CAPACITY_BYTES = 6 * SEGMENT_BYTES + METADATA_BYTES
BLOCK_BYTES = 20_000
"""Ten of them to a segment: with its header page a record takes 24 KiB."""

RECORD_BYTES = 24_576
PLAIN = Seal(SealMode.OFF, None, "ssd")


class Killed(BaseException):
    """Ends a repair as a signal would: nothing after it is done."""


class Store:
    """A directory with 35 blocks in four segments, the last of them open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with_blocks = self.open()
        store(with_blocks, *blocks_of(range(35)))
        with_blocks.close()

    def open(self, seal: Seal = PLAIN) -> SsdTier:
        options = SsdOptions(seal=seal)
        return SsdTier(self.directory, CAPACITY_BYTES, SEGMENT_BYTES, options)

    def path(self, segment: int) -> Path:
        return sorted(self.directory.glob("*.segment"))[segment]

    def damage(self, segment: int, offset: int, content: bytes = b"rotten") -> None:
        with self.path(segment).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def damage_record(self, segment: int, record: int, offset: int = 5000) -> None:
        self.damage(segment, 4096 + record * RECORD_BYTES + offset)

    def rename(self, segment: int, number: int) -> None:
        self.path(segment).rename(self.directory / f"{number:016x}.segment")

    def drop_footer(self, segment: int) -> None:
        self.damage(segment, SEGMENT_BYTES - 4096, bytes(4096))

    def of_other_version(self, segment: int, number: int) -> Path:
        """Have a file be of another version, which differs from this one behind the first page."""
        path = self.directory / f"{number:016x}.segment"
        packed = self.path(segment).read_bytes()[: _HEADER.size]
        magic, version, zero, instance, _, size_bytes = _HEADER.unpack(packed)
        packed = _HEADER.pack(magic, version + 1, zero, instance, number, size_bytes)
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(packed))
        self.damage(segment, 0, packed + check + b"\xaa" * 10_000)
        return self.path(segment).rename(path)

    def declare(self, segment: int, payload_bytes: int) -> None:
        """Change the second block's entry in the footer, and update the checksum."""
        content = bytearray(self.path(segment).read_bytes())
        end = SEGMENT_BYTES - _TRAILER.size - _CHECK.size
        (count,) = struct.unpack_from("<I", content, end + 16)
        start = SEGMENT_BYTES - footer_bytes(count)
        stop = start + count * ENTRY_DTYPE.itemsize
        struct.pack_into("<Q", content, start + ENTRY_DTYPE.itemsize + 80, payload_bytes)
        check = xxhash.xxh3_64_intdigest(content[start:stop] + content[end : end + _TRAILER.size])
        _CHECK.pack_into(content, end + _TRAILER.size, check)
        self.path(segment).write_bytes(content)

    def harm_footerless(self, segment: int, record: int) -> None:
        self.drop_footer(segment)
        self.damage_record(segment, record, 40)

    def fsck(
        self, purpose: FsckPurpose = FsckPurpose.CHECK, hook: Callable[[str], None] = no_hook
    ) -> FsckReport:
        return Fsck(Disk(self.directory, DirectIO.OFF, hook), PLAIN, purpose).run()

    def content(self) -> dict[str, tuple[bytes, int]]:
        """Return what every file holds, and when it was last changed."""
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in self.directory.iterdir()
            if path.name != "lock"
        }

    def served(self) -> set[int]:
        """Open the store; returns which of the blocks it serves."""
        tier = self.open()
        verdicts = fetch(tier, *blocks_of(range(35)))
        assert tier.usage().num_blocks >= len(unpack_headers(tier.headers()))
        tier.close()
        return {number for number, verdict in enumerate(verdicts) if verdict is None}


@pytest.fixture
def kept(tmp_path: Path) -> Store:
    return Store(tmp_path / "ssd")


def blocks_of(numbers: range) -> list[BlockWrite]:
    return [make_block(number, BLOCK_BYTES) for number in numbers]


def test_a_sound_store_is_clean_and_nothing_is_changed(kept: Store) -> None:
    before = kept.content()
    for purpose in FsckPurpose:
        report = kept.fsck(purpose)
        assert (report.num_faults, report.repaired.total()) == (0, 0)
        assert (report.segments, report.records, report.live_blocks) == (4, 35, 35)
        assert report.live_bytes == 35 * BLOCK_BYTES
        allocated = sum(path.stat().st_blocks * 512 for path in kept.directory.iterdir())
        assert report.used_bytes == allocated
        assert kept.content() == before


def test_removed_records_are_no_fault(kept: Store) -> None:
    tier = kept.open()
    tier.remove([block.header.block_hash for block in blocks_of(range(5, 8))], soon())
    tier.close()
    report = kept.fsck()
    assert (report.num_faults, report.removed_records, report.live_blocks) == (0, 3, 32)


FAULTS: dict[str, tuple[Callable[[Store], None], dict[str, object], set[int]]] = {
    "payload": (
        lambda kept: kept.damage_record(1, 3),
        {"damaged_records": {"checksum": 1}},
        {13},
    ),
    "header": (
        lambda kept: kept.damage_record(1, 3, 40),
        {"damaged_records": {"header": 1}},
        {13},
    ),
    "mark": (
        lambda kept: kept.damage_record(1, 3, 130),
        {"damaged_records": {"header": 1}},
        {13},
    ),
    "open segment": (
        lambda kept: kept.damage_record(3, 2),
        {"damaged_records": {"checksum": 1}},
        {32},
    ),
    "header in the open segment": (
        lambda kept: kept.damage_record(3, 2, 40),
        {"unreachable_bytes": RECORD_BYTES},
        {32},
    ),
    "footer gone": (lambda kept: kept.drop_footer(1), {"footers_missing": 1}, set()),
    "footer rotten": (
        lambda kept: kept.damage(1, SEGMENT_BYTES - 3000),
        {"footers_wrong": 1},
        set(),
    ),
    "footer and header gone": (
        lambda kept: kept.harm_footerless(1, 3),
        {"footers_missing": 1, "unreachable_bytes": RECORD_BYTES},
        {13},
    ),
    "first header gone": (
        lambda kept: kept.harm_footerless(1, 0),
        {"footers_missing": 1, "unreachable_bytes": RECORD_BYTES},
        {10},
    ),
    "cut short": (
        lambda kept: os.truncate(kept.path(1), 4096 + 5 * RECORD_BYTES + 777),
        {"files_cut_short": 1},
        {14, 15, 16, 17, 18, 19},
    ),
    "cut to nothing": (
        lambda kept: os.truncate(kept.path(1), 5000),
        {"files_cut_short": 1},
        set(range(10, 20)),
    ),
    "empty": (
        lambda kept: os.truncate(kept.path(1), 0),
        {"unreadable_files": 1},
        set(range(10, 20)),
    ),
    "no segment": (
        lambda kept: kept.damage(1, 0, bytes(4096)),
        {"unreadable_files": 1},
        set(range(10, 20)),
    ),
    "no version that was written": (
        lambda kept: kept.damage(1, 8, b"\x63\0"),
        {"unreadable_files": 1},
        set(range(10, 20)),
    ),
    "another's name": (
        lambda kept: kept.rename(3, 77),
        {"unreadable_files": 1},
        set(range(30, 35)),
    ),
    "all zeros": (
        lambda kept: kept.damage(1, 4096, bytes(SEGMENT_BYTES - 4096)),
        {"footers_missing": 1},
        set(range(10, 20)),
    ),
}


def faults_of(report: FsckReport) -> dict[str, object]:
    names = (
        "damaged_records",
        "duplicate_records",
        "footers_missing",
        "footers_wrong",
        "unreachable_bytes",
        "files_cut_short",
        "unreadable_files",
        "unreadable_records",
        "failed",
    )
    values = {name: getattr(report, name) for name in names}
    return {name: value for name, value in values.items() if value}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_repaired(kept: Store, name: str) -> None:
    harm, expected, lost = FAULTS[name]
    harm(kept)
    before = kept.content()
    report = kept.fsck()
    assert kept.content() == before
    assert report.num_faults > 0
    assert faults_of(report) == expected
    repair = kept.fsck(FsckPurpose.REPAIR)
    assert repair.num_faults == report.num_faults
    assert repair.num_left == 0
    assert repair.repaired.total() > 0
    after = kept.content()
    again = kept.fsck(FsckPurpose.REPAIR)
    assert faults_of(again) == {}
    assert again.repaired.total() == 0
    assert kept.content() == after
    assert kept.served() == set(range(35)) - lost
    tier = kept.open()
    assert tier.usage().num_blocks == 35 - len(lost)
    store(tier, *blocks_of(range(35)))
    tier.close()
    assert kept.served() == set(range(35))


@pytest.mark.parametrize("name", FAULTS)
def test_a_start_serves_no_less_than_a_repair_saves(kept: Store, name: str) -> None:
    harm, _, lost = FAULTS[name]
    harm(kept)
    assert kept.served() == set(range(35)) - lost
    assert kept.served() == set(range(35)) - lost


@pytest.mark.slow
def test_a_repair_may_be_killed_at_any_step(tmp_path: Path) -> None:
    steps_left = 0
    num_kills = 0

    def hook(_step: str) -> None:
        nonlocal steps_left
        steps_left -= 1
        if steps_left == 0:
            raise Killed

    is_done = False
    while not is_done:
        kept = Store(tmp_path / str(num_kills))
        kept.damage_record(0, 2)
        kept.damage_record(0, 5, 40)
        kept.drop_footer(1)
        kept.damage_record(1, 1, 40)
        kept.damage(2, 0, bytes(4096))
        steps_left = num_kills + 1
        try:
            kept.fsck(FsckPurpose.REPAIR, hook)
            is_done = True
        except Killed:
            num_kills += 1
        assert kept.fsck(FsckPurpose.REPAIR).num_left == 0
        assert kept.fsck().num_faults == 0
        assert kept.served() == set(range(35)) - {2, 5, 11, *range(20, 30)}
    assert num_kills > 5


def test_of_two_records_of_a_block_the_earlier_is_a_duplicate(kept: Store) -> None:
    with_twins = kept.path(0).read_bytes()
    tier = kept.open()
    removed = blocks_of(range(3))
    tier.remove([block.header.block_hash for block in removed], soon())
    store(tier, *removed)
    tier.close()
    kept.path(0).write_bytes(with_twins)  # as a crash in the middle of a move leaves it
    report = kept.fsck()
    assert (report.duplicate_records, report.live_blocks, report.num_faults) == (3, 35, 3)
    assert kept.fsck(FsckPurpose.REPAIR).repaired == {"duplicates removed": 3}
    assert kept.fsck().num_faults == 0
    assert kept.served() == set(range(35))


def test_a_removal_counts_for_the_earlier_records_of_its_block(kept: Store) -> None:
    with_twins = kept.path(0).read_bytes()
    tier = kept.open()
    hashes = [block.header.block_hash for block in blocks_of(range(3))]
    tier.remove(hashes, soon())
    store(tier, *blocks_of(range(3)))
    tier.remove(hashes, soon())
    tier.close()
    kept.path(0).write_bytes(with_twins)
    assert kept.fsck().live_blocks == 32
    assert kept.served() == set(range(3, 35))


def test_a_sector_that_cannot_be_read_is_left_alone(kept: Store) -> None:
    def hook(step: str) -> None:
        if step == "record.read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = kept.content()
    report = kept.fsck(FsckPurpose.REPAIR, hook)
    assert (report.unreadable_records, report.num_left) == (35, 35)
    assert kept.content() == before


@pytest.mark.parametrize("payload_bytes", [BLOCK_BYTES + 4096, 1 << 31, (1 << 64) - 1])
def test_a_footer_with_an_impossible_size_is_refused(kept: Store, payload_bytes: int) -> None:
    kept.declare(1, payload_bytes)
    tier = kept.open()
    assert tier.usage().detail["footers_refused_at_start"] == 1
    assert tier._pool.index.payload_bytes.max() == BLOCK_BYTES
    tier.close()
    assert kept.served() == set(range(35))  # the blocks are found by their records
    kept.declare(2, payload_bytes)
    assert kept.fsck().footers_wrong == 1
    assert kept.fsck(FsckPurpose.REPAIR).repaired == {"footers written": 1}
    assert kept.fsck().num_faults == 0


def test_strangers_are_counted_and_left_alone(kept: Store) -> None:
    (kept.directory / "notes.txt").write_text("mine")
    (kept.directory / "key_spaces.json").write_text("{}")
    (kept.directory / "folder").mkdir()
    link = kept.directory / f"{99:016x}.segment"
    link.symlink_to(kept.directory / "notes.txt")
    report = kept.fsck(FsckPurpose.REPAIR)
    assert (report.foreign_files, report.num_faults) == (3, 0)
    assert report.foreign_names == [link.name, "folder", "notes.txt"]
    assert link.is_symlink()


@pytest.mark.parametrize("number", [2, 99], ids=["in between", "behind the open one"])
def test_what_another_version_wrote_is_no_fault_and_is_left_for_it(
    kept: Store, number: int
) -> None:
    others = kept.of_other_version(1, number)
    before = kept.content()
    for purpose in FsckPurpose:
        report = kept.fsck(purpose)
        assert faults_of(report) | report.repaired == {}
        assert (report.set_aside_files, report.set_aside_bytes) == (1, SEGMENT_BYTES)
        assert report.segments == 3
        assert kept.content() == before
    tier = kept.open()
    detail = tier.usage().detail
    assert (detail["files_set_aside"], detail["set_aside_bytes"]) == (1, SEGMENT_BYTES)
    tier.close()
    assert others.exists()
    report = Fsck(
        Disk(kept.directory, DirectIO.OFF), PLAIN, FsckPurpose.CHECK, keeps_others=False
    ).run()
    assert report.repaired == {"files of another version removed": 1}
    assert not others.exists()
    assert kept.fsck().set_aside_files == 0


def test_the_command_says_what_was_set_aside_and_removes_it_only_when_told(
    kept: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    others = kept.of_other_version(1, 2)
    directory = str(kept.directory)
    for more in ([], ["--repair"]):
        code, out = run(capsys, "--directory", directory, *more)
        assert code == 0
        assert "FAULT" not in out
        assert "files of another version set aside: 1, 256 KiB" in out
        assert "clean" in out
        assert "--remove-set-aside removes them" in out
        assert others.exists()
    code, out = run(capsys, "--directory", directory, "--remove-set-aside")
    assert code == 0
    assert "repaired: files of another version removed: 1" in out
    assert not others.exists()


def test_of_a_running_daemons_store_nothing_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartError) as raised:
        run(capsys, "--connect", "/run/k.sock", "--remove-set-aside")
    assert raised.value.field == "--remove-set-aside"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code, capsys.readouterr().out


def test_the_command_says_what_it_found_and_did(
    kept: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(kept.directory)
    assert run(capsys, "--directory", directory)[0] == 0
    kept.damage_record(1, 3)
    code, out = run(capsys, "--directory", directory)
    assert code == 1
    assert "FAULT damaged records (checksum): 1" in out
    code, out = run(capsys, "--directory", directory, "--json")
    assert code == 1
    assert json.loads(out)["damaged_records"] == {"checksum": 1}
    code, out = run(capsys, "--directory", directory, "--repair")
    assert code == 0
    assert "repaired: records quarantined: 1" in out
    code, out = run(capsys, "--directory", directory)
    assert code == 0
    assert "clean" in out


def test_the_command_refuses_what_is_no_store_and_one_in_use(
    kept: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in (tmp_path / "nowhere", kept.path(0)):
        with pytest.raises(StartError) as raised:
            run(capsys, "--directory", str(wrong))
        assert raised.value.field == "ssd.directory"
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartError, match="no store in"):
        run(capsys, "--directory", str(tmp_path / "empty"))
    assert not list((tmp_path / "empty").iterdir())
    tier = kept.open()
    with pytest.raises(StartError, match=f"held by pid {os.getpid()}"):
        run(capsys, "--directory", str(kept.directory))
    tier.close()


def test_an_encrypted_store_is_verified_with_its_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"first {1:064x}\n")
    keys.chmod(0o600)
    kept = Store(tmp_path / "ssd")
    tier = kept.open(Seal(SealMode.ENCRYPT, KeyRing.load(keys), "ssd"))
    store(tier, *blocks_of(range(35, 40)))
    tier.close()
    kept.damage_record(3, 7)
    directory = str(kept.directory)
    code, out = run(capsys, "--directory", directory, "--json")
    assert (code, json.loads(out)["unchecked_records"]) == (1, 5)
    code, out = run(capsys, "--directory", directory, "--json", "--key-file", str(keys))
    assert (code, json.loads(out)["damaged_records"]) == (1, {"seal": 1})
