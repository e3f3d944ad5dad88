"""Measure how long a scrape takes while the daemon is busy and has a million blocks.

    python bench/scrape.py [--json]

The daemon's blocks are stored through its client, one page each, in memory and on disk. Then
engines in another process store and load continuously, while this one scrapes like Prometheus. For
comparison: the same scrapes of the idle daemon, and encoding an equal registry in a process that
does nothing else, which is the machine's limit.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from lookup import BLOCK_BYTES, CHAIN_BLOCKS, chain
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kvtier.client import Client, ClientDeadlines
from kvtier.core.identity import NO_TENANT, BlockHash, KeySpace
from kvtier.core.layout import KVLayout
from kvtier.errors import DaemonUnavailable
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"
"""The Accept header of Prometheus."""

LOAD_BLOCKS = 64
"""Blocks per prompt: 4,096 tokens in blocks of 64."""

SPACE = KeySpace(
    bytes(32), "{}", KVLayout("paged", 1, 64, BLOCK_BYTES, "uint8", "bench"), "uint8", "bench"
)


@contextmanager
def attached(socket_path: Path) -> Iterator[Client]:
    # A shared machine may be slow; that is not an error.
    client = Client(socket_path, SPACE, "bench", deadlines=ClientDeadlines(30, 30, 60))
    client.start()
    assert client.wait_attached(30)
    try:
        yield client
    finally:
        client.close()


def work(socket_path: Path, num_threads: int, num_chains: int) -> None:
    """Store new prompts and load old ones until standard input is closed."""
    is_over = threading.Event()
    counts = dict.fromkeys(("stored", "loaded", "away"), 0)

    def run(seed: int) -> None:
        choose, number = random.Random(seed), (seed + 1) * 10_000
        with attached(socket_path) as client:
            while not is_over.is_set():
                number += 1
                old = chain(SPACE, choose.randrange(1, num_chains + 1), LOAD_BLOCKS)
                try:
                    new = chain(SPACE, number, LOAD_BLOCKS)
                    counts["stored"] += store(client, new)
                    if client.lookup(NO_TENANT, old, 0).tiers:
                        counts["loaded"] += sum(1 for _ in client.load(NO_TENANT, old, 0)) - 1
                except DaemonUnavailable:
                    counts["away"] += 1
                    is_over.wait(0.05)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join(30)
    print(json.dumps(counts))


def store(client: Client, hashes: list[BlockHash]) -> int:
    return client.store(NO_TENANT, hashes, 0, lambda indexes, _slots: (None for _ in indexes))


def scrapes(port: int, count: int, period_s: float) -> list[float]:
    """Return the times of ``count`` scrapes over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    took = []
    for _ in range(count):
        started = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept": ACCEPT})
        body = connection.getresponse().read()
        took.append(time.perf_counter() - started)
        assert body.endswith(b"\n"), "a whole answer"
        time.sleep(max(0.0, period_s - took[-1]))
    connection.close()
    return took


def encodings(count: int) -> dict[str, float]:
    registry = Metrics(DAEMON_METRICS, CollectorRegistry()).registry
    took, cpu_s = [], time.thread_time()
    for _ in range(count):
        started = time.perf_counter()
        generate_latest(registry)
        took.append(time.perf_counter() - started)
    # Estimates the time on an idle machine if this one is shared.
    cpu_ms = (time.thread_time() - cpu_s) / count * 1000
    return figures_of(took) | {"cpu_ms": round(cpu_ms, 2)}


def figures_of(seconds: Sequence[float]) -> dict[str, float]:
    milliseconds = sorted(each * 1000 for each in seconds)
    return {
        "median_ms": round(statistics.median(milliseconds), 2),
        "p95_ms": round(milliseconds[int(len(milliseconds) * 0.95)], 2),
        "max_ms": round(milliseconds[-1], 2),
    }


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    room = psutil.virtual_memory().available // 2 // BLOCK_BYTES
    num_chains = min(options.entries, room) // CHAIN_BLOCKS
    slab_bytes = 64 << 20
    capacity_bytes = num_chains * CHAIN_BLOCKS * BLOCK_BYTES // slab_bytes * slab_bytes
    settings = {
        "cpu.capacity": capacity_bytes + slab_bytes,
        "cpu.slab": slab_bytes,
        "ssd.capacity": "2GiB",
        "ssd.segment": "64MiB",
        "ssd.write": "demote",
        "policy.eviction": "rd-sec",
        "cost.restore": "auto",
    }
    figures = {"idle process": encodings(options.scrapes)}
    with work_directory() as directory:
        served = RunningNode(directory, settings)
        with served.daemon() as daemon, attached(served.socket) as client:
            daemon.await_log("arena reserved")
            for number in range(1, num_chains + 1):
                assert store(client, chain(SPACE, number, CHAIN_BLOCKS)) == CHAIN_BLOCKS
            served.await_idle(60)
            scrapes(served.http_port, 5, 0)
            figures["daemon at rest"] = figures_of(
                scrapes(served.http_port, options.scrapes, options.period)
            )
            words = [__file__, "--work", str(served.socket), str(options.threads), str(num_chains)]
            busy = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            served.await_moved("gpu_to_cpu", 60)
            before = scheduled_s(daemon.pid)
            took = scrapes(served.http_port, options.scrapes, options.period)
            ran_s, waited_s = (
                now - was for now, was in zip(scheduled_s(daemon.pid), before, strict=True)
            )
            counts = json.loads(busy.communicate(timeout=60)[0])
            figures["daemon under load"] = figures_of(took) | {
                "entries": served.stat()["tiers"]["cpu"]["blocks"],
                "daemon_ran_s": round(ran_s, 2),
                "daemon_waited_for_a_core_s": round(waited_s, 2),
                **{f"{name}_blocks": num_blocks for name, num_blocks in counts.items()},
            }
            daemon.kill()  # otherwise it would flush queued writes for its whole grace period
    limit = figures["idle process"]["median_ms"]
    for each in figures.values():
        each["ratio"] = round(each["median_ms"] / limit, 1)
    return figures


def scheduled_s(pid: int) -> tuple[float, float]:
    """Return how long a process's threads have run, and have waited for a processor."""
    lines = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(line[0]) for line in lines) / 1e9, sum(int(line[1]) for line in lines) / 1e9


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--period", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
        return
    for title, values in figures.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:28} {value:>12,}")


if __name__ == "__main__":
    main()
