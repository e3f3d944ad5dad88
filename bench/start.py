"""Measure the daemon's start time, and its memory without the arena.

    python bench/start.py [--json]

From exec to the line that says it is ready, compared with a Python process that starts and exits,
and one that imports the daemon's packages (gRPC, numpy, pydantic). All run in turns; prints
medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode

LIBRARIES = "import grpc.aio, numpy, pydantic, prometheus_client, starlette, uvicorn, xxhash"


def python_s(program: str) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    return time.monotonic() - started


def start(arena: str) -> dict[str, float]:
    with work_directory() as directory:
        served = RunningNode(directory, {"cpu.capacity": arena, "cpu.slab": "64MiB"})
        served.settings |= {"ssd.capacity": "1GiB", "ssd.segment": "64MiB"}
        with served.daemon() as daemon:
            ready_s = time.monotonic() - daemon.started_s
            daemon.await_log("arena reserved")
            reserved_s = time.monotonic() - daemon.started_s
            own_bytes, _ = daemon.memory_bytes()
            stopping_s = time.monotonic()
            daemon.stop()
            return {
                "ready_s": ready_s,
                "arena_reserved_s": reserved_s,
                "stop_s": time.monotonic() - stopping_s,
                "memory_mb": own_bytes / 1e6,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arena", default="2GiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [
        {"python_s": python_s("pass"), "libraries_s": python_s(LIBRARIES)} | start(options.arena)
        for _ in range(options.runs)
    ]
    figures = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    figures["ready_ratio"] = round(figures["ready_s"] / figures["libraries_s"], 2)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>10,}")


if __name__ == "__main__":
    main()
