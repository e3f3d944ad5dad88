"""A fake tier that stores blocks in a dict.

It passes the same contract suite as the real tiers, so tests may rely on its behaviour. It copies
and verifies payloads like any other tier.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import StrEnum

import numpy as np

from kvtier.core.identity import (
    HEADER_BYTES,
    PACKED_HEADER,
    BlockHash,
    BlockHeader,
    HeaderError,
    Headers,
    Selection,
)
from kvtier.core.residency import TierName
from kvtier.core.tier_registry import STORE_TIER
from kvtier.errors import TierError, TierFull
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    Health,
    MissReason,
    Removed,
    Scrubbed,
    TierProperties,
    TierUsage,
    WriteOutcome,
    WriteReport,
)
from kvtier.tiers.check import check_header, check_payload, seconds_left

__all__ = ["EvictionOrder", "MemoryTier"]

_DAMAGE = frozenset({MissReason.HEADER, MissReason.CHECKSUM})


class EvictionOrder(StrEnum):
    """Which block a full MemoryTier evicts first."""

    FIFO = "fifo"
    LRU = "lru"


class MemoryTier:
    """Blocks in a dict of packed header and payload, up to ``capacity_bytes`` of both."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        name: TierName = STORE_TIER,
        order: EvictionOrder = EvictionOrder.FIFO,
    ) -> None:
        self.properties = TierProperties(name, is_persistent=False, is_shared=False, num_workers=2)
        self._capacity_bytes = capacity_bytes
        self._order = order
        self._blocks: OrderedDict[BlockHash, bytearray] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Store blocks; those named in this call are never evicted for each other."""
        with self._opened(deadline_ns):
            named = {block.header.block_hash for block in blocks}
            evicted: list[BlockHash] = []
            outcomes = tuple(self._keep(block, named, evicted) for block in blocks)
        return WriteReport(outcomes, tuple(evicted))

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read and verify blocks; a damaged one is forgotten."""
        with self._opened(deadline_ns):
            return [self._fetch(block) for block in blocks]

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> list[bool]:
        """Return for each hash whether it is stored."""
        with self._opened(deadline_ns):
            return [block_hash in self._blocks for block_hash in hashes]

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Remove blocks."""
        with self._opened(deadline_ns):
            sizes = [
                self._forget(block_hash) for block_hash in hashes if block_hash in self._blocks
            ]
        return Removed(len(sizes), sum(sizes))

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Remove the blocks of a selection."""
        with self._opened(deadline_ns):
            headers = self._headers()
            meant = headers["block_hash"][selection.mask(headers["space"])]
            sizes = [self._forget(BlockHash(block_hash.tobytes())) for block_hash in meant]
        return Removed(len(sizes), sum(sizes))

    def health_check(self, deadline_ns: int) -> None:
        """Raise TierError if the tier is closed."""
        with self._opened(deadline_ns):
            return

    @contextlib.contextmanager
    def scratch(
        self, block_bytes: int, num_blocks: int, deadline_ns: int
    ) -> Iterator["MemoryTier"]:
        """Open a separate memory tier if the capacity leaves room for it."""
        num_bytes = num_blocks * (HEADER_BYTES + block_bytes)
        with self._opened(deadline_ns):
            if self._used_bytes + num_bytes > self._capacity_bytes:
                raise TierFull(f"fewer than {num_bytes} bytes are free")
        yield MemoryTier(num_bytes, name=self.properties.name)

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify all blocks at once and remove damaged ones."""
        with self._opened(deadline_ns):
            sizes = [len(block) for block in self._blocks.values()]
            damaged = tuple(each for each, block in self._blocks.items() if not _is_whole(block))
            for block_hash in damaged:
                self._forget(block_hash)
        return Scrubbed(len(sizes), sum(sizes), damaged)

    def headers(self) -> Iterator[Headers]:
        """Yield the headers of all blocks as of now."""
        with self._lock:
            headers = self._headers()
        yield headers

    def health(self) -> Health:
        """Return that the tier is up."""
        return Health()

    def usage(self) -> TierUsage:
        """Return occupancy."""
        return TierUsage(len(self._blocks), self._used_bytes, self._capacity_bytes)

    def close(self) -> None:
        """Reject all further calls."""
        self._is_closed = True

    def _opened(self, deadline_ns: int) -> threading.Lock:
        seconds_left(deadline_ns)
        if self._is_closed:
            raise TierError("the memory tier is closed")
        return self._lock

    def _keep(
        self, block: BlockWrite, named: set[BlockHash], evicted: list[BlockHash]
    ) -> WriteOutcome:
        block_hash = block.header.block_hash
        if block_hash in self._blocks:
            return WriteOutcome.STORED
        size_bytes = HEADER_BYTES + len(block.payload)
        victims = (kept for kept in list(self._blocks) if kept not in named)
        while self._used_bytes + size_bytes > self._capacity_bytes:
            victim = next(victims, None)
            if victim is None:
                return WriteOutcome.REJECTED
            self._forget(victim)
            evicted.append(victim)
        self._blocks[block_hash] = bytearray(block.header.pack() + block.payload)
        self._used_bytes += size_bytes
        return WriteOutcome.STORED

    def _fetch(self, wanted: BlockRead) -> BlockHeader | MissReason:
        kept = self._blocks.get(wanted.block_hash)
        if kept is None:
            return MissReason.ABSENT
        result = check_header(wanted, bytes(kept[:HEADER_BYTES]))
        if isinstance(result, BlockHeader):
            wanted.into[: wanted.payload_bytes] = kept[HEADER_BYTES:]
            result = check_payload(result, wanted.into[: wanted.payload_bytes])
        if result in _DAMAGE:
            self._forget(wanted.block_hash)
        elif self._order is EvictionOrder.LRU:
            self._blocks.move_to_end(wanted.block_hash)
        return result

    def _headers(self) -> Headers:
        packed = b"".join(block[:HEADER_BYTES] for block in self._blocks.values())
        return np.frombuffer(packed, PACKED_HEADER)

    def _forget(self, block_hash: BlockHash) -> int:
        size_bytes = len(self._blocks.pop(block_hash))
        self._used_bytes -= size_bytes
        return size_bytes - HEADER_BYTES


def _is_whole(block: bytearray) -> bool:
    try:
        header = BlockHeader.unpack(memoryview(block))
    except HeaderError:
        return False
    return header.matches(memoryview(block)[HEADER_BYTES:])
