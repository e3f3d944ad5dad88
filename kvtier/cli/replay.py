"""``kvtier replay``: simulates the daemon over a trace, under several policies and sizes.

The daemon's node runs under a simulated clock; no engine, model or disk is needed.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from kvtier.cli.files import check_output, write_output
from kvtier.cli.options import parse_setting
from kvtier.config import Config
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.core.limits import INDEX_ROWS_MAX
from kvtier.core.tier_registry import STORE_TIER
from kvtier.errors import StartError
from kvtier.sim.replay.prefill import fit_profile
from kvtier.sim.replay.report import study_page, study_text
from kvtier.sim.replay.results import ReplayRun
from kvtier.sim.replay.setup import (
    CPU_BLOCKS_MIN,
    Machine,
    ReplaySetup,
    config_of,
    load_machine,
    with_hints,
)
from kvtier.sim.replay.study import default_sizes, run_study
from kvtier.sim.replay.trace import Trace
from kvtier.sim.replay.trace_reader import ReadOptions, read_trace

__all__ = [
    "add_machine_options",
    "add_options",
    "add_trace_options",
    "machine_from",
    "run",
    "trace_from",
]

_BASELINE = "lru"
_COUNT_MAX = 1 << 30
_BLOCK_BYTES_MAX = 1 << 31


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_trace_options(parser)
    add_machine_options(parser)
    parser.add_argument(
        "--policy",
        action="append",
        choices=tuple(EVICTION_POLICIES),
        help="eviction policy; may be repeated (default: the configured one, and lru for "
        "comparison)",
    )
    parser.add_argument(
        "--cpu-blocks",
        action="append",
        type=_blocks,
        metavar="N",
        help="size of the CPU tier in blocks; may be repeated (default: cpu.capacity of --config, "
        "or a range of sizes)",
    )
    parser.add_argument(
        "--ssd-blocks", type=_count, metavar="N", help="size of the SSD tier in blocks; 0: no SSD"
    )
    parser.add_argument(
        "--instant",
        action="store_true",
        help="simulate without delays, to compare the hit ratios of policies",
    )
    parser.add_argument(
        "--hints",
        type=_share,
        metavar="ACCURACY",
        help="add hints whether a conversation continues, with this accuracy (0 to 1)",
    )
    parser.add_argument(
        "--jobs", type=_blocks, metavar="N", help="number of processes (default: one per CPU)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write an HTML report with plots"
    )
    parser.set_defaults(run=run)


def add_trace_options(parser: argparse._ActionsContainer, name: str = "trace") -> None:
    """Add the options for the trace and its format."""
    parser.add_argument(
        name,
        type=Path,
        metavar="TRACE",
        help="trace file: JSONL (Mooncake, Bailian, text or kvtier) or CSV (Azure), plain or .xz",
    )
    parser.add_argument(
        "--block-tokens", type=_blocks, default=0, metavar="T", help="tokens per block"
    )
    parser.add_argument(
        "--hash-tokens", type=_blocks, default=0, metavar="T", help="tokens per hash in the trace"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, for a trace with text"
    )
    parser.add_argument(
        "--requests", type=_blocks, default=0, metavar="N", help="read only the first N requests"
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the configuration and the machine."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file of the daemon (TOML)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one configuration key, such as ssd.gate=0.5; may be repeated",
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="speeds of engine, links and disks (TOML)"
    )
    parser.add_argument(
        "--prefill-profile",
        type=Path,
        metavar="FILE",
        help="fit the engine's speed to a Vidur profile",
    )
    parser.add_argument(
        "--layers",
        type=_blocks,
        default=32,
        metavar="N",
        help="layers of the profiled model (default: 32)",
    )


def run(options: argparse.Namespace) -> int:
    """Replay, and print the results."""
    trace = trace_from(options)
    setups = _setups(options, trace)
    if options.hints is not None:
        trace = with_hints(trace, options.hints)
    if options.report is not None:
        check_output("--report", options.report)
    jobs = options.jobs or os.cpu_count() or 1

    def note(count: int, _run: ReplayRun) -> None:
        if sys.stderr.isatty():
            print(f"{count} of {len(setups)} runs", end="\r", file=sys.stderr)

    study = run_study(trace, setups, jobs, note)
    if options.report is not None:
        write_output("--report", options.report, study_page(study))
    print(json.dumps(study.document()) if options.json else study_text(study))
    return 0


def trace_from(options: argparse.Namespace) -> Trace:
    """Read the trace of a command line. Raises StartError."""
    return read_trace(
        options.trace,
        ReadOptions(
            block_tokens=options.block_tokens,
            hash_tokens=options.hash_tokens,
            tokenizer=options.tokenizer,
            requests_max=options.requests,
        ),
    )


def machine_from(options: argparse.Namespace) -> Machine:
    """Return the machine of a command line. Raises StartError."""
    machine = load_machine(options.machine)
    if options.prefill_profile is None:
        return machine
    return machine.with_prefill(fit_profile(options.prefill_profile, options.layers))


def _setups(options: argparse.Namespace, trace: Trace) -> list[ReplaySetup]:
    """Return the runs: each policy with each size."""
    overrides = dict(map(parse_setting, options.set))
    machine = machine_from(options)
    plain = ReplaySetup(
        policy=overrides.get("policy.eviction", ""),
        cpu_blocks=1,
        is_instant=options.instant,
        machine=machine,
        config=options.config,
        overrides=overrides,
    )
    config = config_of(plain)
    block_bytes = machine.token_bytes * trace.block_tokens
    chosen = options.policy or list(dict.fromkeys([config.policy.eviction, _BASELINE]))
    ssd_blocks = options.ssd_blocks
    if ssd_blocks is None:
        store = config.tiers[STORE_TIER]
        is_given = options.config is not None and store.is_enabled
        ssd_blocks = store.reported_bytes // block_bytes if is_given else 0
    return [
        ReplaySetup(
            policy=policy,
            cpu_blocks=cpu_blocks,
            ssd_blocks=ssd_blocks,
            is_instant=options.instant,
            machine=machine,
            config=options.config,
            overrides=overrides,
        )
        for policy in chosen
        for cpu_blocks in _sizes(options, config, trace, block_bytes)
    ]


def _sizes(
    options: argparse.Namespace, config: Config, trace: Trace, block_bytes: int
) -> list[int]:
    if block_bytes > _BLOCK_BYTES_MAX:
        raise StartError(
            "--block-tokens",
            f"a block of {trace.block_tokens:,} tokens has {block_bytes:,} bytes",
            f"use smaller blocks, of at most {_BLOCK_BYTES_MAX:,} bytes",
        )
    if options.cpu_blocks:
        return [_fitting("--cpu-blocks", count) for count in sorted(set(options.cpu_blocks))]
    if options.config is None:
        return default_sizes(trace)
    return [_fitting("cpu.capacity", config.cpu.capacity_bytes // block_bytes)]


def _fitting(field: str, num_blocks: int) -> int:
    """Return the size of the CPU tier. Raises StartError if a node cannot run with it."""
    if not CPU_BLOCKS_MIN <= num_blocks <= INDEX_ROWS_MAX:
        raise StartError(
            field,
            f"{num_blocks:,} blocks are too few or too many for the CPU tier",
            f"use {CPU_BLOCKS_MIN} to {INDEX_ROWS_MAX:,} blocks",
        )
    return num_blocks


def _blocks(text: str) -> int:
    """Parse a positive integer; argparse reports the ArgumentTypeError."""
    count = int(text) if text.isdecimal() and len(text) <= len(str(_COUNT_MAX)) else 0
    if not 0 < count <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text[:40]!r}")
    return count


def _count(text: str) -> int:
    return 0 if text == "0" else _blocks(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value
