"""Measure the cost of kvtier when nothing ever hits: time to first token with and without a daemon.

    python bench/ttft.py [--model PATH] [--json]

Two engines serve the same model: one with a CPU, an SSD and a Redis tier, and one without a daemon.
Every prompt is new and goes to both, in alternating order; each waits until the writes of the
previous one are done. Prints medians and the ratio of each pair.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
from remote import redis_server

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, complete, url_of

ROOT = Path(__file__).resolve().parents[1]
MODEL = os.environ.get("KVTIER_DEMO_MODEL") or ROOT / ".model/smollm2-135m-instruct.gguf"


def ttft_s(url: str, prompt: list[int]) -> float:
    started = time.perf_counter()
    answer = complete(url, prompt, max_tokens=1)
    seconds = time.perf_counter() - started
    assert answer["kvtier"]["computed_tokens"] == len(prompt), "nothing hits"
    return seconds


def measure(options: argparse.Namespace) -> dict[str, float]:
    generator = np.random.default_rng(options.seed)
    settings = {"engine.pool": "512MiB", "cpu.capacity": "1GiB", "cpu.slab": "64MiB"}
    settings |= {"ssd.capacity": "2GiB", "ssd.segment": "64MiB"}
    times: dict[str, list[float]] = {"tiers": [], "alone": []}
    with work_directory() as directory, redis_server(directory) as url:
        served = RunningNode(directory, settings | {"remote.url": url})
        with (
            served.daemon() as daemon,
            served.engine(options.model)[0] as tiers,
            served.engine(options.model, "--alone")[0] as alone,
        ):
            urls = {"tiers": url_of(tiers), "alone": url_of(alone)}
            await_true(lambda: served.stat()["engines"], "an engine has joined")
            for run in range(options.runs + 1):
                prompt = generator.integers(10, 200, options.tokens).tolist()  # in any vocabulary
                for name in sorted(urls, reverse=run % 2 == 0):
                    took = ttft_s(urls[name], prompt)
                    if run:  # a process's first request has one-time costs
                        times[name].append(took)
                    served.await_idle(60)
            stored = served.stat()["tiers"]["ssd"]["tokens"]
            assert stored >= options.tokens * options.runs * 0.9, "everything was offloaded"
            for child in (tiers, alone, daemon):
                child.stop()
    pairs = [with_s / alone_s for with_s, alone_s in zip(*times.values(), strict=True)]
    return {
        "tokens": options.tokens,
        **{f"{name}_s": round(statistics.median(of), 3) for name, of in times.items()},
        "ratio": round(statistics.median(pairs), 4),
        "ratio_least": round(min(pairs), 4),
        "ratio_most": round(max(pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(MODEL))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>10}")


if __name__ == "__main__":
    main()
