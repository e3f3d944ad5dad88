"""Compare the SSD tier with fio on the same disk, with direct I/O of equal size and depth.

    python bench/ssd.py [--directory D] [--json]

For blocks of 4 MiB, 1 MiB and 256 KiB: durable writes (each batch of blocks is synced before the
next) and cold reads (past the page cache, in another order than written), by SsdTier and fio in
turn. Prints medians, and the ratio of the tier to fio. Then creates a store of a million blocks and
recovers it. Needs fio.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from kvtier.core.identity import EVERYTHING, BlockHeader
from kvtier.core.limits import PAGE_BYTES, TRANSFER_BLOCKS, TRANSFER_BYTES
from kvtier.testing.block import aligned_memory, make_chain, read_of
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.ssd.disk import DirectIO, Disk
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.record import record_bytes
from kvtier.tiers.ssd.segment import ENTRY_DTYPE, create_segment, footer_bytes, seal_segment
from kvtier.tiers.ssd.store import SsdTier

_THREADS = 4
"""Concurrent read calls; there is one for writes."""


def batch_of(block_bytes: int) -> int:
    """Return the blocks of one call, as the node sizes it."""
    return max(TRANSFER_BLOCKS, TRANSFER_BYTES // block_bytes)


def fio(directory: Path, action: str, block_bytes: int, total_bytes: int) -> float:
    """Return fio's bytes per second with the same depth and sync interval."""
    jobs = 1 if action == "write" else _THREADS
    command = ["fio", "--name=limit", f"--directory={directory}", "--filename=limit"]
    command += ["--direct=1", "--ioengine=libaio", f"--bs={block_bytes}", f"--rw={action}"]
    command += [f"--iodepth={batch_of(block_bytes)}", f"--numjobs={jobs}"]
    command += [f"--size={total_bytes // jobs}", f"--offset_increment={total_bytes // jobs}"]
    command += ["--output-format=json", "--group_reporting"]
    if action == "write":
        # A batch must be durable before the next starts; fio would sync with writes in flight.
        batch = batch_of(block_bytes)
        command += [f"--fdatasync={batch}", "--iodepth_low=1", f"--iodepth_batch_submit={batch}"]
        command += [f"--iodepth_batch_complete_{end}={batch}" for end in ("min", "max")]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(json.loads(ended.stdout)["jobs"][0][action]["bw_bytes"])


class Blocks:
    """Batches of blocks of one size in aligned memory, which reads reuse."""

    def __init__(self, block_bytes: int, total_bytes: int) -> None:
        batch = batch_of(block_bytes)
        count = total_bytes // block_bytes // batch * batch
        self.total_bytes = count * block_bytes
        arena = aligned_memory(self.total_bytes)
        slots = [arena[n * block_bytes : (n + 1) * block_bytes] for n in range(count)]
        blocks = []
        for slot, block in zip(slots, make_chain(range(count), block_bytes), strict=True):
            slot[:] = block.payload
            blocks.append(BlockWrite(block.header, slot))
        self.batches = [blocks[start : start + batch] for start in range(0, count, batch)]

    def write(self, tier: SsdTier) -> None:
        for batch in self.batches:
            assert set(tier.write(batch, soon()).outcomes) == {WriteOutcome.STORED}

    def read(self, tier: SsdTier) -> None:
        def one(batch: list[BlockWrite]) -> None:
            results = tier.read([read_of(block, block.payload) for block in batch], soon())
            assert all(isinstance(result, BlockHeader) for result in results), results

        order = random.Random(0).sample(self.batches, len(self.batches))
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(one, order))


def speed(num_bytes: int, step: Callable[[], None]) -> float:
    """Return bytes per second."""
    started = time.perf_counter()
    step()
    return num_bytes / (time.perf_counter() - started)


def compare(directory: Path, block_bytes: int, options: argparse.Namespace) -> dict[str, float]:
    blocks = Blocks(block_bytes, options.total_bytes)
    total = blocks.total_bytes
    speeds: dict[str, list[float]] = {}
    for run in range(options.runs):
        durable = SsdOptions(durability=Durability.BATCH)
        tier = SsdTier(directory / "ssd", 2 * total + (1 << 30), 256 << 20, durable)
        steps: list[tuple[str, Callable[[], float]]] = []
        for action, step in (("write", blocks.write), ("read", blocks.read)):
            of_fio = partial(fio, directory, action, block_bytes, total)
            of_tier = partial(speed, total, partial(step, tier))
            pair = [(f"{action}_fio", of_fio), (f"{action}_tier", of_tier)]
            # The first affects the disk for the second, so they alternate.
            steps += pair if run % 2 else pair[::-1]
        for name, measure in steps:
            speeds.setdefault(name, []).append(measure())
        tier.purge(EVERYTHING, soon())
        tier.close()
        (directory / "limit").unlink()
    median = {name: statistics.median(values) for name, values in speeds.items()}
    size = f"{block_bytes >> 10}k"
    return {f"{name}_{size}_gb_per_s": round(value / 1e9, 3) for name, value in median.items()} | {
        f"{action}_{size}_ratio": round(median[f"{action}_tier"] / median[f"{action}_fio"], 3)
        for action in ("write", "read")
    }


def recover(directory: Path, num_blocks: int, per_segment: int = 4096) -> dict[str, float]:
    """Time the start on sealed segments whose records are holes: recovery only reads footers."""
    directory.mkdir(mode=0o700)
    disk = Disk(directory, DirectIO.AUTO)
    generator = np.random.default_rng(0)
    first, step = PAGE_BYTES, record_bytes(1)
    size_bytes = first + per_segment * step + footer_bytes(per_segment)
    for number in range(1, num_blocks // per_segment + 1):
        header = make_chain([number], 1)[0].header.pack()
        packed = bytearray((header + bytes(8)) * per_segment)
        entries = np.frombuffer(packed, ENTRY_DTYPE)
        keys = generator.integers(0, 1 << 63, (per_segment, 2), dtype=np.uint64)
        entries["header"]["block_hash"] = keys
        entries["page"] = (first + step * np.arange(per_segment)) // PAGE_BYTES
        entries["written_s"] = int(time.time())
        segment = create_segment(disk, number, size_bytes, bytes(16))
        segment.entries = bytearray(entries.tobytes())
        seal_segment(disk, segment)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    tier = SsdTier(directory, 1 << 40, 256 << 20)
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
    parser.add_argument("--block-kib", type=int, nargs="+", default=[4096, 1024, 256])
    parser.add_argument("--total-bytes", type=int, default=1 << 30)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--recover-blocks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("bench/ssd.py needs fio; install it (apt-get install fio)")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        for kib in options.block_kib:
            figures |= compare(Path(scratch), kib << 10, options)
        figures |= recover(Path(scratch) / "many", options.recover_blocks)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>12,}")


if __name__ == "__main__":
    main()
