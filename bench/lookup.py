"""Compare a lookup of 2,000 block hashes with an empty call to the same daemon.

    python bench/lookup.py [--json]

First with an index of only those blocks, then with a million entries, stored through the client as
real blocks of one page each: 4 GiB of arena, or less if memory is short. Calls run in turns; prints
medians, and the daemon's memory without the arena.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import psutil

from kvtier.api.rpc.operator_client import local_operator
from kvtier.client import Client
from kvtier.core.identity import NO_TENANT, BlockHash, KeySpace, chain_root, hash_blocks
from kvtier.core.layout import KVLayout
from kvtier.testing.child import Child, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

BLOCK_BYTES = 4096
CHAIN_BLOCKS = 8192


def timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def chain(space: KeySpace, number: int, length: int) -> list[BlockHash]:
    root = chain_root(space.digest, NO_TENANT)
    return hash_blocks(root, range(number << 16, (number << 16) + length), 1)


def fill(client: Client, hashes: list[BlockHash]) -> None:
    taken = client.store(NO_TENANT, hashes, 0, lambda indexes, _slots: (None for _ in indexes))
    assert taken == len(hashes), f"{taken} of {len(hashes)} blocks were taken"


def compare(
    client: Client, stub: operator_pb2_grpc.OperatorStub, hashes: list[BlockHash], runs: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {"empty_call": [], "lookup": []}
    for _ in range(runs):
        times["empty_call"].append(timed(lambda: stub.Ping(pb.PingRequest(), timeout=5)))
        times["lookup"].append(timed(lambda: found(client, hashes)))
    empty, lookup = (statistics.median(times[name]) * 1000 for name in ("empty_call", "lookup"))
    return {
        "empty_call_ms": round(empty, 3),
        "lookup_ms": round(lookup, 3),
        "more_ms": round(lookup - empty, 3),
        "lookup_p95_ms": round(statistics.quantiles(times["lookup"], n=20)[-1] * 1000, 3),
    }


def found(client: Client, hashes: list[BlockHash]) -> None:
    answer = client.lookup(NO_TENANT, hashes, 0)
    assert len(answer.tiers) == len(hashes), answer.reason


def memory(daemon: Child) -> dict[str, float]:
    return {"daemon_mb": round(daemon.memory_bytes()[0] / 1e6, 1)}


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    layout = KVLayout("paged", 1, 64, BLOCK_BYTES, "uint8", "bench")
    space = KeySpace(bytes(32), "{}", layout, "uint8", "bench")
    room = psutil.virtual_memory().available // 2 // BLOCK_BYTES
    num_chains = min(options.entries, room) // CHAIN_BLOCKS
    capacity_bytes = (num_chains + 1) * CHAIN_BLOCKS * BLOCK_BYTES // (64 << 20) * (64 << 20)
    settings = {
        "cpu.capacity": capacity_bytes + (128 << 20),
        "cpu.slab": 64 << 20,
        "ssd.enabled": "false",
    }
    figures = {}
    with work_directory() as directory:
        served = RunningNode(directory, settings)
        with served.daemon() as daemon, local_operator(served.socket) as stub:
            daemon.await_log("arena reserved")
            client = Client(served.socket, space, "bench")
            client.start()
            assert client.wait_attached(10)
            hashes = chain(space, 0, options.hashes)
            fill(client, hashes)
            compare(client, stub, hashes, 20)  # opens channels and touches memory
            small = compare(client, stub, hashes, options.runs)
            figures["small_index"] = small | memory(daemon)
            for number in range(1, num_chains + 1):
                fill(client, chain(space, number, CHAIN_BLOCKS))
            large = compare(client, stub, hashes, options.runs)
            blocks = served.stat()["tiers"]["cpu"]["blocks"]
            figures["large_index"] = {"entries": blocks} | large | memory(daemon)
            more_mb = figures["large_index"]["daemon_mb"] - figures["small_index"]["daemon_mb"]
            figures["large_index"]["bytes_an_entry"] = round(more_mb * 1e6 / blocks)
            figures["large_index"]["lookups_per_s"] = round(1000 / large["lookup_ms"])
            figures["large_index"]["hashes_per_s"] = round(1000 * options.hashes / large["more_ms"])
            client.close()
            daemon.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hashes", type=int, default=2000)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=201)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
        return
    for title, values in figures.items():
        print(title.replace("_", " "))
        for name, value in values.items():
            print(f"  {name:28} {value:>10,}")


if __name__ == "__main__":
    main()
