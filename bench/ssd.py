"""The SSD tier against the disk itself: the same bytes, in operations of the same size and depth.

    python bench/ssd.py [--directory D] [--json]

Writes and reads blocks through SsdTier, and in turn writes and reads plain files with pwritev and
preadv past the page cache, in batches of as many bytes from as many threads. Prints medians, and
the ratio of the tier to the disk. Then fabricates a store of a million blocks, and recovers it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from kvtier.core.identity import EVERYTHING, BlockHeader
from kvtier.core.limits import PAGE_BYTES
from kvtier.testing.block import aligned_memory, make_chain, read_of
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.ssd import SsdTier
from kvtier.tiers.ssd.disk import DirectIO, Disk
from kvtier.tiers.ssd.segment import ENTRY_DTYPE, create_segment, seal_segment


def timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


class Raw:
    """A preallocated file that batches are written to and read from."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, num_bytes)
        os.fsync(self.fd)
        self.path = path

    def write(self, batches: list[list[memoryview]], batch_bytes: int) -> None:
        for number, batch in enumerate(batches):
            assert os.pwritev(self.fd, batch, number * batch_bytes) == batch_bytes

    def read(self, batches: list[list[memoryview]], batch_bytes: int, depth: int) -> None:
        def one(number: int) -> None:
            assert os.preadv(self.fd, batches[number], number * batch_bytes) == batch_bytes

        with ThreadPoolExecutor(depth) as threads:
            list(threads.map(one, range(len(batches))))

    def remove(self) -> None:
        os.close(self.fd)
        self.path.unlink()


def write_tier(tier: SsdTier, batches: list[list[BlockWrite]]) -> None:
    for batch in batches:
        assert set(tier.write(batch, soon()).outcomes) == {WriteOutcome.STORED}


def read_tier(
    tier: SsdTier, batches: list[list[BlockWrite]], slots: list[list[memoryview]], depth: int
) -> None:
    def one(number: int) -> None:
        pairs = zip(batches[number], slots[number], strict=True)
        results = tier.read([read_of(block, slot) for block, slot in pairs], soon())
        assert all(isinstance(result, BlockHeader) for result in results), results

    with ThreadPoolExecutor(depth) as threads:
        list(threads.map(one, range(len(batches))))


def compare(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    payload_bytes, per_batch, depth = options.block_bytes, options.batch, options.depth
    num_blocks = options.blocks // per_batch * per_batch
    slot_bytes = -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
    arena = aligned_memory(num_blocks * slot_bytes)
    slots = [arena[n * slot_bytes : (n + 1) * slot_bytes] for n in range(num_blocks)]
    blocks = []
    for slot, block in zip(slots, make_chain(range(num_blocks), payload_bytes), strict=True):
        slot[:payload_bytes] = block.payload
        blocks.append(BlockWrite(block.header, slot[:payload_bytes]))
    starts = range(0, num_blocks, per_batch)
    batches = [blocks[start : start + per_batch] for start in starts]
    slot_batches = [slots[start : start + per_batch] for start in starts]
    batch_bytes = per_batch * slot_bytes
    total_bytes = num_blocks * slot_bytes
    seconds: dict[str, list[float]] = {}
    for run in range(options.runs):
        raw = Raw(directory / "raw", total_bytes)
        tier = SsdTier(directory / "ssd", 2 * total_bytes + (1 << 30))
        steps: list[tuple[str, Callable[[], None]]] = [
            ("write_disk", partial(raw.write, slot_batches, batch_bytes)),
            ("write_tier", partial(write_tier, tier, batches)),
            ("read_disk", partial(raw.read, slot_batches, batch_bytes, depth)),
            ("read_tier", partial(read_tier, tier, batches, slot_batches, depth)),
        ]
        # Whoever goes second finds the disk as the first has left it, so they take turns.
        for name, step in (steps[i] for i in ([0, 1, 2, 3], [1, 0, 3, 2])[run % 2]):
            os.sync()  # nobody pays for what another has left in the file system's journal
            seconds.setdefault(name, []).append(timed(step))
        raw.remove()
        tier.purge(EVERYTHING, soon())
        tier.close()
    speed = {name: total_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return {f"{name}_gb_per_s": round(value, 3) for name, value in speed.items()} | {
        "write_ratio": round(speed["write_tier"] / speed["write_disk"], 3),
        "read_ratio": round(speed["read_tier"] / speed["read_disk"], 3),
    }


def recover(directory: Path, num_blocks: int, per_segment: int = 4096) -> dict[str, float]:
    """Time the start on sealed segments, whose records are holes: recovery reads footers only."""
    directory.mkdir(mode=0o700)
    disk = Disk(directory, DirectIO.AUTO)
    generator = np.random.default_rng(0)
    size_bytes = 1 << 20
    for number in range(1, num_blocks // per_segment + 1):
        header = make_chain([number], 1)[0].header.pack()
        entries = np.frombuffer(bytearray((header + bytes(8)) * per_segment), ENTRY_DTYPE)
        keys = generator.integers(0, 1 << 63, (per_segment, 2), dtype=np.uint64)
        entries["header"]["block_hash"] = keys
        entries["page"] = np.arange(per_segment)
        segment = create_segment(disk, number, size_bytes, bytes(16))
        segment.entries = bytearray(entries.tobytes())
        seal_segment(disk, segment)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    tier = SsdTier(directory, 1 << 40)
    seconds = time.perf_counter() - started
    held = psutil.Process().memory_info().rss - before
    count = tier.usage().num_blocks
    tier.close()
    return {
        "recovered_blocks": count,
        "recovery_s": round(seconds, 3),
        "recovery_bytes_per_block": round(held / count, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--block-bytes", type=int, default=2_949_120)
    parser.add_argument("--blocks", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--recover-blocks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        figures = compare(Path(scratch), options)
        figures |= recover(Path(scratch) / "many", options.recover_blocks)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>12,}")


if __name__ == "__main__":
    main()
