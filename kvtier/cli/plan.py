"""``kvtier plan``: the size of the tiers for a model and its traffic, and the file for it."""

import argparse
import json
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier.cli.replay import (
    add_machine_options,
    add_trace_options,
    machine_of,
    override,
    trace_of,
)
from kvtier.cli.shown import shown_bytes, shown_count
from kvtier.cli.written import check_file, write_file
from kvtier.config import load_config
from kvtier.config.units import format_size, parse_size
from kvtier.core.slots import slot_bytes
from kvtier.errors import StartError
from kvtier.sim.replay.dimensions import DTYPE_BYTES, Dimensions, read_dimensions
from kvtier.sim.replay.machine import Link, Machine
from kvtier.sim.replay.setup import CPU_BLOCKS_MIN, Setup
from kvtier.sim.replay.sizing import (
    Point,
    Sizes,
    Target,
    bend,
    break_even_bytes_per_s,
    curve_of,
    sizes_for,
)
from kvtier.sim.replay.study import ladder, run_study
from kvtier.sim.replay.trace import Trace
from kvtier.sim.replay.traffic import Traffic

__all__ = ["add_options", "run"]

_MIB, _GIB = 2**20, 2**30
_POLICY = "rd-sec"

_RANGES: Mapping[str, tuple[float, float]] = {
    "sessions": (1, 1_000_000),
    "prompt_tokens": (1, 2**24),
    "turn_tokens": (1, 2**24),
    "turns": (1, 10_000),
    "gap": (0.01, 86_400.0),
    "shared_tokens": (0, 2**24),
    "block_tokens": (0, 2**16),
    "model_layers": (1, 2**16),
    "kv_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "jobs": (1, 1024),
}
"""What may be said: more than there is anywhere, and no more than can be worked out."""

_TOKEN_BYTES_MAX = 2**30
"""KV of one token, of which there are 64 in a block."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="folder with config.json, or a GGUF file",
    )
    model.add_argument("--model-layers", type=int, metavar="N", help="instead of MODEL")
    model.add_argument("--kv-heads", type=int, metavar="N", help="instead of MODEL")
    model.add_argument("--head-dim", type=int, metavar="N", help="instead of MODEL")
    model.add_argument("--dtype", choices=DTYPE_BYTES, help="of the KV (the model's)")
    traffic = parser.add_argument_group("traffic")
    add_trace_options(traffic, "--trace")
    traffic.add_argument("--sessions", type=int, metavar="N", help="active at a time; no trace")
    traffic.add_argument("--prompt-tokens", type=int, metavar="N", help="of a first turn")
    traffic.add_argument("--turn-tokens", type=int, metavar="N", help="that each turn adds")
    traffic.add_argument("--turns", type=int, default=5, metavar="N", help="of a session (5)")
    traffic.add_argument(
        "--gap", type=float, default=120.0, metavar="SECONDS", help="between turns (120)"
    )
    traffic.add_argument(
        "--shared-tokens", type=int, default=0, metavar="N", help="that all prompts begin with"
    )
    parser.add_argument(
        "--target",
        type=_target,
        default=Target(),
        metavar="WHAT=VALUE",
        help="hits=0.3, seconds=0.3 or memory=256GiB (where the curve bends)",
    )
    add_machine_options(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (one for each CPU)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the configuration")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a plan; exit code 1 where no size that was tried reaches the target."""
    if options.write is not None:
        check_file("--write", options.write)
    _check_ranges(options)
    dimensions = _dimensions(options)
    machine = machine_of(options)
    prefill = machine.prefill_model
    if options.machine is None and options.prefill_profile is None:
        prefill = dimensions.prefill(prefill)
    machine = machine.with_prefill(prefill).model_copy(
        update={"token_bytes": dimensions.token_bytes}
    )
    trace = _traffic(options)
    layout = dimensions.layout(trace.block_tokens)
    plan = _Plan(dimensions, machine, trace, slot_bytes(layout.block_bytes))
    plan.speed = _speed(options, dimensions)
    plan.replay(options)
    text = plan.config()
    if options.write is not None:
        write_file("--write", options.write, text)
    if options.json:
        print(json.dumps(plan.document() | {"config": text}))
    else:
        print("\n".join(plan.lines()))
        print(f"\nwritten to {options.write}" if options.write else f"\n{text}", end="")
    return int(not plan.sizes.is_reached)


