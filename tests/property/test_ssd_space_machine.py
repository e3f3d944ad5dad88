"""The space of an SSD store by every path that takes or gives it, with faults and crashes.

Blocks are written, read, removed, purged, scrubbed, moved, grow old and are evicted in any order,
while steps fail and processes die. At each step the files are within the capacity; at rest the
counter is their sum, the index says what the records say, and nothing that must be there is
missing. What is served is right to the last byte, always.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.identity import EVERYTHING, BlockHash, Selection, unpack_headers
from kvtier.errors import TierError
from kvtier.testing.block import TEST_KEY_SPACE, make_block
from kvtier.testing.tier_contract import fetch, soon
from kvtier.tiers.base import BlockWrite, MissReason, WriteOutcome
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState
from kvtier.tiers.ssd.segment import segment_number
from kvtier.tiers.ssd.store import SsdTier
from kvtier.tiers.ssd.victim import MOVED_SHARE

SEGMENT_BYTES = 128 << 10
CAPACITY_BYTES = 4 * SEGMENT_BYTES + METADATA_BYTES
MAX_AGE_S = 1000
PAGE = 4096

SIZES = [0, 3000, 8000, 12_000, 20_000]
TENANTS = [bytes(16), b"some tenant....."]
numbers = st.integers(0, 59)

FAULTS = st.sampled_from(
    [
        ("segment.create", errno.ENOSPC),
        ("segment.header", errno.EDQUOT),
        ("record.write", errno.ENOSPC),
        ("record.write", errno.EIO),
        ("record.write", errno.EROFS),
        ("record.publish", errno.EIO),
        ("record.read", errno.EIO),
        ("segment.sync", errno.EIO),
        ("segment.footer", errno.ENOSPC),
        ("segment.footer", errno.EIO),
        ("segment.unlink", errno.EPERM),
        ("record.remove", errno.EIO),
        ("record.erase", errno.EIO),
    ]
)


class Killed(BaseException):
    """Ends whatever is under way as a signal would."""


def block_of(number: int) -> BlockWrite:
    tenant = TENANTS[number % len(TENANTS)]
    return make_block(number, SIZES[number % len(SIZES)], tenant=tenant)


def hash_of(number: int) -> BlockHash:
    return block_of(number).header.block_hash


class SpaceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-space-"))
        self.now_s = 10**9
        self.sound: dict[BlockHash, int] = {}
        """Must be served, until they are too old: when each was written."""
        self.doubtful: set[BlockHash] = set()
        """May be served: something went wrong with them."""
        self.fault: tuple[str, int] | None = None
        self.steps_left = 0
        """Until the process dies; 0: it does not."""
        self.has_unlinked = False
        self.has_leftovers = False
        """A file could not be removed: what was evicted may come back with the next start."""
        self.is_opened = False

    @initialize()
    def open(self) -> None:
        options = SsdOptions(max_age_s=MAX_AGE_S, hook=self.hook, now_s=lambda: self.now_s)
        self.tier = SsdTier(self.directory, CAPACITY_BYTES, SEGMENT_BYTES, options)
        self.is_opened = True

    def hook(self, step: str) -> None:
        files = [path.lstat() for path in self.directory.iterdir()]
        assert sum(file.st_blocks * 512 for file in files) <= CAPACITY_BYTES, step
        self.steps_left -= 1
        if self.steps_left == 0:
            raise Killed
        if self.fault is not None and self.fault[0] == step:
            (_, error), self.fault = self.fault, None
            self.has_leftovers |= step == "segment.unlink"
            raise OSError(error, os.strerror(error))
        self.has_unlinked |= step == "segment.unlink"

    @contextmanager
    def doubting(self, hashes: set[BlockHash]) -> Iterator[None]:
        """Run a call that may fail or be killed: then what it names is in doubt."""
        self.has_unlinked = False
        try:
            yield
        except TierError:
            self._doubt(hashes)
        except Killed:
            self._doubt(hashes)
            self._begin_anew(may_miss=self.has_unlinked)

    def _doubt(self, hashes: set[BlockHash]) -> None:
        self.doubtful |= hashes
        for block_hash in hashes:
            self.sound.pop(block_hash, None)

    def _evict(self, evicted: set[BlockHash], written: set[BlockHash]) -> None:
        for block_hash in evicted:
            self.sound.pop(block_hash, None)
        if self.has_leftovers:
            self.doubtful |= evicted
        else:
            self.doubtful -= evicted - written

    def _begin_anew(self, *, may_miss: bool) -> None:
        """Open what a dead process left behind."""
        self.steps_left, self.fault = 0, None
        self.tier._directory_lock.release()
        self.open()
        kept = self._listed()
        if not may_miss:
            assert self._alive() <= kept
        assert kept <= self._alive() | self.doubtful
        self.sound = {each: at for each, at in self.sound.items() if each in kept}

    def _alive(self) -> set[BlockHash]:
        return {each for each, at in self.sound.items() if at >= self.now_s - MAX_AGE_S}

    def _listed(self) -> set[BlockHash]:
        headers = unpack_headers(self.tier.headers())
        hashes = {header.block_hash for header in headers}
        assert len(hashes) == len(headers)
        return hashes

    @rule(chosen=st.lists(numbers, min_size=1, max_size=6))
    def write(self, chosen: list[int]) -> None:
        blocks = [block_of(number) for number in chosen]
        hashes = {block.header.block_hash for block in blocks}
        alive = self._alive()
        with self.doubting(hashes - alive):
            report = self.tier.write(blocks, soon())
            evicted = set(report.evicted)
            told = zip(blocks, report.outcomes, strict=True)
            stored = {
                block.header.block_hash for block, said in told if said is WriteOutcome.STORED
            }
            assert not evicted & stored
            self._evict(evicted, hashes)
            self.sound |= dict.fromkeys(stored - alive - self.doubtful, self.now_s)

    @rule(chosen=st.lists(numbers, min_size=1, max_size=8))
    def read(self, chosen: list[int]) -> None:
        blocks = [block_of(number) for number in dict.fromkeys(chosen)]
        alive = self._alive()
        with self.doubting({block.header.block_hash for block in blocks} & set(self.sound)):
            for block, verdict in zip(blocks, fetch(self.tier, *blocks), strict=True):
                block_hash = block.header.block_hash
                if block_hash in alive:
                    assert verdict is None
                elif block_hash not in self.doubtful:
                    assert verdict in {MissReason.ABSENT, MissReason.EXPIRED}

    @rule(chosen=st.lists(numbers, min_size=1, max_size=4))
    def remove(self, chosen: list[int]) -> None:
        hashes = {hash_of(number) for number in chosen}
        with self.doubting(hashes & set(self.sound)):
            self.tier.remove(sorted(hashes), soon())
            for block_hash in hashes:
                self.sound.pop(block_hash, None)

    @rule(tenant=st.sampled_from(TENANTS))
    def purge(self, tenant: bytes) -> None:
        chosen = Selection(TEST_KEY_SPACE, tenant)
        meant = {
            hash_of(number) for number in range(60) if block_of(number).header.tenant == tenant
        }
        with self.doubting(meant & set(self.sound)):
            self.tier.purge(chosen, soon())
            self.doubtful -= meant
            for block_hash in meant:
                self.sound.pop(block_hash, None)

    @rule()
    def purge_all(self) -> None:
        with self.doubting(set(self.sound)):
            self.tier.purge(EVERYTHING, soon())
            assert not list(self.directory.glob("*.segment"))
            self.sound.clear()
            self.doubtful.clear()

    @rule(max_bytes=st.sampled_from([1, 50_000, 1 << 30]))
    def scrub(self, max_bytes: int) -> None:
        alive = self._alive()
        with self.doubting(set()):
            seen = self.tier.scrub(max_bytes, soon())
            assert not set(seen.damaged) & alive
            assert not set(seen.expired) & alive

    @rule(seconds=st.integers(1, 400))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(fault=FAULTS)
    def fail_once(self, fault: tuple[str, int]) -> None:
        self.fault = fault

    @rule(steps=st.integers(1, 25))
    def die_soon(self, steps: int) -> None:
        self.steps_left = steps

    @rule()
    def reopen(self) -> None:
        before = self._alive()
        self.fault, self.steps_left = None, 0
        self.tier.close()
        self.open()
        assert before <= self._listed() <= before | self.doubtful

    @precondition(lambda self: self.fault is None)
    @rule()
    def thrash(self) -> None:
        """Read a few blocks again and again while others pass by: moves happen here."""
        hot = [number for number in range(60) if hash_of(number) in self._alive()][:3]
        for number in range(100, 112):
            self.read(hot or [0])
            self._pass_by(number)

    def _pass_by(self, number: int) -> None:
        with self.doubting({hash_of(number)}):
            report = self.tier.write([block_of(number)], soon())
            self._evict(set(report.evicted), set())
        self.doubtful.add(hash_of(number))

    @invariant()
    def counts_what_is_allocated(self) -> None:
        if not self.is_opened:
            return
        files = {path: path.lstat() for path in self.directory.iterdir()}
        segments = [stat for path, stat in files.items() if segment_number(path) is not None]
        assert self.tier.usage().used_bytes == sum(stat.st_size for stat in segments)
        allocated = sum(stat.st_blocks * 512 for stat in segments)
        assert abs(allocated - self.tier.usage().used_bytes) <= PAGE * len(segments)
        assert sum(stat.st_blocks * 512 for stat in files.values()) <= CAPACITY_BYTES

    @invariant()
    def index_says_what_records_say(self) -> None:
        if not self.is_opened:
            return
        pool = self.tier._pool
        for number, segment in pool.segments.items():
            rows = pool.index.rows_of(number)
            content = segment.path.read_bytes() if len(rows) else b""
            for block_hash, page in zip(
                pool.index.hashes_of(rows), pool.index.page[rows].tolist(), strict=True
            ):
                packed = content[page * PAGE :][:RECORD_HEAD_BYTES]
                head = RecordHead.unpack(packed, number)
                assert head is not None
                assert head.state is RecordState.LIVE
                assert block_hash in head.header
        assert pool.index.live_segments() <= pool.segments.keys()

    @invariant()
    def lists_what_must_be_there(self) -> None:
        if self.is_opened and self.fault is None:
            assert self._alive() <= self._listed() <= self._alive() | self.doubtful

    @invariant()
    def writes_are_not_amplified_beyond_the_bound(self) -> None:
        if self.is_opened:
            detail = self.tier.usage().detail
            moved, blocks = (int(detail[f"written_{kind}_bytes"]) for kind in ("moved", "blocks"))
            # Of this process, which may begin with moves: a segment more than what was offered.
            most = (blocks + SEGMENT_BYTES) * MOVED_SHARE / (1 - MOVED_SHARE) + SEGMENT_BYTES
            assert moved <= most

    def teardown(self) -> None:
        self.fault, self.steps_left = None, 0
        if self.is_opened:
            self.tier.close()
        shutil.rmtree(self.directory)


SpaceMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSpaceMachine = pytest.mark.slow(SpaceMachine.TestCase)
