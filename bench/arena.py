"""Compare store and load through the arena with memcpy of the same bytes.

    python bench/arena.py [--json]

Uses a real daemon process and the real client, including the checksums of each store and load. The
limits are numpy's copy between the same kinds of memory, and that copy followed by the same
checksum, the best that one pass over the bytes by one thread can reach. All run in turns; prints
medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np

from kvtier.client import Client, LoadedBlock
from kvtier.core.identity import (
    NO_TENANT,
    BlockHash,
    BlockHeader,
    KeySpace,
    chain_root,
    hash_blocks,
    payload_checksum,
)
from kvtier.core.layout import KVLayout
from kvtier.testing.block import aligned_memory
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode

Blocks = list[memoryview]


def timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_all(targets: Blocks, sources: Blocks) -> None:
    for target, source in zip(targets, sources, strict=True):
        copy(target, source)


def copy_and_sum_all(header: BlockHeader, targets: Blocks, sources: Blocks) -> None:
    for target, source in zip(targets, sources, strict=True):
        copy(target, source)
        payload_checksum(header, target)


def store(client: Client, hashes: list[BlockHash], pool: Blocks) -> None:
    def fill(indexes: Sequence[int], slots: Sequence[memoryview]) -> Generator[None]:
        for index, slot in zip(indexes, slots, strict=True):
            copy(slot, pool[index])
            yield

    assert client.store(NO_TENANT, hashes, 0, fill) == len(hashes)


def load(client: Client, hashes: list[BlockHash], pool: Blocks) -> None:
    num_loaded = 0
    for item in client.load(NO_TENANT, hashes, 0):
        if isinstance(item, LoadedBlock):
            copy(pool[item.index], item.payload)
            num_loaded += 1
    assert num_loaded == len(hashes)


def measure(block_bytes: int, options: argparse.Namespace) -> dict[str, float]:
    num_blocks = options.bytes // block_bytes
    total_bytes = num_blocks * block_bytes
    layout = KVLayout("paged", 1, 64, block_bytes, "uint8", "bench")
    space = KeySpace(bytes(32), "{}", layout, "uint8", "bench")
    hashes = hash_blocks(chain_root(space.digest, NO_TENANT), range(num_blocks), 1)
    header = BlockHeader(space.digest, NO_TENANT, hashes[0], hashes[0], 0, block_bytes)
    # The engine's pool, and memory that stands in for the arena when only copying is measured.
    pools: list[Blocks] = []
    for _ in range(2):
        memory = aligned_memory(total_bytes)
        copy(memory, memoryview(np.random.default_rng(0).bytes(total_bytes)))
        starts = range(0, total_bytes, block_bytes)
        pools.append([memory[start : start + block_bytes] for start in starts])
    settings = {"cpu.capacity": 4 * options.bytes, "cpu.slab": 64 << 20, "ssd.enabled": "false"}
    seconds: dict[str, list[float]] = {}
    with work_directory() as directory:
        served = RunningNode(directory, settings)
        with served.daemon() as daemon:
            daemon.await_log("arena reserved")
            client = Client(served.socket, space, "bench")
            client.start()
            assert client.wait_attached(10)
            steps: dict[str, Callable[[], None]] = {
                "memcpy": partial(copy_all, pools[1], pools[0]),
                "memcpy_checksum": partial(copy_and_sum_all, header, pools[1], pools[0]),
                "store": partial(store, client, hashes, pools[0]),
                "load": partial(load, client, hashes, pools[1]),
            }
            orders = [
                ("memcpy", "memcpy_checksum", "store", "load"),
                ("store", "load", "memcpy_checksum", "memcpy"),
            ]
            for run in range(options.runs + 1):
                for name in orders[run % 2]:
                    took = timed(steps[name])
                    if run:  # the first run touches pages and opens channels
                        seconds.setdefault(name, []).append(took)
                assert pools[0] == pools[1]
                served.drop("cpu")
            client.close()
            daemon.stop()
    speed = {name: total_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return {f"{name}_gb_per_s": round(value, 2) for name, value in speed.items()} | {
        f"{name}_ratio": round(speed[name] / speed[limit], 3)
        for name, limit in (
            ("store", "memcpy"),
            ("load", "memcpy"),
            ("memcpy_checksum", "memcpy"),
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[2_949_120, 8 << 20])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {size: measure(size, options) for size in options.block_bytes}
    if options.json:
        print(json.dumps(figures))
        return
    for size, values in figures.items():
        print(f"blocks of {size:,} bytes")
        for name, value in values.items():
            print(f"  {name:28} {value:>10,}")


if __name__ == "__main__":
    main()
