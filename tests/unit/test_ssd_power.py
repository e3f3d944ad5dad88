"""Power losses: of what was not synced, any part may be on the disk, and any may be missing.

A double of the kernel keeps what each file was like when it was last synced, and which names the
directory had. An image of the disk after a power loss is that, with any of the pages that were
written since. Opened, it must serve nothing wrong, and all that the durability promises.
"""

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from ssd_files import CAPACITY_BYTES, SEGMENT_BYTES, blocks_of

from kvtier.core.identity import Selection, tenant_digest
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason, WriteOutcome
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.store import SsdTier

pytestmark = pytest.mark.slow

PAGE_BYTES = 4096
MISSES = {MissReason.ABSENT, MissReason.CHECKSUM, MissReason.HEADER}


class Kernel:
    """What of a directory a power loss leaves for sure."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.names: dict[str, int] = {}
        self.synced: dict[int, bytes] = {}
        """Content by inode: a file is synced, whatever its name."""
        self.before_sync: Callable[[], None] = lambda: None
        for name in ("fsync", "fdatasync"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda fd, real=real: self._sync(fd, real))

    def _sync(self, fd: int, real) -> None:
        self.before_sync()
        real(fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self.names = {path.name: path.stat().st_ino for path in self.directory.iterdir()}
        else:
            self.synced[found.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def image(self, target: Path, generator: random.Random) -> None:
        """Write what the disk may be like now if the power fails."""
        target.mkdir()
        names = dict(self.names)
        now = {path.name: path.stat().st_ino for path in self.directory.glob("*.segment")}
        for name in names.keys() ^ now.keys():  # made or removed since: either may be
            if generator.random() < 0.5:
                names.pop(name, None)
                names |= {name: now[name]} if name in now else {}
        for name, inode in sorted(names.items()):
            synced = self.synced.get(inode, b"")
            current = (self.directory / name).read_bytes() if name in now else synced
            (target / name).write_bytes(_mixed(synced, current, generator))


def _mixed(synced: bytes, current: bytes, generator: random.Random) -> bytes:
    """Return the current content with some of its unsynced pages as they were before."""
    pages = bytearray(current)
    share = generator.random()
    for start in range(0, len(current), PAGE_BYTES):
        part = slice(start, start + PAGE_BYTES)
        if synced[part] != current[part] and generator.random() < share:
            pages[part] = synced[part].ljust(len(current[part]), b"\0")
    return bytes(pages)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path / "ssd", monkeypatch)


def reopened(image: Path) -> SsdTier:
    return SsdTier(image, CAPACITY_BYTES, SEGMENT_BYTES)


def check(image: Path, stored: list[BlockWrite], promised: list[BlockWrite]) -> None:
    """Nothing wrong (fetch sees to that), nothing that was promised missing, and all usable."""
    tier = reopened(image)
    try:
        assert set(fetch(tier, *stored)) <= {None} | MISSES
        assert fetch(tier, *promised) == [None] * len(promised)
        assert set(tier.write(stored[:5], soon()).outcomes) == {WriteOutcome.STORED}
        assert fetch(tier, *stored[:5]) == [None] * 5
    finally:
        tier.close()


@pytest.mark.parametrize(
    ("mode", "durability"),
    [
        (DirectIO.AUTO, Durability.BATCH),
        (DirectIO.OFF, Durability.BATCH),
        (DirectIO.AUTO, Durability.SEGMENT),
        (DirectIO.OFF, Durability.SEGMENT),
    ],
)
def test_what_is_promised_is_there(
    kernel: Kernel, tmp_path: Path, mode: DirectIO, durability: Durability
) -> None:
    """Of every step of every write, one image."""
    seed = 7
    print(f"seed {seed}")
    generator = random.Random(seed)
    images: list[tuple[Path, int]] = []
    blocks = blocks_of(range(26))
    done = 0

    def hook(step: str) -> None:
        if step in {"record.publish", "segment.footer"} or generator.random() < 0.2:
            images.append((tmp_path / f"image{len(images)}", done))
            kernel.image(images[-1][0], generator)

    tier = SsdTier(
        kernel.directory, CAPACITY_BYTES, SEGMENT_BYTES, SsdOptions(mode, durability, hook=hook)
    )
    for start in range(0, 26, 3):
        store(tier, *blocks[start : start + 3])
        done = min(26, start + 3)
    is_each_synced = durability is Durability.BATCH or not tier.usage().detail["direct_io"]
    tier.close()
    hook("record.publish")
    for image, num_done in images:
        # A segment has room for ten, and is sealed when the eleventh comes.
        num_promised = num_done if is_each_synced else max(0, num_done - 1) // 10 * 10
        check(image, blocks, blocks[:num_promised])
    check(images[-1][0], blocks, blocks)


@pytest.mark.parametrize("durability", list(Durability))
def test_what_was_removed_stays_away(
    kernel: Kernel, tmp_path: Path, durability: Durability
) -> None:
    seed = 11
    print(f"seed {seed}")
    generator = random.Random(seed)
    alice = tenant_digest("alice")
    blocks, purged = blocks_of(range(24)), blocks_of(range(6), alice)
    tier = SsdTier(
        kernel.directory, CAPACITY_BYTES, SEGMENT_BYTES, SsdOptions(durability=durability)
    )
    store(tier, *blocks[:4], *purged[:3], *blocks[4:20], *purged[3:], *blocks[20:])
    removed = [blocks[2], *blocks[7:17], blocks[21]]  # all of the second segment among them
    tier.remove([block.header.block_hash for block in removed], soon())
    for number in range(4):
        kernel.image(tmp_path / f"removed{number}", generator)
        check_gone(tmp_path / f"removed{number}", removed, blocks)
    tier.purge(Selection(tenant=alice), soon())
    for number in range(4):
        image = tmp_path / f"purged{number}"
        kernel.image(image, generator)
        content = b"".join(path.read_bytes() for path in image.glob("*.segment"))
        assert not [block for block in purged if bytes(block.payload[:32]) in content]
        check_gone(image, [*removed, *purged], blocks)
    tier.close()


@pytest.mark.parametrize("num_others", [2, 8])  # in one segment that is open still, and in two
def test_a_purge_that_a_power_loss_ends_is_ended_by_the_next(
    kernel: Kernel, tmp_path: Path, num_others: int
) -> None:
    """A record whose header is gone must not keep its payload: nobody would find that again."""
    seed = 13
    print(f"seed {seed}")
    generator = random.Random(seed)
    alice = tenant_digest("alice")
    blocks, purged = blocks_of(range(num_others)), blocks_of(range(6), alice)
    options = SsdOptions(durability=Durability.BATCH)  # so that payloads may come back at all
    tier = SsdTier(kernel.directory, CAPACITY_BYTES, SEGMENT_BYTES, options)
    store(tier, *blocks[:1], *purged, *blocks[1:])
    images: list[Path] = []

    def lose_power() -> None:
        for _ in range(4):
            images.append(tmp_path / f"image{len(images)}")
            kernel.image(images[-1], generator)

    kernel.before_sync = lose_power
    tier.purge(Selection(tenant=alice), soon())
    kernel.before_sync = lambda: None
    tier.close()
    for image in images:
        again = reopened(image)
        try:
            again.purge(Selection(tenant=alice), soon())
            content = b"".join(path.read_bytes() for path in image.glob("*.segment"))
            assert not [block for block in purged if bytes(block.payload[:32]) in content]
            assert set(fetch(again, *blocks)) <= {None} | MISSES
        finally:
            again.close()


def check_gone(image: Path, gone: list[BlockWrite], stored: list[BlockWrite]) -> None:
    tier = reopened(image)
    try:
        assert not any(tier.contains([block.header.block_hash for block in gone], soon()))
        assert set(fetch(tier, *stored)) <= {None} | MISSES
    finally:
        tier.close()
