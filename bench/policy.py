"""Compare hit ratios of the eviction policies on real traces with targets.

    KVTIER_TRACES=DIRECTORY python bench/policy.py [--only PART …] [--jobs N] [--json]

The directory, or one below it, contains Mooncake's ``conversation_trace.jsonl`` and, optionally,
``lmcache_agent_trace.jsonl`` for the comparison on agents, plain or .xz; without them nothing is
measured. Ratios are tokens of leading resident blocks over tokens of prompts, in full blocks, by
instant replay. Prints pass or fail for each target; exits with 1 if one is missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.sim.replay.results import ReplayRun
from kvtier.sim.replay.setup import ReplaySetup, with_hints
from kvtier.sim.replay.study import run_study
from kvtier.sim.replay.trace import Trace, optimal_hits
from kvtier.sim.replay.trace_reader import ReadOptions, read_trace
from kvtier.sim.replay.traffic import with_cycle, with_noise

SIZES = (1_000, 2_000, 4_000, 6_000, 10_000, 20_000, 40_000)
POLICIES = tuple(EVICTION_POLICIES)

LRU_MEASURES = {2_000: 0.058, 4_000: 0.093, 6_000: 0.150, 10_000: 0.225, 20_000: 0.313}
"""Hit ratios of LRU in the second half that this harness must reproduce to be trusted."""
BEST_MEASURES = {1_000: 0.199, 4_000: 0.344, 10_000: 0.401}
MUST = {1_000: 0.052, 2_000: 0.085, 4_000: 0.150, 6_000: 0.180, 10_000: 0.228, 20_000: 0.315}
RD_SECOND = {1_000: 0.082, 2_000: 0.110, 4_000: 0.163, 6_000: 0.197, 10_000: 0.248, 20_000: 0.320}
RD_WHOLE = {1_000: 0.078, 2_000: 0.105, 4_000: 0.151, 6_000: 0.184, 10_000: 0.233, 20_000: 0.303}
HINTED = {1_000: 0.100, 4_000: 0.230, 10_000: 0.320}
REGRET = 0.005


@dataclass
class Board:
    """Results of checks and measurements."""

    failed: list[str] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    def check(self, name: str, value: float, least: float) -> None:
        self._line(name, value, f">= {least:.3f}", is_met=value >= least)

    def check_most(self, name: str, value: float, most: float) -> None:
        self._line(name, value, f"<= {most:.3f}", is_met=value <= most)

    def check_near(self, name: str, value: float, wanted: float, apart: float) -> None:
        is_near = abs(value - wanted) <= apart
        self._line(name, value, f"{wanted:.3f} +- {apart:.3f}", is_met=is_near)

    def _line(self, name: str, value: float, wanted: str, *, is_met: bool) -> None:
        self.figures[name] = round(value, 4)
        if not is_met:
            self.failed.append(name)
        say(f"{'ok  ' if is_met else 'FAIL'}  {name:<50}{value:>9.4f}  {wanted}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    def __init__(self, traces: Mapping[str, Trace], jobs: int, sizes: Sequence[int]) -> None:
        self.board = Board()
        self._traces = traces
        self._jobs = jobs
        self._sizes = sizes

    def conversation(self) -> None:
        """Hits by size and policy on the conversation trace, after a check of the harness."""
        trace = self._traces["conversation"]
        for size in (each for each in self._sizes if each in BEST_MEASURES):
            hits, half_ns = optimal_hits(trace, size), trace.requests[-1].at_ns / 2
            pairs = zip(trace.requests, hits, strict=True)
            late = [(r.num_tokens, count) for r, count in pairs if r.at_ns >= half_ns]
            ratio = sum(c for _, c in late) * trace.block_tokens / sum(n for n, _ in late)
            self.board.check_near(f"best in hindsight {size}", ratio, BEST_MEASURES[size], 0.001)
        runs = self._runs(trace, [(p, size, 0, {}) for p in POLICIES for size in self._sizes])
        self._table(runs)
        late = {(r.policy, r.cpu_blocks): r.second_half.ratio() for r in runs}
        whole = {(r.policy, r.cpu_blocks): r.whole.ratio() for r in runs}
        for size in self._sizes:
            if size in LRU_MEASURES:
                self.board.check_near(f"lru {size}", late["lru", size], LRU_MEASURES[size], 0.001)
        for size in (each for each in self._sizes if each in MUST):
            self.board.check(f"credit-lru {size}", late["credit-lru", size], MUST[size])
            for policy in ("rd", "rd-sec"):
                self.board.check(f"{policy} {size} must", late[policy, size], MUST[size])
            self.board.check(f"rd {size}, second half", late["rd", size], RD_SECOND[size])
            self.board.check(f"rd {size}, whole trace", whole["rd", size], RD_WHOLE[size])
        self._no_regret("conversation", runs)
        for run in runs:
            if run.policy in {"rd", "rd-sec"}:
                name = f"{run.policy} {run.cpu_blocks} lookup"
                self.board.check_most(f"{name}, mean ms", run.decision.mean_s * 1e3, 1.0)
                self.board.check_most(f"{name}, p99.9 ms", run.decision_p999_s * 1e3, 5.0)

    def agents(self) -> None:
        """No regret on the agents' trace, which differs from the conversation in every respect."""
        trace = self._traces.get("agents")
        if trace is None:
            say("skipped: no trace of agents")
            return
        sizes = (250, 500, 1_000, 2_000, 4_000)
        plans = [(p, size, 0, {}) for p in ("rd", "rd-sec", "lru") for size in sizes]
        runs = self._runs(trace, plans)
        self._table(runs)
        self._no_regret("agents", runs)

    def stress(self) -> None:
        """Noise without reuse, and a cyclic reader, at 4,000 blocks."""
        conversation = self._traces["conversation"]
        mixed = {
            "half noise": with_noise(conversation),
            "reader in circles": with_cycle(conversation, num_documents=300, num_blocks=20),
        }
        for name, trace in mixed.items():
            lru, rd = self._runs(trace, [("lru", 4_000, 0, {}), ("rd", 4_000, 0, {})])
            ratio = rd.second_half.ratio() / max(1e-9, lru.second_half.ratio())
            self.board.check(f"rd over lru with {name}", ratio, 2.0)

    def hints(self) -> None:
        """The value of client hints that are right nine times in ten."""
        trace = with_hints(self._traces["conversation"], 0.9)
        sizes = [size for size in self._sizes if size in HINTED]
        for run in self._runs(trace, [("rd", size, 0, {}) for size in sizes]):
            size = run.cpu_blocks
            self.board.check(f"rd {size}, hints right 90 %", run.second_half.ratio(), HINTED[size])

    def ssd(self) -> None:
        """Bytes written to the SSD, and their value, with a CPU tier of 4,000 blocks."""
        trace = self._traces["conversation"]
        ranked = {"ssd.eviction": "rd"}
        rules: Sequence[tuple[str, str, dict[str, str]]] = (
            ("lru+lru, write-through", "lru", {"ssd.write": "store"}),
            ("lru+lru, second use", "lru", {"ssd.write": "second_use"}),
            ("lru+rd, demotion", "lru", {"ssd.gate": "1.0", **ranked}),
            ("lru+rd, gate .75", "lru", {"ssd.gate": "0.75", **ranked}),
            ("lru+rd, gate .5", "lru", {"ssd.gate": "0.5", **ranked}),
            ("rd+rd, demotion", "rd", {"ssd.gate": "1.0"}),
            ("rd+rd, gate .75", "rd", {"ssd.gate": "0.75"}),
            ("rd+rd, gate .5", "rd", {"ssd.gate": "0.5"}),
            ("the default", "rd-sec", {}),
        )
        plans = [
            (policy, 4_000, size, keys) for size in (20_000, 40_000) for _, policy, keys in rules
        ]
        runs = iter(self._runs(trace, plans))
        say(f"{'ssd rule':<24}blocks   hits   from cpu  written    read  written/read  shares")
        for size in (20_000, 40_000):
            by_rule = {name: next(runs) for name, _, _ in rules}
            for name, run in by_rule.items():
                ratio, shares = run.written_per_read, run.gate_shares
                say(
                    f"{name:<22}{size:>8,}{run.whole.ratio():>7.3f}"
                    f"{run.whole.ratio(['cpu']):>11.3f}{run.written_blocks:>9,}"
                    f"{run.read_blocks:>8,}{ratio or 0:>14.2f}  {shares[0]:.2f} {shares[1]:.2f}"
                )
            self._ssd_targets(size, by_rule)

    def _ssd_targets(self, size: int, runs: Mapping[str, ReplayRun]) -> None:
        """Compare policy and gate of the SSD tier with their targets."""
        board, through = self.board, runs["lru+lru, write-through"]
        hits = {name: run.whole.ratio() for name, run in runs.items()}
        written = {name: run.written_blocks / through.written_blocks for name, run in runs.items()}
        if size == 20_000:
            more = hits["lru+rd, demotion"] - through.whole.ratio()
            board.check("4k/20k: demotion, more hits than write-through", more, 0.015)
            more = hits["lru+rd, gate .75"] - through.whole.ratio()
            board.check("4k/20k: gate .75, more hits than write-through", more, 0.010)
            share = written["lru+rd, gate .75"]
            board.check_most("4k/20k: gate .75, writes of its bytes", share, 0.75)
        else:
            share = hits["lru+rd, gate .5"] / through.whole.ratio()
            board.check("4k/40k: gate .5, of write-through's hits", share, 0.82)
            share = written["lru+rd, gate .5"]
            board.check_most("4k/40k: gate .5, writes of its bytes", share, 0.58)
        gated = {name: run for name, run in runs.items() if "gate" in name}
        for name, run in gated.items():
            wanted = 0.75 if name.endswith(".75") else 0.5
            for half, share in zip(("first", "second"), run.gate_shares, strict=True):
                what = f"4k/{size // 1000}k: {name}, share in the {half} half"
                board.check_near(what, share, wanted, 0.1 * wanted)

    def _no_regret(self, name: str, runs: Sequence[ReplayRun]) -> None:
        by_key = {(run.policy, run.cpu_blocks): run for run in runs}
        for (policy, size), run in by_key.items():
            lru = by_key["lru", size]
            if policy == "rd":
                more = run.whole.ratio() - lru.whole.ratio()
                self.board.check(f"{name}: rd {size}, hits over lru", more, -REGRET)
            elif policy == "rd-sec":
                more = run.whole.saved_share - lru.whole.saved_share
                self.board.check(f"{name}: rd-sec {size}, seconds over lru", more, -REGRET)

    def _runs(
        self, trace: Trace, plans: Sequence[tuple[str, int, int, Mapping[str, str]]]
    ) -> list[ReplayRun]:
        setups = [
            ReplaySetup(
                policy=policy, cpu_blocks=cpu, ssd_blocks=ssd, is_instant=True, overrides=keys
            )
            for policy, cpu, ssd, keys in plans
        ]

        def note(count: int, run: ReplayRun) -> None:
            say(f"      {trace.name}: {run.policy} {run.cpu_blocks}, {count} of {len(setups)}")

        return [*run_study(trace, setups, self._jobs, note).runs]

    def _table(self, runs: Sequence[ReplayRun]) -> None:
        sizes = sorted({run.cpu_blocks for run in runs})
        for title, part in (("hits, second half", "hits"), ("seconds, second half", "seconds")):
            say(f"{title:<22}" + "".join(f"{size:>8,}" for size in sizes))
            for policy in dict.fromkeys(run.policy for run in runs):
                own = [run for run in runs if run.policy == policy]
                values = [
                    r.second_half.ratio() if part == "hits" else r.second_half.saved_share
                    for r in sorted(own, key=lambda run: run.cpu_blocks)
                ]
                say(f"{policy:<22}" + "".join(f"{value:>8.3f}" for value in values))
                self.board.figures[f"{own[0].policy} {title}"] = [round(v, 4) for v in values]


