"""Stores with random damage under valid checksums: fsck still reports, and the store still opens.

A checksum proves that bytes are the ones that were written, not that they make sense. Whatever a
file says about sizes, counts and places, only what was stored is served, and no memory is taken
for a size that does not fit its segment.
"""

import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import xxhash

from kvtier.core.identity import HEADER_BYTES, Selection
from kvtier.testing.block import TEST_KEY_SPACE, make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.seal import STAMP_BYTES, Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO, Disk
from kvtier.tiers.ssd.fsck import Fsck, FsckPurpose, FsckReport
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.segment import _HEADER, _TRAILER, ENTRY_DTYPE, footer_bytes
from kvtier.tiers.ssd.store import SsdTier

PAGE_BYTES = 4096
SEGMENT_BYTES = 128 << 10
CAPACITY_BYTES = 6 * SEGMENT_BYTES + METADATA_BYTES
RECORD_BYTES = 4 * PAGE_BYTES
BLOCKS = [make_block(number, 9_000) for number in range(18)]
"""Seven blocks per segment; the last segment stays open."""

ODD_NUMBERS = (0, 1, PAGE_BYTES, SEGMENT_BYTES, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
NUM_STORES = 300

PLAIN = Seal(SealMode.OFF, None, "ssd")


def odd(rng: random.Random, num_bytes: int) -> bytes:
    """Return a number at or near a limit of integer arithmetic."""
    number = rng.choice(ODD_NUMBERS) + rng.choice((-1, 0, 0, 1, PAGE_BYTES))
    return (number % (1 << 8 * num_bytes)).to_bytes(num_bytes, "little")


def put(content: bytearray, offset: int, piece: bytes) -> None:
    content[offset : offset + len(piece)] = piece


def check(content: bytearray, start: int, end: int) -> None:
    """Write the checksum of ``[start, end)`` at ``end``."""
    put(content, end, struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(content[start:end]))))


def change_header(rng: random.Random, content: bytearray) -> None:
    offset, size = rng.choice(((8, 2), (32, 8), (40, 8)))  # version, number, size
    put(content, offset, odd(rng, size))
    check(content, 0, _HEADER.size)


def change_footer(rng: random.Random, content: bytearray) -> None:
    end = len(content) - _TRAILER.size - 8
    count = struct.unpack_from("<I", content, end + 16)[0]
    start = len(content) - footer_bytes(count)
    if not 0 < count < 100 or start < 0:
        return
    for _ in range(rng.randint(1, 3)):
        entry = start + rng.randrange(count) * ENTRY_DTYPE.itemsize
        offset, size = rng.choice(((80, 8), (80, 8), (128, 4), (132, 4), (12, 4), (48, 8)))
        put(content, entry + offset, odd(rng, size))
    if rng.random() < 0.2:
        put(content, end + rng.choice((16, 20)), odd(rng, 4))  # count, opening
    packed = bytes(content[start : start + count * ENTRY_DTYPE.itemsize])
    digest = xxhash.xxh3_64_intdigest(packed + bytes(content[end : end + _TRAILER.size]))
    put(content, end + _TRAILER.size, struct.pack("<Q", digest))


def change_record(rng: random.Random, content: bytearray) -> None:
    start = PAGE_BYTES + rng.randrange(7) * RECORD_BYTES
    mark = start + HEADER_BYTES
    stamp = mark + 24
    in_header = ((start, 1), (start + 12, 4), (start + 48, 8), (start + 80, 8))
    in_mark = ((mark + 8, 8), (mark + 16, 4), (mark + 20, 4), (stamp, 1), (stamp + 8, 8))
    offset, size = rng.choice((*in_header, (start + 80, 8), *in_mark))
    put(content, offset, odd(rng, size))
    check(content, start, start + HEADER_BYTES + 24 + STAMP_BYTES)


def copy_record(rng: random.Random, content: bytearray) -> None:
    """Copy a whole record, or the first page of one, to another place."""
    source, target = (PAGE_BYTES * rng.randrange(1, 29) for _ in range(2))
    size = rng.choice((PAGE_BYTES, RECORD_BYTES))
    put(content, target, bytes(content[source : source + size])[: len(content) - target])


