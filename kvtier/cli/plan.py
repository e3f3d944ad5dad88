"""``kvtier plan``: sizes the tiers for a model and its traffic, and writes the configuration."""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from kvtier.cli.files import check_output, write_output
from kvtier.cli.formatting import format_bytes
from kvtier.cli.options import parse_setting
from kvtier.cli.plan_text import POLICY, SizingPlan
from kvtier.cli.replay import (
    add_machine_options,
    add_trace_options,
    machine_from,
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
"""Ranges of the options: beyond any real machine, and still computable."""

_MODEL_OPTIONS: Mapping[str, str] = {
    "--model-layers": "layers",
    "--kv-heads": "KV heads",
    "--head-dim": "head dimension",
}

_TRAFFIC_OPTIONS: Mapping[str, tuple[int | None, str]] = {
    "--sessions": (None, "concurrent sessions, instead of a trace"),
    "--prompt-tokens": (None, "tokens in the first turn"),
    "--turn-tokens": (None, "tokens added by each turn (default: a quarter of the prompt)"),
    "--turns": (5, "turns per session (default: 5)"),
    "--shared-tokens": (0, "tokens shared by every prompt's prefix (default: 0)"),
}

_TOKEN_BYTES_MAX = 2**30
"""Limit for the KV of one token; a block has 64 of them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="model folder with config.json, or GGUF file",
    )
    for name, text in _MODEL_OPTIONS.items():
        model.add_argument(name, type=int, metavar="N", help=f"{text}, instead of MODEL")
    model.add_argument(
        "--dtype", choices=DTYPE_BYTES, help="data type of the KV (default: the model's)"
    )
    traffic = parser.add_argument_group("traffic")
    add_trace_options(traffic, "--trace")
    for name, (default, text) in _TRAFFIC_OPTIONS.items():
        traffic.add_argument(name, type=int, default=default, metavar="N", help=text)
    traffic.add_argument(
        "--gap", type=float, default=120.0, metavar="SECONDS", help="between turns (default: 120)"
    )
    parser.add_argument(
        "--target",
        type=_target,
        default=Target(),
        metavar="WHAT=VALUE",
        help="hits=0.3, seconds=0.3 or memory=256GiB (default: the knee of the curve)",
    )
    add_machine_options(parser)
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of processes (default: one per CPU)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the configuration to FILE"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a plan; exit code 1 if no size reaches the target."""
    if options.write is not None:
        check_output("--write", options.write)
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
        write_output("--write", options.write, text)
    if options.json:
        print(json.dumps(plan.document() | {"config": text}))
    else:
        written = f"configuration written to {options.write}\n"
        print("\n".join(plan.lines()), written if options.write else text, sep="\n\n", end="")
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
            overrides=dict(map(parse_setting, options.set)),
        )
        for size in sorted(sizes)
    ]
    return curve_of(run_study(trace, setups, options.jobs or os.cpu_count() or 1))


def _check_ranges(options: argparse.Namespace) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:  # also false for NaN
            option = f"--{name.replace('_', '-')}"
            raise StartError(option, f"{value} is out of range", f"use {low} to {high}")


def _dimensions(options: argparse.Namespace) -> Dimensions:
    given = (options.model_layers, options.kv_heads, options.head_dim)
    if options.model is not None and given != (None, None, None):
        raise StartError("model", "given twice", "pass either MODEL or its dimensions")
    if options.model is not None:
        dimensions = read_dimensions(options.model, options.dtype or "")
    elif None in given:
        raise StartError(
            "model", "not given", "pass MODEL, or --model-layers, --kv-heads and --head-dim"
        )
    else:
        dimensions = Dimensions("custom", *given, dtype=options.dtype or "bfloat16")
    if dimensions.token_bytes > _TOKEN_BYTES_MAX:
        size = format_bytes(dimensions.token_bytes)
        raise StartError("model", f"{size} of KV per token is too much", "check the dimensions")
    return dimensions


def _speed(options: argparse.Namespace, dimensions: Dimensions) -> str:
    """Return the machine whose speed is assumed, since break-even depends on it."""
    if options.prefill_profile is not None:
        return f"from {options.prefill_profile.name}"
    if options.machine is not None:
        return f"from {options.machine.name}"
    if dimensions.flops_per_token:
        return "A100, scaled by the model's FLOPs (use --machine for yours)"
    return "A100 with an 8B model (use --machine for yours)"


def _traffic(options: argparse.Namespace) -> Trace:
    if options.trace is not None and (options.sessions or options.prompt_tokens):
        raise StartError("traffic", "given twice", "pass either --trace, or --sessions and so on")
    if options.trace is not None:
        return trace_from(options)
    if options.sessions is None or options.prompt_tokens is None:
        raise StartError("traffic", "not given", "pass --trace, or --sessions and --prompt-tokens")
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
        raise StartError("traffic", "no request within an hour", "use a shorter --gap")
    if not trace.num_distinct:
        raise StartError("traffic", "prompts are shorter than one block", "lower --block-tokens")
    return trace


def _target(text: str) -> Target:
    """Parse a target; argparse reports the ArgumentTypeError."""
    what, _, value = text.partition("=")
    try:
        if what == "memory":
            return Target(memory_bytes=parse_size(value))
        share = float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if what not in {"hits", "seconds"} or not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"expected hits=SHARE or seconds=SHARE (0 to 1), or memory=SIZE; got {text!r}"
        )
    return Target(hit_ratio=share) if what == "hits" else Target(saved_share=share)
