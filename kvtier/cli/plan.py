"""``kvtier plan``: the size of the tiers for a model and its traffic, and the file for it."""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from kvtier.cli.files import check_file, write_file
from kvtier.cli.formatting import format_bytes
from kvtier.cli.plan_text import POLICY, SizingPlan
from kvtier.cli.replay import (
    add_machine_options,
    add_trace_options,
    machine_from,
    parse_override,
    trace_from,
)
from kvtier.config.units import parse_size
from kvtier.core.slots import slot_bytes
from kvtier.errors import StartError
from kvtier.sim.replay.prefill import DTYPE_BYTES, Dimensions, read_dimensions
from kvtier.sim.replay.setup import CPU_BLOCKS_MIN, Machine, ReplaySetup
from kvtier.sim.replay.sizing import Point, Target, curve_of, sizes_for
from kvtier.sim.replay.study import default_sizes, run_study
from kvtier.sim.replay.trace import Trace
from kvtier.sim.replay.traffic import Traffic

__all__ = ["add_options", "run"]

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
    machine = machine_from(options)
    prefill = machine.prefill_model
    if options.machine is None and options.prefill_profile is None:
        prefill = dimensions.prefill(prefill)
    machine = machine.with_prefill(prefill).model_copy(
        update={"token_bytes": dimensions.token_bytes}
    )
    trace = _traffic(options)
    layout = dimensions.layout(trace.block_tokens)
    block_bytes = slot_bytes(layout.block_bytes)
    curve = _replayed(options, machine, trace, block_bytes)
    sizes = sizes_for(curve, options.target, block_bytes)
    speed = _speed(options, dimensions)
    plan = SizingPlan(dimensions, machine, trace, block_bytes, speed, curve, sizes)
    text = plan.config()
    if options.write is not None:
        write_file("--write", options.write, text)
    if options.json:
        print(json.dumps(plan.document() | {"config": text}))
    else:
        print("\n".join(plan.lines()))
        print(f"\nwritten to {options.write}" if options.write else f"\n{text}", end="")
    return int(not sizes.is_reached)


def _replayed(
    options: argparse.Namespace, machine: Machine, trace: Trace, block_bytes: int
) -> list[Point]:
    """Replay the traffic over a sweep of sizes."""
    sizes = set(default_sizes(trace))
    if options.target.memory_bytes is not None:
        sizes.add(max(CPU_BLOCKS_MIN, options.target.memory_bytes // block_bytes))
    setups = [
        ReplaySetup(
            policy=POLICY,
            cpu_blocks=size,
            is_instant=True,
            machine=machine,
            config=options.config,
            overrides=dict(map(parse_override, options.set)),
        )
        for size in sorted(sizes)
    ]
    return curve_of(run_study(trace, setups, options.jobs or os.cpu_count() or 1))


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
        size = format_bytes(dimensions.token_bytes)
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
        return trace_from(options)
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