def find_traces(directory: Path) -> Iterator[tuple[str, Trace]]:
    names = {"conversation": "conversation_trace.jsonl", "agents": "lmcache_agent_trace.jsonl"}
    for name, file in names.items():
        for path in sorted([*directory.rglob(file), *directory.rglob(f"{file}.xz")])[:1]:
            yield name, read_trace(path, ReadOptions())


def main() -> int:
    parts = ("conversation", "agents", "stress", "hints", "ssd")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", action="append", choices=parts, help="run only this part; may be repeated"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="sizes of the CPU tier in blocks"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    directory = os.environ.get("KVTIER_TRACES")
    traces = dict(find_traces(Path(directory))) if directory else {}
    if "conversation" not in traces:
        say("nothing is measured: KVTIER_TRACES names no directory with conversation_trace.jsonl")
        return 0
    bench = Bench(traces, options.jobs, options.sizes)
    for part in options.only or parts:
        say(f"== {part}")
        getattr(bench, part)()
    say(f"{len(bench.board.failed)} failed" + "".join(f"\n  {n}" for n in bench.board.failed))
    if options.json:
        print(json.dumps(bench.board.figures | {"failed": bench.board.failed}))
    return int(bool(bench.board.failed))


if __name__ == "__main__":
    sys.exit(main())