def overwrite(rng: random.Random, content: bytearray) -> None:
    offset = rng.randrange(len(content))
    put(content, offset, rng.randbytes(min(rng.choice((1, 300, 9000)), len(content) - offset)))


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.choice((0, 50, PAGE_BYTES, rng.randrange(1, len(content)))) :]


def extend(rng: random.Random, content: bytearray) -> None:
    content += bytes(rng.choice((1, PAGE_BYTES, SEGMENT_BYTES)))


DAMAGES: Mapping[Callable[[random.Random, bytearray], None], int] = {
    change_header: 1,
    change_footer: 4,
    change_record: 4,
    copy_record: 1,
    overwrite: 1,
    cut: 1,
    extend: 1,
}


def damage(rng: random.Random, directory: Path) -> None:
    for path in rng.sample(sorted(directory.glob("*.segment")), rng.randint(1, 3)):
        content = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 2)):
            if len(content) == SEGMENT_BYTES:
                rng.choices(list(DAMAGES), DAMAGES.values())[0](rng, content)
        path.write_bytes(content)


def fsck(directory: Path, purpose: FsckPurpose) -> FsckReport:
    return Fsck(Disk(directory, DirectIO.OFF), PLAIN, purpose).run()


def use(directory: Path) -> None:
    """Open a store, and run everything that reads its files."""
    tier = SsdTier(directory, CAPACITY_BYTES, SEGMENT_BYTES, SsdOptions(direct_io=DirectIO.OFF))
    assert tier._pool.index.payload_bytes.max(initial=0) < SEGMENT_BYTES
    while not tier.scrub(1 << 20, soon()).is_pass_over:
        pass
    fetch(tier, *BLOCKS)  # each block is either correct or a miss
    store(tier, *BLOCKS[:9])
    tier.purge(Selection(key_space=TEST_KEY_SPACE), soon())
    assert not any(tier.contains([block.header.block_hash for block in BLOCKS], soon()))
    tier.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "ssd"
    tier = SsdTier(directory, CAPACITY_BYTES, SEGMENT_BYTES, SsdOptions(direct_io=DirectIO.OFF))
    store(tier, *BLOCKS)
    tier.close()
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_STORES, 50))
def test_a_damaged_store_is_checked_repaired_and_used(
    sound: Path, tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + 50):
        print("seed", seed)
        damaged, repaired = tmp_path / f"{seed}", tmp_path / f"{seed}-repaired"
        shutil.copytree(sound, damaged)
        damage(random.Random(seed), damaged)
        fsck(damaged, FsckPurpose.CHECK)
        shutil.copytree(damaged, repaired)
        use(damaged)
        for _ in range(2):  # a rewritten footer may reveal records that the old one hid
            fsck(repaired, FsckPurpose.REPAIR)
        assert fsck(repaired, FsckPurpose.CHECK).num_faults == 0
        use(repaired)
        shutil.rmtree(damaged)
        shutil.rmtree(repaired)


def test_memory_does_not_grow_with_the_number_of_a_segment(sound: Path, tmp_path: Path) -> None:
    directory, number = tmp_path / "ssd", 1 << 29
    shutil.copytree(sound, directory)
    path = min(directory.glob("*.segment"))
    content = bytearray(path.read_bytes())
    put(content, 32, struct.pack("<Q", number))
    check(content, 0, _HEADER.size)
    for start in range(PAGE_BYTES, PAGE_BYTES + 7 * RECORD_BYTES, RECORD_BYTES):
        put(content, start + HEADER_BYTES + 8, struct.pack("<Q", number))
        check(content, start, start + HEADER_BYTES + 24 + STAMP_BYTES)
    path.unlink()
    (directory / f"{number:016x}.segment").write_bytes(content)
    tracemalloc.start()
    try:
        use(directory)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 512 << 20  # one byte per segment number would take that much
