"""SsdTier against a naive model, with what disks and operators do to files as rules.

The model knows what was stored and not given up, and which blocks may have been damaged or are too
old. Every block that is served must be right to the last byte (``fetch`` checks that); every block
that nothing has happened to must be served; and nothing of a tenant that was purged may be in the
files, whatever was done to them.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.identity import (
    EVERYTHING,
    BlockHash,
    Selection,
    tenant_digest,
    unpack_headers,
)
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon
from kvtier.tiers.base import BlockWrite, MissReason, WriteOutcome
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.store import SsdTier

SEGMENT_BYTES = 64 << 10
SIZES = [0, 100, 4096, 9000, 30_000]
TENANTS = [tenant_digest(name) for name in ("alice", "bob")]
MAX_AGE_S = 1000
numbers = st.integers(0, 29)


def block_of(number: int) -> BlockWrite:
    return make_block(
        number, SIZES[number % len(SIZES)], tenant=TENANTS[number // len(SIZES) % len(TENANTS)]
    )


def seal_of(directory: Path) -> Seal:
    path = directory / "keys"
    path.touch(mode=0o600)
    path.write_text("test " + "42" * 32)
    return Seal(SealMode.ENCRYPT, KeyRing.load(path), "ssd")


class SsdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.parent = Path(tempfile.mkdtemp(prefix="kvtier-ssd-"))
        self.directory = self.parent / "ssd"
        self.sound: set[BlockHash] = set()
        """Must be served."""
        self.doubtful: set[BlockHash] = set()
        """May be served: their files were damaged."""
        self.expired: set[BlockHash] = set()
        """Must not be served, and may still be counted."""
        self.now_s = 1_800_000_000
        self.damaged_files: set[int] = set()
        self.num_segments = 4

    @property
    def capacity_bytes(self) -> int:
        return self.num_segments * SEGMENT_BYTES + METADATA_BYTES

    @initialize(mode=st.sampled_from([DirectIO.AUTO, DirectIO.OFF]), is_sealed=st.booleans())
    def open(self, mode: DirectIO, is_sealed: bool) -> None:
        self.options = SsdOptions(mode, max_age_s=MAX_AGE_S, now_s=lambda: self.now_s)
        if is_sealed:
            self.options = replace(self.options, seal=seal_of(self.parent))
        self.tier = SsdTier(self.directory, self.capacity_bytes, SEGMENT_BYTES, self.options)

    @rule(chosen=st.lists(numbers, min_size=1, max_size=6))
    def write(self, chosen: list[int]) -> None:
        blocks = [block_of(number) for number in chosen]
        report = self.tier.write(blocks, soon())
        evicted = set(report.evicted)
        assert not evicted & {block.header.block_hash for block in blocks}
        self.sound -= evicted
        self.doubtful -= evicted
        self.expired -= {block.header.block_hash for block in blocks}
        for block, outcome in zip(blocks, report.outcomes, strict=True):
            if outcome is WriteOutcome.REJECTED:
                assert block.header.block_hash not in self.sound
            elif block.header.block_hash not in self.doubtful:
                self.sound.add(block.header.block_hash)
        for number in self.damaged_files:
            self._doubt(number)

    @rule(chosen=st.lists(numbers, min_size=1, max_size=8))
    def read(self, chosen: list[int]) -> None:
        blocks = [block_of(number) for number in dict.fromkeys(chosen)]
        for block, verdict in zip(blocks, fetch(self.tier, *blocks), strict=True):
            block_hash = block.header.block_hash
            if block_hash in self.sound:
                assert verdict is None
            elif block_hash in self.expired:
                assert verdict in {MissReason.EXPIRED, MissReason.ABSENT}
            elif block_hash in self.doubtful:
                assert verdict is not MissReason.IDENTITY
                if verdict is not None:
                    assert self.tier.contains([block_hash], soon()) == [False]
            else:
                assert verdict is MissReason.ABSENT

    @rule(chosen=st.lists(numbers, min_size=1, max_size=4))
    def remove(self, chosen: list[int]) -> None:
        hashes = [block_of(number).header.block_hash for number in chosen]
        removed = self.tier.remove(hashes, soon())
        sound, doubtful = self.sound & set(hashes), self.doubtful & set(hashes)
        expired = self.expired & set(hashes)
        assert len(sound) <= removed.num_blocks <= len(sound | doubtful | expired)
        self.sound -= sound
        # A record forgotten as damaged is not known any more, and so cannot be removed for good.

    @rule()
    def clear(self) -> None:
        self.tier.purge(EVERYTHING, soon())
        assert [path.name for path in self.directory.iterdir()] == ["lock"]
        self.sound.clear()
        self.doubtful.clear()
        self.expired.clear()

    @rule(tenant=st.sampled_from(TENANTS))
    def purge(self, tenant: bytes) -> None:
        self.tier.purge(Selection(tenant=tenant), soon())
        blocks = [block for block in map(block_of, range(30)) if block.header.tenant == tenant]
        meant = {block.header.block_hash for block in blocks}
        content = b"".join(path.read_bytes() for path in self.directory.glob("*.segment"))
        for block in blocks:
            for part in (block.header.block_hash, bytes(block.payload[:16])):
                assert len(part) < 16 or part not in content
        self.sound -= meant
        self.doubtful -= meant
        self.expired -= meant

    @rule()
    def grow_old(self) -> None:
        self.now_s += MAX_AGE_S + 1
        self.expired |= self.sound | self.doubtful
        self.sound.clear()
        self.doubtful.clear()
        assert not any(self.tier.contains(sorted(self.expired), soon()))

    @rule(num_segments=st.integers(2, 5))
    def reopen(self, num_segments: int) -> None:
        self.tier.close()
        self.num_segments = num_segments
        self.tier = SsdTier(self.directory, self.capacity_bytes, SEGMENT_BYTES, self.options)
        kept = {header.block_hash for header in unpack_headers(self.tier.headers())}
        assert kept <= self.sound | self.doubtful
        if len(list(self.directory.glob("*.segment"))) < num_segments:
            assert self.sound <= kept  # nothing had to be given up
        self.sound &= kept

    @precondition(lambda self: list(self.directory.glob("*.segment")))
    @rule(draw=st.data())
    def damage(self, draw: st.DataObject) -> None:
        path = draw.draw(st.sampled_from(sorted(self.directory.glob("*.segment"))))
        self.damaged_files.add(int(path.stem, 16))
        self._doubt(int(path.stem, 16))
        size = path.stat().st_size
        match draw.draw(st.sampled_from(["flip_bit", "zero_file", "tear_tail", "truncate"])):
            case "flip_bit" if size:
                offset = draw.draw(st.integers(0, size - 1))
                _flip(path, offset, draw.draw(st.integers(0, 7)))
            case "zero_file":
                _overwrite(path, 0, bytes(size))
            case "tear_tail" if size:
                start = draw.draw(st.integers(0, size - 1))
                _overwrite(path, start, bytes(size - start))
            case "truncate":
                with path.open("r+b") as file:
                    file.truncate(draw.draw(st.integers(0, size)))

    def _doubt(self, number: int) -> None:
        """What is in a damaged file, also what is appended to it later, may be lost."""
        index = self.tier._pool.index
        inside = set(index.hashes_of(index.rows_of(number)))
        self.sound -= inside
        self.doubtful |= inside

    @invariant()
    def stays_within_its_capacity(self) -> None:
        files = [path.stat() for path in self.directory.iterdir()]
        assert sum(file.st_blocks * 512 for file in files) <= self.capacity_bytes

    @invariant()
    def counts_what_is_there(self) -> None:
        if hasattr(self, "tier"):
            usage = self.tier.usage()
            known = self.sound | self.doubtful | self.expired
            assert len(self.sound) <= usage.num_blocks <= len(known)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            del self.tier  # the options know this machine, so it goes with the collector, and late
        shutil.rmtree(self.parent)


def _flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


SsdMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSsdMachine = pytest.mark.slow(SsdMachine.TestCase)
