"""The contract of kvtier.tiers.base as a test suite: a tier that passes may replace any other.

Derive a class and give it the pytest fixture ``tier``: an empty tier with room for at least 2 MiB.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvtier.core.identity import EVERYTHING, BlockHash, BlockHeader, unpack_headers
from kvtier.errors import TierTimeout
from kvtier.testing.block import aligned_memory, make_block, make_chain, payload_of, read_of
from kvtier.tiers.base import BlockRead, BlockWrite, MissReason, Tier, WriteOutcome

__all__ = ["TierContract", "fetch", "soon", "store"]


def soon() -> int:
    """Return a deadline that a test does not miss."""
    return time.monotonic_ns() + 30_000_000_000


def store(tier: Tier, *blocks: BlockWrite) -> None:
    """Write blocks that must all be stored."""
    outcomes = tier.write(blocks, soon()).outcomes
    assert set(outcomes) <= {WriteOutcome.STORED}, outcomes
    assert len(outcomes) == len(blocks)


def fetch(tier: Tier, *blocks: BlockWrite) -> list[MissReason | None]:
    """Read blocks: None for a correct one, else why it is a miss."""
    reads = [read_of(block) for block in blocks]
    results = tier.read(reads, soon())
    assert len(results) == len(blocks)
    return [_verdict(*each) for each in zip(blocks, reads, results, strict=True)]


def _verdict(
    block: BlockWrite, read: BlockRead, result: BlockHeader | MissReason
) -> MissReason | None:
    if isinstance(result, MissReason):
        return result
    assert result == block.header
    assert bytes(read.into[: read.payload_bytes]) == payload_of(result)
    return None


def _hashes(*blocks: BlockWrite) -> list[BlockHash]:
    return [block.header.block_hash for block in blocks]


class TierContract:
    """Behaviour of every tier."""

    @pytest.mark.parametrize("payload_bytes", [0, 1, 4095, 4096, 4097, 100_000])
    def test_returns_what_was_stored(self, tier: Tier, payload_bytes: int) -> None:
        """Return every byte, for all sizes."""
        blocks = make_chain(range(5), payload_bytes)
        store(tier, *blocks)
        assert fetch(tier, *blocks) == [None] * 5

    @pytest.mark.parametrize("payload_bytes", [4096, 5000, 65_536])
    def test_takes_and_fills_aligned_memory(self, tier: Tier, payload_bytes: int) -> None:
        """Work directly on arena slots and stay inside them."""
        slot_bytes = -(-payload_bytes // 4096) * 4096
        blocks = make_chain(range(4), payload_bytes)
        arena = aligned_memory(5 * slot_bytes)
        for index, block in enumerate(blocks):
            slot = arena[index * slot_bytes :][:payload_bytes]
            slot[:] = block.payload
            blocks[index] = replace(block, payload=slot)
        store(tier, *blocks)
        arena[:] = b"\xa5" * len(arena)
        reads = [
            read_of(block, arena[index * slot_bytes :][:slot_bytes])
            for index, block in enumerate(blocks)
        ]
        results = tier.read(reads, soon())
        assert [_verdict(*each) for each in zip(blocks, reads, results, strict=True)] == [None] * 4
        assert bytes(arena[4 * slot_bytes :]) == b"\xa5" * slot_bytes

    def test_takes_and_fills_unaligned_memory(self, tier: Tier) -> None:
        """Accept views that start anywhere, and leave their surroundings alone."""
        block = make_block(1, 9000)
        intercept = aligned_memory(20_000)
        intercept[7:9007] = block.payload
        store(tier, replace(block, payload=intercept[7:9007]))
        intercept[:] = b"\xa5" * len(intercept)
        result = tier.read([read_of(block, intercept[3:9003])], soon())
        assert result == [block.header]
        assert bytes(intercept[3:9003]) == payload_of(block.header)
        assert bytes(intercept[:3]) == b"\xa5" * 3
        assert bytes(intercept[9003:]) == b"\xa5" * (20_000 - 9003)

    def test_misses_what_is_not_there(self, tier: Tier) -> None:
        """Report each absent block."""
        stored, absent = make_block(1), make_block(2)
        store(tier, stored)
        assert fetch(tier, absent, stored) == [MissReason.ABSENT, None]
        assert tier.contains(_hashes(absent, stored), soon()) == [False, True]

    def test_measures_without_a_trace(self, tier: Tier) -> None:
        """Write to a scratch tier, whose blocks do not count as blocks of the tier."""
        stored, other = make_block(1, 5000), make_block(2, 5000)
        store(tier, stored)
        before = tier.usage()
        with tier.scratch(5000, 1, soon()) as scratch:
            store(scratch, other)
            assert fetch(scratch, other) == [None]
            assert scratch.remove(_hashes(other), soon()).num_blocks == 1
        assert fetch(tier, stored, other) == [None, MissReason.ABSENT]
        after = tier.usage()
        assert (after.num_blocks, after.used_bytes) == (before.num_blocks, before.used_bytes)

    def test_takes_empty_batches(self, tier: Tier) -> None:
        """Accept empty batches."""
        assert tier.write([], soon()).outcomes == ()
        assert tier.read([], soon()) == []
        assert tier.contains([], soon()) == []
        assert tier.remove([], soon()).num_blocks == 0

    def test_storing_again_changes_nothing(self, tier: Tier) -> None:
        """Report stored and keep the first, also within a batch."""
        block, other = make_block(1), make_block(2)
        store(tier, block, other, block)
        before = tier.usage()
        store(tier, block)
        assert tier.usage() == before
        assert fetch(tier, block, other, block) == [None, None, None]

    @pytest.mark.parametrize("field", ["key_space", "tenant"])
    def test_never_serves_another_identity(self, tier: Tier, field: str) -> None:
        """Miss if the wrong party asks for a hash, and keep the block."""
        block = make_block(1)
        store(tier, block)
        foreign = (
            replace(read_of(block), key_space=b"another space...")
            if field == "key_space"
            else replace(read_of(block), tenant=b"another tenant..")
        )
        assert tier.read([foreign], soon()) == [MissReason.IDENTITY]
        assert fetch(tier, block) == [None]

    def test_never_serves_another_length(self, tier: Tier) -> None:
        """Miss if the caller expects another size, and keep the block."""
        block = make_block(1, 5000)
        store(tier, block)
        wrong = replace(read_of(block), payload_bytes=4999)
        assert tier.read([wrong], soon()) == [MissReason.LENGTH]
        assert fetch(tier, block) == [None]

    def test_removes(self, tier: Tier) -> None:
        """Forget named blocks, count them, ignore unknown ones."""
        blocks = make_chain(range(6))
        store(tier, *blocks)
        removed = tier.remove(_hashes(blocks[1], blocks[4], blocks[1], make_block(99)), soon())
        assert (removed.num_blocks, removed.num_bytes) == (2, 10_000)
        absent = MissReason.ABSENT
        assert fetch(tier, *blocks) == [None, absent, None, None, absent, None]
        store(tier, *blocks)
        assert fetch(tier, *blocks) == [None] * 6

    def test_clears(self, tier: Tier) -> None:
        """Forget all blocks, count them, and continue."""
        blocks = make_chain(range(6))
        store(tier, *blocks)
        removed = tier.purge(EVERYTHING, soon())
        assert (removed.num_blocks, removed.num_bytes) == (6, 30_000)
        assert tier.contains(_hashes(*blocks), soon()) == [False] * 6
        assert tier.usage().num_blocks == 0
        store(tier, *blocks)
        assert fetch(tier, *blocks) == [None] * 6

    def test_lists_its_headers(self, tier: Tier) -> None:
        """Yield each stored block, parents first; nothing if the tier is shared."""
        blocks = make_chain(range(6))
        store(tier, *blocks)
        expected = [] if tier.properties.is_shared else [block.header for block in blocks]
        assert unpack_headers(tier.headers()) == expected

    def test_counts_its_blocks(self, tier: Tier) -> None:
        """Keep usage consistent with stored blocks."""
        if tier.properties.is_shared:
            return
        blocks = make_chain(range(6))
        store(tier, *blocks)
        usage = tier.usage()
        assert usage.num_blocks == 6
        assert 30_000 <= usage.used_bytes <= usage.capacity_bytes

    def test_refuses_a_deadline_that_has_passed(self, tier: Tier) -> None:
        """Time out in every operation without any effect."""
        block = make_block(1)
        past = time.monotonic_ns() - 1
        with pytest.raises(TierTimeout):
            tier.write([block], past)
        with pytest.raises(TierTimeout):
            tier.read([read_of(block)], past)
        with pytest.raises(TierTimeout):
            tier.contains(_hashes(block), past)
        with pytest.raises(TierTimeout):
            tier.remove(_hashes(block), past)
        with pytest.raises(TierTimeout):
            tier.purge(EVERYTHING, past)
        assert fetch(tier, block) == [MissReason.ABSENT]

    def test_serves_several_threads(self, tier: Tier) -> None:
        """Stay correct while several threads write and read the same blocks."""
        blocks = make_chain(range(40), 3000)

        def work(start: int) -> list[MissReason | None]:
            for block in blocks[start::2]:
                store(tier, block)
            return fetch(tier, *blocks)

        with ThreadPoolExecutor(4) as threads:
            verdicts = list(threads.map(work, [0, 1, 0, 1], timeout=60))
        assert {reason for verdict in verdicts for reason in verdict} <= {None, MissReason.ABSENT}
        assert fetch(tier, *blocks) == [None] * 40

    def test_closes_twice(self, tier: Tier) -> None:
        """Allow closing twice."""
        tier.close()
        tier.close()