class _Plan:
    """A plan, and how it is shown."""

    def __init__(
        self, dimensions: Dimensions, machine: Machine, trace: Trace, block_bytes: int
    ) -> None:
        self.dimensions = dimensions
        self.machine = machine
        self.trace = trace
        self.block_bytes = block_bytes
        self.speed = ""
        self.target = Target()
        self.curve: list[Point] = []
        self.sizes: Sizes

    def replay(self, options: argparse.Namespace) -> None:
        """Replay the traffic over a sweep of sizes, and choose among them."""
        self.target = options.target
        sizes = set(ladder(self.trace))
        if self.target.memory_bytes is not None:
            sizes.add(max(CPU_BLOCKS_MIN, self.target.memory_bytes // self.block_bytes))
        setups = [
            Setup(
                policy=_POLICY,
                cpu_blocks=size,
                is_instant=True,
                machine=self.machine,
                config=options.config,
                overrides=dict(map(override, options.set)),
            )
            for size in sorted(sizes)
        ]
        self.curve = curve_of(run_study(self.trace, setups, options.jobs or os.cpu_count() or 1))
        self.sizes = sizes_for(self.curve, self.target, self.block_bytes)

    def lines(self) -> Iterator[str]:
        """Yield the plan as text of 80 columns."""
        model, layout = self.dimensions, self.dimensions.layout(self.trace.block_tokens)
        yield (
            f"model    {model.name}: {model.num_layers} layers, {model.num_kv_heads} KV heads of "
            f"{model.head_dim}, {model.dtype}"
        )
        yield (
            f"         {shown_bytes(model.token_bytes)} a token, {shown_bytes(layout.block_bytes)} "
            f"a block of {layout.block_tokens} tokens"
        )
        if model.dtype in {"bfloat16", "float16"}:
            yield "         (an engine on a CPU keeps float32: --dtype float32)"
        yield f"speed    {self.speed}"
        yield (
            f"traffic  {self.trace.name}: {shown_count(len(self.trace.requests))} requests, "
            f"{shown_count(self._session_tokens())} tokens each"
        )
        for note in self.trace.notes:
            yield from textwrap.wrap(f"note: {note}", 80, subsequent_indent="  ")
        yield ""
        yield from self._break_even()
        yield ""
        yield from self._curve()
        yield ""
        yield from self._tiers()

    def _break_even(self) -> Iterator[str]:
        needed = break_even_bytes_per_s(self.machine)
        rate = 1 / self.machine.prefill.token_s
        yield (
            f"break-even: computing {shown_count(rate)} tokens/s is as fast as restoring them at "
            f"{shown_bytes(needed)}/s"
        )
        for name, link in self._links():
            ratio = link.read_bytes_per_s / needed
            verdict = "restoring pays" if ratio > 1 else "recomputing is faster"
            yield f"  {name}  {shown_bytes(link.read_bytes_per_s):>9}/s  {ratio:>5.1f}x  {verdict}"

    def _curve(self) -> Iterator[str]:
        bent = bend(self.curve)
        yield "      size     blocks    tokens   hits  seconds  best in hindsight"
        for point in self.curve:
            size = shown_bytes(point.num_blocks * self.block_bytes)
            mark = "  <- the curve bends" if point is bent else ""
            yield (
                f"{size:>10}{point.num_blocks:>11,}"
                f"{self._tokens(point.num_blocks):>10}{point.hit_ratio:>7.3f}"
                f"{point.saved_share:>9.3f}{point.best_ratio:>8.3f}{mark}"
            )

    def _tiers(self) -> Iterator[str]:
        expected, session = self.sizes.expected, max(1.0, self._session_tokens())
        yield "tier       capacity    tokens   sessions"
        for name, blocks in (("cpu", self.sizes.cpu_blocks), ("ssd", self.sizes.ssd_blocks)):
            tokens = blocks * self.trace.block_tokens
            yield (
                f"{name:<8}{shown_bytes(blocks * self.block_bytes):>11}{self._tokens(blocks):>10}"
                f"{shown_count(tokens / session):>11}"
            )
        yield (
            f"expected: {expected.hit_ratio:.1%} of the prompts' tokens from tiers, "
            f"{expected.saved_share:.1%} of the seconds saved"
        )
        if not self.sizes.is_reached:
            best = self.curve[-1]
            yield (
                f"the target is out of reach: the largest size has {best.hit_ratio:.1%}, and "
                f"perfect foresight would have {best.best_ratio:.1%}"
            )

    def document(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return {
            "model": {
                "name": self.dimensions.name,
                "token_bytes": self.dimensions.token_bytes,
                "block_bytes": self.block_bytes,
                "block_tokens": self.trace.block_tokens,
            },
            "traffic": {
                "name": self.trace.name,
                "requests": len(self.trace.requests),
                "tokens_per_request": round(self._session_tokens(), 1),
                "notes": list(self.trace.notes),
            },
            "break_even_bytes_per_s": round(break_even_bytes_per_s(self.machine)),
            "links_bytes_per_s": {name: link.read_bytes_per_s for name, link in self._links()},
            "curve": [
                {
                    "blocks": point.num_blocks,
                    "bytes": point.num_blocks * self.block_bytes,
                    "hit_ratio": round(point.hit_ratio, 5),
                    "saved_share": round(point.saved_share, 5),
                    "best_ratio": round(point.best_ratio, 5),
                }
                for point in self.curve
            ],
            "bend_blocks": bend(self.curve).num_blocks,
            "cpu_blocks": self.sizes.cpu_blocks,
            "ssd_blocks": self.sizes.ssd_blocks,
            "reached": self.sizes.is_reached,
        }

    def config(self) -> str:
        """Return the configuration to begin with, which ``kvtier serve`` takes."""
        slab_bytes = max(64 * _MIB, self.block_bytes)
        # Stores that are under way hold a part of the arena: below this not even one block fits.
        cpu_bytes = max(self.sizes.cpu_blocks, 8) * self.block_bytes
        cpu_bytes = math.ceil(cpu_bytes / slab_bytes) * slab_bytes
        ssd_bytes = self.sizes.ssd_blocks * (self.block_bytes + 4096)
        segment_bytes = max(256 * _MIB, -(-4 * self.block_bytes // _MIB) * _MIB)
        pays = self.machine.ssd.read_bytes_per_s > break_even_bytes_per_s(self.machine)
        values = {
            "cpu.capacity": format_size(cpu_bytes),
            "cpu.slab": format_size(slab_bytes),
            "ssd.enabled": "false" if not ssd_bytes or not pays else "true",
            "policy.eviction": _POLICY,
            "engine.block_tokens": str(self.trace.block_tokens),
        }
        if values["ssd.enabled"] == "true":
            rounded = math.ceil(max(ssd_bytes, 2 * segment_bytes) / _GIB) * _GIB
            values["ssd.capacity"] = format_size(rounded)
            values["ssd.segment"] = format_size(segment_bytes)
        load_config(None, values, {})  # whatever is said here must be accepted there
        return _toml(values)

    def _links(self) -> Iterator[tuple[str, Link]]:
        yield "cpu", self.machine.cpu
        yield "ssd", self.machine.ssd

    def _session_tokens(self) -> float:
        return self.trace.num_tokens / max(1, len(self.trace.requests))

    def _tokens(self, num_blocks: int) -> str:
        tokens = num_blocks * self.trace.block_tokens
        return f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,}"


def _toml(values: dict[str, str]) -> str:
    lines: list[str] = []
    section = ""
    for key in sorted(values):
        here, name = key.split(".")
        if here != section:
            lines += ["", f"[{here}]"] if lines else [f"[{here}]"]
            section = here
        value = values[key]
        is_bare = value in {"true", "false"} or value.isdecimal()
        lines.append(f"{name} = {value}" if is_bare else f'{name} = "{value}"')
    return "\n".join(lines) + "\n"


def _check_ranges(options: argparse.Namespace) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:  # which NaN is not either
            option = f"--{name.replace('_', '-')}"
            raise StartError(option, f"is {value}", f"give a number from {low} to {high}")


def _dimensions(options: argparse.Namespace) -> Dimensions:
    given = (options.model_layers, options.kv_heads, options.head_dim)
    if options.model is not None and given != (None, None, None):
        raise StartError("model", "is given twice", "give MODEL, or its numbers")
    if options.model is not None:
        dimensions = read_dimensions(options.model, options.dtype or "")
    elif None in given:
        raise StartError(
            "model", "is not given", "give MODEL, or --model-layers, --kv-heads and --head-dim"
        )
    else:
        dimensions = Dimensions("as given", *given, dtype=options.dtype or "bfloat16")
    if dimensions.token_bytes > _TOKEN_BYTES_MAX:
        size = shown_bytes(dimensions.token_bytes)
        raise StartError("model", f"has {size} of KV a token", "look at its numbers")
    return dimensions


def _speed(options: argparse.Namespace, dimensions: Dimensions) -> str:
    """Say whose speed the plan is for, since break-even hangs on it."""
    if options.prefill_profile is not None:
        return f"as {options.prefill_profile.name} says"
    if options.machine is not None:
        return f"as {options.machine.name} says"
    if dimensions.flops_per_token:
        return "an A100's, scaled by the model's operations (--machine: your own)"
    return "an A100's with an 8B model (--machine: your own)"


def _traffic(options: argparse.Namespace) -> Trace:
    if options.trace is not None and (options.sessions or options.prompt_tokens):
        raise StartError("traffic", "is given twice", "give --trace, or --sessions and the like")
    if options.trace is not None:
        return trace_of(options)
    if options.sessions is None or options.prompt_tokens is None:
        raise StartError(
            "traffic", "is not given", "give --trace, or --sessions and --prompt-tokens"
        )
    trace = Traffic(
        sessions=options.sessions,
        prompt_tokens=options.prompt_tokens,
        turn_tokens=options.turn_tokens or max(1, options.prompt_tokens // 4),
        turns=options.turns,
        gap_s=options.gap,
        shared_tokens=options.shared_tokens,
        block_tokens=options.block_tokens or 64,
    ).trace()
    if not trace.requests:
        raise StartError("traffic", "has no request within an hour", "lower --gap")
    if not trace.num_distinct:
        raise StartError("traffic", "fills no block", "lower --block-tokens")
    return trace


def _target(text: str) -> Target:
    """Read a target; argparse refuses what raises ArgumentTypeError."""
    what, _, value = text.partition("=")
    try:
        if what == "memory":
            return Target(memory_bytes=parse_size(value))
        share = float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if what not in {"hits", "seconds"} or not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is none of hits=, seconds= (0 to 1), memory=")
    return Target(hit_ratio=share) if what == "hits" else Target(saved_share=share)
