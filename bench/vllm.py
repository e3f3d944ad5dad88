"""Compare vLLM alone, with its ExampleConnector, and with kvtier: time to first token, throughput.

    python bench/vllm.py [--model FOLDER] [--tokens 1024,4096,8064] [--runs 5] [--json]

Three servers of the same model run at the same time and are asked in turns, one request at a time:

cold       vLLM without a connector, a new prompt
stored     vLLM with kvtier, the same prompt: computed and stored
vllm       warm in vLLM's own cache
cpu ...    warm only in that tier of kvtier, vLLM's own cache empty
example    warm only in the files of the ExampleConnector, vLLM's own cache empty

A prompt has 32 tokens more than stated, which are always computed. Then eight clients ask at once:
new prompts, where the connector is pure overhead; and prompts of which 90 % were requested before,
from more documents than fit into vLLM's cache. Prints medians, and ratios of consecutive
measurements.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ttft import redis_url

from kvtier.client import ClientDeadlines
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer, kvtier_transfer

ROOT = Path(__file__).resolve().parents[1]
TAIL_TOKENS = 32
BLOCK_TOKENS = 128
NUM_CLIENTS = 8
TRIES = 3
TIERS = ("cpu", "ssd", "remote")

TIERS_AT_ONCE: Mapping[str, str | int] = {
    "cpu.capacity": "2GiB",
    "cpu.slab": "64MiB",
    "ssd.capacity": "4GiB",
    "ssd.segment": "64MiB",
    "remote.min_tokens": 0,
    "remote.deadline": "2s",
    "remote.in_flight": "512MiB",  # a long prompt at once
}
"""Settings besides those of a test daemon: all tiers get all blocks, and restores are forced."""

AS_SHIPPED = {
    "remote.deadline": "250ms",
    "remote.in_flight": "64MiB",
    "remote.min_tokens": "256",
    "policy.eviction": "rd-sec",
    "ssd.write": "demote",
    "remote.write": "second_use",
    "cost.restore": "auto",
    "cost.probe": "start",
}


@dataclass
class Bench:
    """The servers, the daemon's settings, and the source of prompts."""

    alone: VllmServer
    example: VllmServer
    kvtier: VllmServer
    served: RunningNode
    vocabulary: int
    generator: np.random.Generator

    def prompt(self, num_tokens: int) -> list[int]:
        """Return new random tokens."""
        return [int(each) for each in self.generator.integers(10, self.vocabulary, num_tokens)]

    @contextmanager
    def daemon(self, **changes: str) -> Iterator[None]:
        """Run a daemon, and wait until the server with the connector is attached."""
        with self.served.daemon(**changes) as daemon:
            await_true(lambda: len(self.served.stat()["engines"]) == 2, "both halves joined", 30)
            yield
            daemon.stop()


def first_tokens(bench: Bench, num_tokens: int) -> dict[str, float]:
    """Return the seconds to first token of one prompt by location of its blocks."""
    prompt = bench.prompt(num_tokens + TAIL_TOKENS)
    num_blocks = num_tokens // BLOCK_TOKENS
    took = {"cold": bench.alone.first_token_s(prompt), "vllm": bench.alone.first_token_s(prompt)}
    took["stored"] = bench.kvtier.first_token_s(prompt)
    for tier in TIERS:
        bench.served.await_blocks(tier, num_blocks)
    for dropped, tier in zip(((), ("cpu",), ("cpu", "ssd")), TIERS, strict=True):
        took[tier] = warm(bench, prompt, dropped)
    bench.example.first_token_s(prompt)
    bench.example.forget()
    took["example"] = bench.example.first_token_s(prompt)
    for server in (bench.alone, bench.example, bench.kvtier):
        server.forget()
    bench.served.await_idle()
    bench.served.drop(*TIERS)
    return took


def warm(bench: Bench, prompt: list[int], dropped: Sequence[str]) -> float:
    """Return the seconds to first token if all but the tail comes from a tier."""
    wanted = (len(prompt) - TAIL_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    for _ in range(TRIES):  # on a busy machine a lookup may time out, and vLLM computes
        bench.kvtier.forget()
        bench.served.await_idle()
        bench.served.drop(*dropped)
        loaded = bench.kvtier.hit_tokens()
        seconds = bench.kvtier.first_token_s(prompt)
        loaded = bench.kvtier.hit_tokens() - loaded
        if loaded == wanted:
            return seconds
        time.sleep(
            ClientDeadlines().reconnect_s
        )  # a daemon that timed out is not asked for this long
    raise AssertionError(f"{loaded} of {wanted} tokens came, without {dropped}")


def tokens_per_second(
    server: VllmServer, prompts: Sequence[list[int]], num_answer_tokens: int
) -> float:
    """Return the throughput of a server with many concurrent clients."""
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(lambda each: server.ask(each, num_answer_tokens), prompts))
    num_tokens = sum(map(len, prompts)) + sum(map(len, answers))
    return num_tokens / (time.perf_counter() - started)


