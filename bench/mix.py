"""Compare restore decisions with fixed choices, by tier speed and hit length.

    python bench/mix.py [--sim] [--hits N …] [--ratios R …] [--runs N] [--json]

A prompt's prefix is in one slow tier and nowhere else; a short tail is always computed. The tier is
throttled until restoring the prefix takes ``ratio`` times as long as computing it. Fixed choices
restore none, half or all of it; ``auto`` is the decision of the cost model, after some seconds to
learn that speed. Times are medians of the time to first token; ratios are medians over rounds in
which all choices took turns: ``/best`` compares with the best fixed choice, ``/none`` with
computing everything.

The real product: engines and daemons on threads of this process, a random Llama of 8 layers that
computes about 3,000 tokens per second and core, and an SSD tier in memory behind ``ThrottleTier``.
With ``--pace``, the model's steps take a fixed time per token, regardless of other load. ``--sim``
runs the same in the simulator, with an 8B model on an A100.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from split import Node, node, paced_model

from kvtier.core.residency import TierName
from kvtier.engine.engine import block_layout
from kvtier.engine.model import LoadedModel, load_model
from kvtier.engine.settings import EngineSettings
from kvtier.node.messages import events as ev
from kvtier.sim.replay.context import EventQueue, LinkTimer, ReplayContext
from kvtier.sim.replay.engine import ReplayEngine, ReplayRequest
from kvtier.sim.replay.node_adapter import NodeAdapter
from kvtier.sim.replay.setup import Machine, ReplayLink, ReplaySetup
from kvtier.sim.replay.trace import Trace, TraceRequest, numbered_keys
from kvtier.testing.child import work_directory

BLOCK = 64
TAIL = 40
"""Tokens behind the prefix; less than a block, so that nothing is written again."""
NONE, HALF, ALL, AUTO = "none", "half", "all", "auto"
RATIOS = (0.05, 0.3, 0.8, 1.25, 3.0, 15.0)
SLOW = 2.0
"""A fixed choice this much slower than computing is not measured in every round."""
BEST_MOST, NONE_MOST = 1.10, 1.05


class World(Protocol):
    """Times requests whose prefix is only in the slow tier."""

    choices: Sequence[str]

    def set_ratio(self, hit: int, ratio: float) -> None:
        """Make restoring ``hit`` tokens take ``ratio`` times as long as computing them."""

    def settle(self, hit: int) -> None:
        """Let the cost model learn the speed."""

    def take(self, choice: str, hit: int) -> tuple[float, str]:
        """Return the time to first token of one request, and the decision."""


@dataclass
class Cell:
    """One hit length at one tier speed."""

    hit: int
    ratio: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)

    def median(self, choice: str) -> float:
        return statistics.median(self.seconds[choice])

    def against(self, choice: str) -> float:
        pairs = zip(self.seconds[AUTO], self.seconds[choice], strict=False)
        return statistics.median(auto / other for auto, other in pairs)

    @property
    def best(self) -> str:
        return min((each for each in self.seconds if each != AUTO), key=self.median)

    def row(self) -> dict[str, object]:
        medians = {f"{choice}_s": round(self.median(choice), 4) for choice in self.seconds}
        said = " ".join(f"{name}*{count}" for name, count in self.decisions.most_common(3))
        return {
            "hit": self.hit,
            "ratio": self.ratio,
            **medians,
            "best": self.best,
            "auto/best": round(self.against(self.best), 3),
            "auto/none": round(self.against(NONE), 3),
            "decided": said,
        }


def measured(world: World, hit: int, ratio: float, num_runs: int) -> Cell:
    """Time all choices in turns, in changing order."""
    cell = Cell(hit, ratio)
    world.set_ratio(hit, ratio)
    world.settle(hit)
    choices = [*world.choices, AUTO]
    for run in range(num_runs):
        for choice in choices[run % len(choices) :] + choices[: run % len(choices)]:
            taken = cell.seconds.setdefault(choice, [])
            compute = cell.seconds.get(NONE)
            if taken and compute and choice != AUTO and taken[0] > SLOW * compute[0]:
                continue
            seconds, decided = world.take(choice, hit)
            taken.append(seconds)
            if choice == AUTO:
                cell.decisions[decided] += 1
    return cell


# The real product


def random_llama(folder: Path) -> LoadedModel:
    """Create a model that is small but slow."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {f"<{number}>": number for number in range(256)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<1>", eos_token="<2>", pad_token="<0>"
    ).save_pretrained(folder)
    return load_model(folder)


def model_of(options: argparse.Namespace, folder: Path) -> LoadedModel:
    """Return the requested model: from a file, at a given pace, or as fast as it runs."""
    if options.model:
        return load_model(options.model)
    if options.pace:
        return paced_model(options.pace, options.seed)
    return random_llama(folder / "model")


