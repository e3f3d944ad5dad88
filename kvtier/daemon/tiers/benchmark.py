"""Benchmarks a tier: writes a few blocks of one size and reads them back.

It blocks, and runs on a thread of the tier. It uses a scratch tier on the same device, so that no
block is evicted, and a key space that no engine has, so that its blocks are never served.
"""

import contextlib
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.core.identity import (
    HASH_BYTES,
    NO_TENANT,
    BlockHash,
    BlockHeader,
    chain_root,
    payload_checksum,
)
from kvtier.core.plan import TransferSample
from kvtier.errors import TierError, TierFull, TierTimeout
from kvtier.tiers.base import BlockRead, BlockWrite, MissReason, Tier, WriteOutcome
from kvtier.tiers.check import seconds_left

__all__ = ["BLOCK_SIZES", "SCRATCH_SPACE", "TierBenchmark", "depth_of", "run_benchmark"]

SCRATCH_SPACE = hashlib.sha256(b"kvtier.probe").digest()[:HASH_BYTES]
"""Key space of the blocks that a benchmark writes."""

BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
"""From the blocks of a tiny model to those of an 8B model."""

_SIZE_BYTES_MAX = 8 << 20
"""Maximum number of bytes written per size: about 20 MiB in total."""


@dataclass(frozen=True, slots=True)
class TierBenchmark:
    """Times of transfers of one size."""

    written: TransferSample
    read: tuple[TransferSample, ...]


def run_benchmark(block_bytes: int, tier: Tier, deadline_ns: int) -> TierBenchmark:
    """Write some blocks, and read them one at a time and then all at once.

    Raises TierFull if the tier has no free room for them, and TierError if it fails.
    """
    depth = depth_of(block_bytes, tier.properties.num_workers)
    memory = memoryview(mmap.mmap(-1, depth * block_bytes))
    blocks = [_block(memory[start:][:block_bytes]) for start in range(0, len(memory), block_bytes)]
    with tier.scratch(block_bytes, depth, deadline_ns) as scratch:
        try:
            written = _written(scratch, blocks, deadline_ns)
            reads = [
                BlockRead(
                    each.header.block_hash, SCRATCH_SPACE, NO_TENANT, block_bytes, each.payload
                )
                for each in blocks
            ]
            return TierBenchmark(written, _read(scratch, reads, deadline_ns))
        finally:
            with contextlib.suppress(TierError):  # blocks that remain are removed later, or expire
                scratch.remove([each.header.block_hash for each in blocks], deadline_ns)


def depth_of(block_bytes: int, depth_max: int) -> int:
    """Return the number of blocks of a size that are written and read at once."""
    return max(1, min(depth_max, _SIZE_BYTES_MAX // block_bytes))


def _block(slot: memoryview) -> BlockWrite:
    slot[:] = os.urandom(len(slot))  # so that a drive or a server cannot compress it
    root, name = chain_root(SCRATCH_SPACE, NO_TENANT), BlockHash(os.urandom(HASH_BYTES))
    header = BlockHeader(SCRATCH_SPACE, NO_TENANT, name, root, 0, len(slot))
    return BlockWrite(replace(header, checksum=payload_checksum(header, slot)), slot)


def _written(tier: Tier, blocks: Sequence[BlockWrite], deadline_ns: int) -> TransferSample:
    began_s = time.perf_counter()
    report = tier.write(blocks, deadline_ns)
    took_s = time.perf_counter() - began_s
    if set(report.outcomes) != {WriteOutcome.STORED}:
        raise TierFull(f"it does not accept blocks of {len(blocks[0].payload)} bytes")
    num_bytes = sum(len(each.payload) for each in blocks)
    return TransferSample(len(blocks), num_bytes, 1, took_s)


def _read(tier: Tier, reads: Sequence[BlockRead], deadline_ns: int) -> tuple[TransferSample, ...]:
    """Read the blocks one at a time, and then all at once."""
    alone = [_timed(tier, each, deadline_ns) for each in reads]
    together = _at_once(tier, reads, deadline_ns) if len(reads) > 1 else []
    size = reads[0].payload_bytes
    return (
        *(TransferSample(1, size, 1, seconds) for seconds in alone),
        *(TransferSample(1, size, len(reads), seconds) for seconds in together),
    )


def _timed(tier: Tier, read: BlockRead, deadline_ns: int) -> float:
    """Read a block and return the time it took; raises TierError if it is not intact."""
    began_s = time.perf_counter()
    (result,) = tier.read([read], deadline_ns)
    took_s = time.perf_counter() - began_s
    if isinstance(result, MissReason):
        raise TierError(f"{tier.properties.name}: a block that was just written is {result}")
    return took_s


def _at_once(tier: Tier, reads: Sequence[BlockRead], deadline_ns: int) -> list[float]:
    """Read all blocks at once, each on its own thread.

    Threads that do not end by the deadline are abandoned with their memory.
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
        raise TierError(f"{tier.properties.name}: {faults[0] if faults else 'a read failed'}")
    return took_s


def _started(work: Callable[[BlockRead], None], read: BlockRead) -> threading.Thread:
    thread = threading.Thread(target=work, args=(read,), name="kvtier-benchmark", daemon=True)
    thread.start()
    return thread
