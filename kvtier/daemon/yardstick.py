"""One measurement of a tier: a few blocks of one size are written, and read back.

It runs on a tier's own thread and blocks. What it writes is nobody's: a key space of its own, which
no engine has, so that it can never be served, and names that the next measurement of this node
knows, so that whatever a crash leaves behind is found again.
"""

import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.core.cost.sample import TransferSample
from kvtier.core.identity import (
    HASH_BYTES,
    NO_TENANT,
    BlockHash,
    BlockHeader,
    Headers,
    Selection,
    chain_root,
    payload_checksum,
)
from kvtier.errors import TierError, TierTimeout
from kvtier.tiers.base import BlockRead, BlockWrite, MissReason, Tier, WriteOutcome
from kvtier.tiers.check import seconds_left

__all__ = ["BLOCK_SIZES", "PROBE_SPACE", "Written", "Yardstick", "depth_of", "without_probes"]

PROBE_SPACE = hashlib.sha256(b"kvtier.probe").digest()[:HASH_BYTES]
"""The key space of what is written to measure a tier."""

BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
"""From the block of a tiny model to that of one with eight billion parameters."""

_SIZE_BYTES_MAX = 8 << 20
"""Written of each size at most: 20 MiB or so in all."""


@dataclass(frozen=True, slots=True)
class Written:
    """Blocks of one size that are in a tier now, and what became of it meanwhile."""

    reads: tuple[BlockRead, ...]
    """To get them back; none where the tier takes no such blocks."""
    sample: TransferSample
    evicted: tuple[BlockHash, ...]


def without_probes(headers: Headers) -> Headers:
    """Return the headers that are not of blocks written to measure the tier."""
    meant = Selection(PROBE_SPACE).mask(headers["space"])
    return headers[~meant] if meant.any() else headers


class Yardstick:
    """Measures tiers for the node called ``node_name``, which no other node is."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name

    def names(self, depth_max: int) -> list[BlockHash]:
        """Return the names of all blocks that may have been written, at up to so many at once."""
        return [
            self._name(block_bytes, number)
            for block_bytes in BLOCK_SIZES
            for number in range(depth_of(block_bytes, depth_max))
        ]

    def remove(self, tier: Tier, deadline_ns: int) -> None:
        """Forget whatever was left in a tier."""
        tier.remove(self.names(tier.properties.num_workers), deadline_ns)

    def write(self, block_bytes: int, tier: Tier, deadline_ns: int) -> Written:
        """Write as many blocks as are to be read at once; raises TierError."""
        depth = depth_of(block_bytes, tier.properties.num_workers)
        memory = memoryview(mmap.mmap(-1, depth * block_bytes))
        slots = [memory[number * block_bytes :][:block_bytes] for number in range(depth)]
        blocks = [self._block(number, slot) for number, slot in enumerate(slots)]
        began_s = time.perf_counter()
        report = tier.write(blocks, deadline_ns)
        sample = TransferSample(depth, depth * block_bytes, 1, time.perf_counter() - began_s)
        reads = tuple(
            BlockRead(each.header.block_hash, PROBE_SPACE, NO_TENANT, block_bytes, slot)
            for each, slot in zip(blocks, slots, strict=True)
        )
        is_stored = set(report.outcomes) == {WriteOutcome.STORED}
        return Written(reads if is_stored else (), sample, report.evicted)

    def read(self, written: Written, tier: Tier, deadline_ns: int) -> tuple[TransferSample, ...]:
        """Read the blocks one at a time, and then together; raises TierError."""
        reads = written.reads
        alone = [_timed(tier, each, deadline_ns) for each in reads]
        together = _at_once(tier, reads, deadline_ns) if len(reads) > 1 else []
        size = reads[0].payload_bytes
        return (
            *(TransferSample(1, size, 1, seconds) for seconds in alone),
            *(TransferSample(1, size, len(reads), seconds) for seconds in together),
        )

    def _name(self, block_bytes: int, number: int) -> BlockHash:
        said = f"kvtier.probe\0{self._node_name}\0{block_bytes}\0{number}"
        return BlockHash(hashlib.sha256(said.encode()).digest()[:HASH_BYTES])

    def _block(self, number: int, slot: memoryview) -> BlockWrite:
        slot[:] = os.urandom(len(slot))  # nothing that a drive or a server could compress
        root, name = chain_root(PROBE_SPACE, NO_TENANT), self._name(len(slot), number)
        header = BlockHeader(PROBE_SPACE, NO_TENANT, name, root, 0, len(slot))
        checksum = payload_checksum(header, slot)
        return BlockWrite(
            BlockHeader(PROBE_SPACE, NO_TENANT, name, root, 0, len(slot), checksum), slot
        )


def depth_of(block_bytes: int, depth_max: int) -> int:
    """Return how many blocks of a size are written and read at once."""
    return max(1, min(depth_max, _SIZE_BYTES_MAX // block_bytes))


def _timed(tier: Tier, read: BlockRead, deadline_ns: int) -> float:
    """Read a block back, and return the seconds that took; raises TierError where it is not it."""
    began_s = time.perf_counter()
    (result,) = tier.read([read], deadline_ns)
    took_s = time.perf_counter() - began_s
    if isinstance(result, MissReason):
        raise TierError(f"{tier.properties.name}: what was just written is {result}")
    return took_s


def _at_once(tier: Tier, reads: Sequence[BlockRead], deadline_ns: int) -> list[float]:
    """Read blocks on as many threads, all at once.

    Threads that do not come back by the deadline are left to themselves, with their memory.
    """
    took_s: list[float] = []
    faults: list[BaseException] = []
    start = threading.Barrier(len(reads))

    def work(read: BlockRead) -> None:
        try:
            start.wait(seconds_left(deadline_ns))
            took_s.append(_timed(tier, read, deadline_ns))
        except (TierError, threading.BrokenBarrierError) as error:
            faults.append(error)

    threads = [_started(work, read) for read in reads]
    for thread in threads:
        thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
    if any(thread.is_alive() for thread in threads):
        raise TierTimeout(f"{tier.properties.name}: {len(reads)} reads did not end in time")
    if faults or len(took_s) < len(reads):
        raise TierError(f"{tier.properties.name}: {faults[0] if faults else 'a read broke'}")
    return took_s


def _started(work: Callable[[BlockRead], None], read: BlockRead) -> threading.Thread:
    thread = threading.Thread(target=work, args=(read,), name="kvtier-probe", daemon=True)
    thread.start()
    return thread