class Real:
    """Two nodes: one restores what it is told to, the other decides."""

    choices = (NONE, HALF, ALL)

    def __init__(self, loaded: LoadedModel, fixed: Node, auto: Node, seed: int) -> None:
        self._chance = random.Random(seed)
        self._vocab_size = loaded.vocab_size
        self._block_bytes = block_layout(loaded, EngineSettings()).block_bytes
        self._fixed, self._auto = fixed, auto
        self._prefixes: dict[int, tuple[int, ...]] = {}
        self._settle_s = 12.0

    def set_ratio(self, hit: int, ratio: float) -> None:
        for each in (self._fixed, self._auto):
            each.tier.set(0)
            if hit not in self._prefixes:
                each.ask(
                    self._prompt(hit)[::-1][: hit // 2]
                )  # the first request has one-time costs
        prefix = self._prefixes.setdefault(hit, self._tokens(hit))
        for each in (self._fixed, self._auto):
            each.ask((*prefix, *self._tokens(TAIL)))
        compute_s = statistics.median(self.take(NONE, hit)[0] for _ in range(3))
        for each in (self._fixed, self._auto):
            each.tier.set(hit // BLOCK * self._block_bytes / (compute_s * ratio))

    def settle(self, hit: int) -> None:
        until_s = time.monotonic() + self._settle_s
        while time.monotonic() < until_s:
            self.take(AUTO, hit)

    def take(self, choice: str, hit: int) -> tuple[float, str]:
        which = self._auto if choice == AUTO else self._fixed
        which.forget()
        limits = {NONE: 0, HALF: hit // 2}
        seconds, output = which.ask(self._prompt(hit), max_load_tokens=limits.get(choice))
        assert output.usage is not None
        return seconds, output.usage.decision

    def _prompt(self, hit: int) -> tuple[int, ...]:
        return (*self._prefixes.get(hit, ()), *self._tokens(TAIL))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.choices(range(3, self._vocab_size), k=count))


@contextmanager
def real(options: argparse.Namespace) -> Iterator[World]:
    torch.set_num_threads(options.threads)
    with ExitStack() as exits:
        directory = exits.enter_context(work_directory())
        loaded = model_of(options, directory)
        fixed, auto = (
            exits.enter_context(node(directory, loaded, mode)) for mode in ("always", "auto")
        )
        yield Real(loaded, fixed, auto, options.seed)


# The simulator


class Simulated:
    """A node for each choice and cell, with its own clock."""

    choices = (NONE, ALL)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._nodes: dict[str, SimulatedNode] = {}

    def set_ratio(self, hit: int, ratio: float) -> None:
        compute_s = self._machine.prefill_model.seconds(hit, 0)
        rate = hit * self._machine.token_bytes / (compute_s * ratio)
        link = ReplayLink(read_bytes_per_s=rate, write_bytes_per_s=25e9)
        machine = self._machine.model_copy(update={"ssd": link})
        modes = {NONE: "never", ALL: "always", AUTO: "auto"}
        self._nodes = {choice: SimulatedNode(machine, mode, hit) for choice, mode in modes.items()}

    def settle(self, hit: int) -> None:
        for each in self._nodes.values():
            each.take()
        for _ in range(20):
            self._nodes[AUTO].take()

    def take(self, choice: str, hit: int) -> tuple[float, str]:
        return self._nodes[choice].take()


class SimulatedNode:
    """One node that is repeatedly asked for a prefix that only its SSD tier has."""

    def __init__(self, machine: Machine, mode: str, hit: int) -> None:
        num_blocks = hit // BLOCK
        self._setup = ReplaySetup(
            policy="lru",
            cpu_blocks=2 * num_blocks,
            ssd_blocks=2 * num_blocks,
            machine=machine,
            overrides={
                "cost.restore": mode,
                "ssd.write": "store",
                "ssd.deadline": "60s",
                "cost.wait_max": "60s",
            },
        )
        self._request = TraceRequest(0, np.arange(num_blocks, dtype=np.int32), hit + TAIL)
        self._keys = numbered_keys(num_blocks)
        self._events = EventQueue()
        timer = LinkTimer(self._events, machine.ssd)
        self._adapter = NodeAdapter(self._setup, BLOCK, timer, lambda: self._events.now_ns)
        self._session = self._adapter.register("mix")

    def take(self) -> tuple[float, str]:
        events, adapter = self._events, self._adapter
        request = TraceRequest(events.now_ns, self._request.blocks, self._request.num_tokens)
        trace = Trace("mix", BLOCK, (request,), self._keys)
        context = ReplayContext(trace, self._setup.machine, events, adapter)
        engine = ReplayEngine(context, self._session, is_shared=True)
        ended: list[ReplayRequest] = []
        engine.take(ReplayRequest(context, engine, 0, ended.append))
        while events.step():  # until its report is sent
            pass
        adapter.ask(lambda call: ev.Drop(call, (TierName.CPU,), events.now_ns + 10**9))
        (visit,) = ended
        return visit.ttft_s, str(visit.plan.reason) if visit.plan else "alone"


# Output


def table(cells: Sequence[Cell]) -> Iterator[str]:
    rows = [{name: str(value) for name, value in cell.row().items()} for cell in cells]
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    for line in lines:
        yield "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True))


def verdict(cells: Sequence[Cell]) -> str:
    missed = [
        cell
        for cell in cells
        if cell.against(cell.best) > BEST_MOST or cell.against(NONE) > NONE_MOST
    ]
    worst_best = max(cell.against(cell.best) for cell in cells)
    worst_none = max(cell.against(NONE) for cell in cells)
    return (
        f"{len(cells) - len(missed)} of {len(cells)} mixes within {BEST_MOST - 1:.0%} of the best "
        f"fixed choice and {NONE_MOST - 1:.0%} of computing; worst {worst_best:.3f} and "
        f"{worst_none:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pace", type=float, default=0.0, metavar="TOKENS_PER_S")
    parser.add_argument("--hits", type=int, nargs="+")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hits = options.hits or ([2048, 8192, 32768] if options.sim else [512, 1024, 2048])
    cells = []
    with ExitStack() as exits:
        world = Simulated(Machine()) if options.sim else exits.enter_context(real(options))
        for hit in hits:
            for ratio in options.ratios:
                cells.append(measured(world, hit, ratio, options.runs))
                print(json.dumps(cells[-1].row()), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([cell.row() for cell in cells]))
        return
    print(*table(cells), verdict(cells), sep="\n")


if __name__ == "__main__":
    main()
