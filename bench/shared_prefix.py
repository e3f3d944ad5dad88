"""Measure whether kvtier slows down many requests that share a long prefix.

    python bench/shared_prefix.py [--requests N] [--prefix N] [--rounds N] [--json]

One engine uses a daemon (a separate process with default settings, except that blocks are written
to the SSD at once), another runs alone. Each round has its own prefix: first it is new, then in the
daemon's CPU tier, then only in its SSD tier. The engines' pools are emptied before each step, so
the engine alone computes the prefix once every time. Requests arrive at once, or one after another.
The engines run in turns, in changing order. Prints medians over rounds: of a wave's median and P99
time to first token, and of the ratio of two consecutive waves.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from mix import model_of

from kvtier.client import Client, ClientDeadlines
from kvtier.connectors.integrated import DaemonPort
from kvtier.engine.engine import Engine, block_layout, create_pool
from kvtier.engine.model import LoadedModel, key_space, model_flops
from kvtier.engine.port import NoPort
from kvtier.engine.request import EngineRequest, Output
from kvtier.engine.runner import EngineRunner
from kvtier.engine.settings import EngineSettings
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode

TIMEOUT_S = 120.0
SETTINGS = {
    "policy.eviction": "rd-sec",
    "cost.restore": "auto",
    "cost.probe": "start",
    "ssd.write": "store",
    "ssd.capacity": "2GiB",
    "ssd.segment": "64MiB",
    "cpu.capacity": "512MiB",
    "cpu.slab": "64MiB",
}
STATES = ("cold", "cpu", "ssd")
ARRIVALS = ("at once", "trickle")
MEDIAN_MOST, P99_MOST = 1.05, 1.10


@dataclass
class Wave:
    """A group of requests."""

    runner: EngineRunner
    prompts: Sequence[tuple[int, ...]]
    gap_s: float
    ttft_s: list[float] = field(default_factory=list)

    def run(self, name: str) -> list[float]:
        """Return the time to first token of each, in order of completion."""
        all_ended = threading.Event()
        start_s = time.perf_counter()
        for number, prompt in enumerate(self.prompts):
            due_s = start_s + number * self.gap_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            began_s = time.perf_counter()

            def deliver(output: Output, began_s: float = began_s) -> None:
                assert not output.error, output.error
                self.ttft_s.append(time.perf_counter() - began_s)
                if len(self.ttft_s) == len(self.prompts):
                    all_ended.set()

            self.runner.submit(EngineRequest(f"{name}-{number}", prompt, 1), deliver)
        assert all_ended.wait(TIMEOUT_S), "all are answered"
        await_true(lambda: self.runner.call(lambda engine: engine.is_idle), "it is idle", TIMEOUT_S)
        return self.ttft_s


@contextmanager
def engine_at(loaded: LoadedModel, socket: Path | None) -> Iterator[EngineRunner]:
    """Run an engine; without a socket it runs without a daemon."""
    settings = EngineSettings(pool_tokens=16384)
    pool = create_pool(loaded, settings)
    port: NoPort | DaemonPort = NoPort(settings.block_tokens)
    client = None
    if socket is not None:
        space = key_space(loaded, block_layout(loaded, settings))
        deadlines = ClientDeadlines(0.25, 5.0, 10.0)
        flops = model_flops(loaded)
        client = Client(socket, space, "bench", deadlines=deadlines, flops=flops, can_split=True)
        port = DaemonPort(client, pool, block_tokens=64, engine_block_bytes=pool.shape.block_bytes)
    runner = EngineRunner(Engine(loaded, settings, port, pool=pool))
    runner.start()
    if client is not None:
        client.start()
        assert client.wait_attached(TIMEOUT_S)
    yield runner
    assert runner.stop(TIMEOUT_S)


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    torch.set_num_threads(options.threads)
    with work_directory() as directory, ExitStack() as exits:
        loaded = model_of(options, directory)
        served = RunningNode(directory, SETTINGS)
        exits.enter_context(served.daemon())
        runners = {
            "on": exits.enter_context(engine_at(loaded, served.socket)),
            "off": exits.enter_context(engine_at(loaded, None)),
        }
        times: dict[tuple[str, str, str], list[list[float]]] = {}
        chance = random.Random(options.seed)
        for number in range(-1, options.rounds):
            for arrival in ARRIVALS:
                prompts = prompts_of(chance, loaded.vocab_size, options)
                for state in STATES:
                    for which in sorted(runners, reverse=bool(number % 2)):
                        runners[which].call(lambda engine: engine.drop_cache())
                        served.drop(*{"cold": (), "cpu": (), "ssd": ("cpu",)}[state])
                        gap_s = options.gap if arrival == "trickle" else 0.0
                        name = f"{number}-{arrival}-{state}".replace(" ", "-")
                        took = Wave(runners[which], prompts, gap_s).run(name)
                        served.await_idle(TIMEOUT_S)
                        if number >= 0:  # the first round has one-time costs
                            times.setdefault((arrival, state, which), []).append(took)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        decided = served.stat()["worth"]["decisions"]
        print(f"decided: {decided}", file=sys.stderr)
    return [row(times, arrival, state) for arrival in ARRIVALS for state in STATES]


def prompts_of(
    chance: random.Random, vocab_size: int, options: argparse.Namespace
) -> list[tuple[int, ...]]:
    """Return prompts that differ only in their last tokens."""
    words = range(3, vocab_size)
    prefix = chance.choices(words, k=options.prefix)
    return [
        tuple(prefix + chance.choices(words, k=chance.randint(8, 48)))
        for _ in range(options.requests)
    ]


def row(
    times: dict[tuple[str, str, str], list[list[float]]], arrival: str, state: str
) -> dict[str, object]:
    on, off = (np.array(times[arrival, state, which]) for which in ("on", "off"))
    found: dict[str, object] = {"arrival": arrival, "prefix in": state}
    holds = True
    for name, percentile, most in (("", 50, MEDIAN_MOST), ("p99 ", 99, P99_MOST)):
        of_on, of_off = (np.percentile(waves, percentile, axis=1) for waves in (on, off))
        ratio = float(np.median(of_on / of_off))
        found[f"{name}on_s"] = round(float(np.median(of_on)), 4)
        found[f"{name}off_s"] = round(float(np.median(of_off)), 4)
        found[f"{name}on/off"] = round(ratio, 3)
        holds = holds and ratio <= most
    return found | {"holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pace", type=float, default=0.0, metavar="TOKENS_PER_S")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--gap", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        print(json.dumps(rows))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>10}" for name in names))
    for each in rows:
        print("  ".join(f"{each[name]!s:>10}" for name in names))


if __name__ == "__main__":
    main()