def new_prompts(bench: Bench, options: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second for new prompts, the same for both servers."""
    prompts = [bench.prompt(options.load_tokens) for _ in range(options.requests)]
    return in_turns(bench, prompts, options.runs)


def known_prompts(bench: Bench, options: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second for prompts of which nine tenths were requested before."""
    num_known = options.load_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    documents = [bench.prompt(num_known) for _ in range(options.requests)]
    for server in (bench.alone, bench.kvtier):
        tokens_per_second(server, documents, 1)
    bench.served.await_idle(60)
    prompts = [document + bench.prompt(num_known // 9) for document in documents]
    return in_turns(bench, prompts, options.runs)


def in_turns(bench: Bench, prompts: Sequence[list[int]], num_runs: int) -> dict[str, float]:
    """Return the medians of both servers, which alternate."""
    speeds: dict[str, list[float]] = defaultdict(list)
    share = len(prompts) // num_runs
    for run in range(num_runs):
        asked = prompts[run * share : (run + 1) * share]
        for name in sorted(("alone", "kvtier"), reverse=run % 2 == 0):
            speeds[name].append(tokens_per_second(getattr(bench, name), asked, 16))
            bench.served.await_idle(60)
    pairs = [kvtier / alone for alone, kvtier in zip(*map(speeds.get, sorted(speeds)), strict=True)]
    medians = {name: round(statistics.median(each)) for name, each in speeds.items()}
    return medians | {"ratio": round(statistics.median(pairs), 3)}


@contextmanager
def started(options: argparse.Namespace) -> Iterator[Bench]:
    """Start all servers at the same time."""
    config = json.loads((options.model / "config.json").read_text())
    with ExitStack() as stack:
        directory = stack.enter_context(work_directory())
        url = stack.enter_context(redis_url(directory))
        assert url, "there is no redis-server"
        served = RunningNode(directory, {**TIERS_AT_ONCE, "remote.url": url})
        files = {"shared_storage_path": str(directory / "files")}
        transfers: dict[str, dict[str, Any] | None] = {
            "alone": None,
            "example": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": files,
            },
            "kvtier": kvtier_transfer(served.socket),
        }
        servers: dict[str, VllmServer] = {}
        for name, transfer in transfers.items():
            server = VllmServer(
                ROOT / ".vllm" / options.release,
                options.model,
                directory / f"{name}.log",
                transfer,
                environment={"OMP_NUM_THREADS": str(options.threads)},
                dtype=options.dtype,
                max_model_len=config["max_position_embeddings"],
                # The ExampleConnector crashes the engine if a prompt takes several steps.
                max_num_batched_tokens=config["max_position_embeddings"],
                num_gpu_blocks_override=options.pool_blocks,
            )
            servers[name] = stack.enter_context(server)
        for server in servers.values():
            server.await_ready()
        generator = np.random.default_rng(options.seed)
        yield Bench(**servers, served=served, vocabulary=config["vocab_size"], generator=generator)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all results: seconds by prompt and location, tokens per second by workload."""
    figures: dict[str, Any] = {"release": options.release, "model": options.model.name}
    with started(options) as bench:
        with bench.daemon():
            first_tokens(bench, BLOCK_TOKENS)  # a server's first request has one-time costs
            for num_tokens in options.tokens:
                runs = [first_tokens(bench, num_tokens) for _ in range(options.runs)]
                medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                figures[f"first_token_s_{num_tokens}"] = medians
                print(num_tokens, medians, file=sys.stderr)  # keeps results if a later step fails
        with bench.daemon(**{name.replace(".", "__"): of for name, of in AS_SHIPPED.items()}):
            figures["tokens_per_second_0_percent_hits"] = new_prompts(bench, options)
            figures["tokens_per_second_90_percent_hits"] = known_prompts(bench, options)
    return figures


def show(figures: dict[str, Any]) -> None:
    print(f"vLLM {figures['release']}, {figures['model']}")
    for name, row in figures.items():
        if name.startswith("first_token_s_"):
            print(f"\nseconds to the first token, {name.rpartition('_')[2]} tokens")
            for place, seconds in row.items():
                print(f"  {place:10} {seconds:8.3f}   {row['cold'] / seconds:6.1f} x")
        elif name.startswith("tokens_per_second_"):
            print(f"\n{name.replace('_', ' ')}")
            for server, value in row.items():
                print(f"  {server:10} {value:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--release", default="0.32")
    parser.add_argument("--model", type=Path, default=ROOT / ".vllm/models/smol")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(each) for each in text.split(",")],
        default="1024,4096,8064",
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load-tokens", type=int, default=1024)
    parser.add_argument(
        "--requests", type=int, default=50, help="requests per workload, over all runs"
    )
    parser.add_argument(
        "--pool-blocks",
        type=int,
        default=260,
        help="blocks of vLLM's cache, 128 tokens each; a prompt offers a quarter of them per step",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)


if __name__ == "__main__":
    main()
