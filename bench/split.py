"""Compare a split, which computes a prompt's start while loading its end, with either alone.

    python bench/split.py [--model PATH | --pace TOKENS_PER_S] [--tokens N] [--ratio R] [--json]

One engine and one daemon, whose SSD tier is throttled so that loading a prompt takes about as long
as computing it (times ``--ratio``). Each request finds its prompt only there. First it is always
computed, then always loaded, then the cost model decides from its measurements, in turns. Prints
medians of the time to first token, and the gain of the last over the better of the other two.

With ``--pace`` the model is a small random one with large keys and values, and each step takes the
time of this many tokens per second: as with an accelerator, computing leaves the processors free,
and results do not depend on their load.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvtier.api.rpc.operator_client import local_operator
from kvtier.client import Client, ClientDeadlines
from kvtier.config import Config, load_config
from kvtier.connectors.integrated import DaemonPort
from kvtier.core.residency import TierName
from kvtier.daemon.daemon import Daemon
from kvtier.engine.attention import ATTENTION_NAME, register_attention
from kvtier.engine.engine import Engine, block_layout, create_pool
from kvtier.engine.model import LoadedModel, key_space, load_model, model_flops
from kvtier.engine.request import EngineRequest, Output
from kvtier.engine.runner import EngineRunner
from kvtier.engine.settings import EngineSettings
from kvtier.testing.child import await_true, free_port, work_directory
from kvtier.testing.throttle_tier import ThrottleTier
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.memory import MemoryTier
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

ROOT = Path(__file__).resolve().parents[1]
MODEL = os.environ.get("KVTIER_DEMO_MODEL") or ROOT / ".model/smollm2-135m-instruct.gguf"
MIB = 1 << 20
TIMEOUT_S = 120.0
MODES = ("never", "always", "auto")


class Paced:
    """A model whose steps take a fixed time per token."""

    def __init__(self, model: Any, tokens_per_s: float) -> None:
        self._model = model
        self._tokens_per_s = tokens_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        ends_s = time.monotonic() + inputs["input_ids"].shape[1] / self._tokens_per_s
        output = self._model(**inputs)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return output


def paced_model(tokens_per_s: float, seed: int) -> LoadedModel:
    """Return a small random model with blocks of 2 MiB."""
    register_attention()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=512,
        max_position_embeddings=8192,
        attn_implementation=ATTENTION_NAME,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    paced = Paced(model, tokens_per_s)
    return LoadedModel(paced, None, model.config, "paced", 8192, frozenset())


def config_of(directory: Path, mode: str) -> Config:
    return load_config(
        None,
        {
            "daemon.socket": str(directory / f"{mode}.sock"),
            "ssd.directory": str(directory / mode),
            "ssd.write": "store",
            "cpu.capacity": "512MiB",
            "cpu.slab": "64MiB",
            "policy.eviction": "lru",
            "cost.restore": mode,
            "cost.probe": "off",
            "ssd.deadline": "60s",
            "client.load_deadline": "60s",
            "cost.wait_max": "60s",
            "http.listen": f"127.0.0.1:{free_port()}",
        },
        {},
    )


@contextmanager
def serving(config: Config, tier: ThrottleTier) -> Iterator[None]:
    """Run a daemon with that tier as its SSD tier, on a thread of this process."""
    loop, begun, stopping = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with Daemon(config, open_tier=lambda _config, _name: BreakerTier(tier)).serving():
            begun.set()
            await stopping.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert begun.wait(TIMEOUT_S), "the daemon has begun"
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(TIMEOUT_S)
        loop.close()


@dataclass
class Node:
    """An engine attached to a daemon with one slow tier."""

    config: Config
    tier: ThrottleTier
    runner: EngineRunner
    num_requests: int = 0

    def ask(
        self, prompt: tuple[int, ...], max_load_tokens: int | None = None
    ) -> tuple[float, Output]:
        """Return the time to first token of a one-token answer, and the answer."""
        self.num_requests += 1
        ended, outputs = threading.Event(), list[Output]()

        def deliver(output: Output) -> None:
            outputs.append(output)
            ended.set()

        request = EngineRequest(
            f"request-{self.num_requests}", prompt, 1, max_load_tokens=max_load_tokens
        )
        started_s = time.perf_counter()
        self.runner.submit(request, deliver)
        assert ended.wait(TIMEOUT_S), "it is answered"
        took_s = time.perf_counter() - started_s
        await_true(lambda: self.runner.call(lambda engine: engine.is_idle), "it is idle", TIMEOUT_S)
        return took_s, outputs[0]

    def forget(self) -> None:
        """Empty all but the slow tier."""
        self.runner.call(lambda engine: engine.drop_cache())
        request = pb.DropRequest(tiers=[tier_to_wire(TierName.CPU)], deadline_ms=60_000)
        with local_operator(self.config.daemon.socket, TIMEOUT_S) as stub:
            removed = stub.Drop(request, timeout=TIMEOUT_S).removed
        assert not any(each.kept_blocks or each.error for each in removed), removed


@contextmanager
def node(directory: Path, loaded: LoadedModel, mode: str) -> Iterator[Node]:
    config = config_of(directory, mode)
    config.tiers["ssd"].directory.mkdir()
    tier = ThrottleTier(MemoryTier(1 << 30))
    settings = EngineSettings(pool_tokens=8192)
    pool = create_pool(loaded, settings)
    with serving(config, tier):
        client = Client(
            config.daemon.socket,
            key_space(loaded, block_layout(loaded, settings)),
            "bench",
            deadlines=ClientDeadlines(5.0, 60.0, 60.0),
            flops=model_flops(loaded),
            can_split=True,
        )
        port = DaemonPort(client, pool, block_tokens=64, engine_block_bytes=pool.shape.block_bytes)
        runner = EngineRunner(Engine(loaded, settings, port, pool=pool))
        runner.start()
        client.start()
        assert client.wait_attached(TIMEOUT_S)
        yield Node(config, tier, runner)
        assert runner.stop(TIMEOUT_S)


def measure(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(options.threads)
    pace = options.pace
    loaded = paced_model(pace, options.seed) if pace else load_model(options.model)
    with ExitStack() as exits:
        directory = exits.enter_context(work_directory())
        nodes = {mode: exits.enter_context(node(directory, loaded, mode)) for mode in MODES}
        return compare(options, nodes, loaded)


def compare(
    options: argparse.Namespace, nodes: dict[str, Node], loaded: LoadedModel
) -> dict[str, object]:
    chance = random.Random(options.seed)
    prompt = tuple(chance.choices(range(1000, loaded.vocab_size), k=options.tokens))
    for each in nodes.values():
        each.ask(prompt[::-1])  # an engine's first request has one-time costs
        each.ask(prompt)
    compute_s = statistics.median(timed(nodes["never"], prompt)[0] for _ in range(3))
    block_bytes = block_layout(loaded, EngineSettings()).block_bytes
    speed = options.tokens // 64 * block_bytes / (compute_s * options.ratio)
    for each in nodes.values():
        each.tier.set(speed)
    for _ in range(options.warm):  # the cost model learns both paths
        timed(nodes["auto"], prompt)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    decisions = set()
    for run in range(options.runs):
        for mode in MODES[run % 3 :] + MODES[: run % 3]:
            took_s, decision = timed(nodes[mode], prompt)
            times[mode].append(took_s)
            decisions |= {decision} if mode == "auto" else set()
    medians = {mode: statistics.median(of) for mode, of in times.items()}
    return {
        "tokens": options.tokens,
        "tier_mib_per_s": round(speed / MIB, 1),
        "recompute_s": round(medians["never"], 3),
        "restore_s": round(medians["always"], 3),
        "decided_s": round(medians["auto"], 3),
        "decisions": " ".join(sorted(decisions)),
        "better": round(min(medians["never"], medians["always"]) / medians["auto"], 2),
    }


def timed(of: Node, prompt: tuple[int, ...]) -> tuple[float, str]:
    of.forget()
    took_s, output = of.ask(prompt)
    assert output.usage is not None
    return took_s, output.usage.decision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(MODEL))
    parser.add_argument("--pace", type=float, default=0.0, metavar="TOKENS_PER_S")
    parser.add_argument("--tokens", type=int, default=2065)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value!s:>16}")


if __name__ == "__main__":
    main()
