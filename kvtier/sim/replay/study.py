"""A study: one trace under several policies and sizes, compared with the optimum."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from kvtier.errors import StartError
from kvtier.sim.replay.instant import replay_instant
from kvtier.sim.replay.results import ReplayRun
from kvtier.sim.replay.setup import CPU_BLOCKS_MIN, ReplaySetup
from kvtier.sim.replay.timed import replay_timed
from kvtier.sim.replay.trace import Trace, TraceRequest, optimal_hits

__all__ = ["Bound", "Study", "default_sizes", "run_study"]

_DOCUMENT_VERSION = 1
"""Version of the JSON document; raised if a field changes its meaning or is removed."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Hits of the optimal policy with this many blocks."""

    num_blocks: int
    ratio: float
    second_half: float

    @classmethod
    def of(cls, trace: Trace, num_blocks: int) -> "Bound":
        """Compute the bound; a few seconds for a hundred thousand requests."""
        hits = optimal_hits(trace, num_blocks)
        half_ns = trace.requests[-1].at_ns / 2
        pairs = [*zip(trace.requests, hits, strict=True)]
        late = [pair for pair in pairs if pair[0].at_ns >= half_ns]

        def ratio(part: Sequence[tuple[TraceRequest, int]]) -> float:
            num_tokens = sum(request.num_tokens for request, _ in part)
            return trace.block_tokens * sum(count for _, count in part) / max(1, num_tokens)

        return cls(num_blocks, ratio(pairs), ratio(late))


@dataclass(frozen=True, slots=True)
class Study:
    """The results, in the order requested."""

    trace: Mapping[str, Any]
    is_instant: bool
    bounds: tuple[Bound, ...]
    runs: tuple[ReplayRun, ...]

    def bound(self, num_blocks: int) -> Bound:
        """Return the bound for a size."""
        return next(each for each in self.bounds if each.num_blocks == num_blocks)

    def document(self) -> dict[str, Any]:
        """Return the study for JSON; see docs/replay.md."""
        return {
            "version": _DOCUMENT_VERSION,
            "trace": dict(self.trace),
            "instant": self.is_instant,
            "bounds": [
                {
                    "blocks": each.num_blocks,
                    "hit_ratio": round(each.ratio, 5),
                    "second_half": round(each.second_half, 5),
                }
                for each in self.bounds
            ],
            "runs": [run.document() for run in self.runs],
        }


def default_sizes(trace: Trace) -> list[int]:
    """Return sizes that cover the trace: three per decade, up to all of its blocks."""
    largest = max(CPU_BLOCKS_MIN, trace.num_distinct)
    steps = (1, 2, 5)
    sizes = [step * 10**power for power in range(3, 9) for step in steps]
    fitting = [size for size in sizes if size <= largest and size >= largest / 200]
    return fitting[-6:] or [largest]


def run_study(
    trace: Trace,
    setups: Sequence[ReplaySetup],
    num_jobs: int,
    on_progress: Callable[[int, ReplayRun], None] = lambda _count, _run: None,
) -> Study:
    """Replay a trace under each setup on several processes; calls back after each one."""
    runs: list[ReplayRun] = []
    for run in _runs(trace, setups, num_jobs):
        runs.append(run)
        on_progress(len(runs), run)
    sizes = sorted({setup.cpu_blocks + setup.ssd_blocks for setup in setups})
    return Study(
        trace=_summary(trace),
        is_instant=all(setup.is_instant for setup in setups),
        bounds=tuple(Bound.of(trace, size) for size in sizes),
        runs=tuple(runs),
    )


def _summary(trace: Trace) -> dict[str, Any]:
    """Return a description of the trace for JSON."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "seconds": round(trace.seconds, 3),
        "tokens": trace.num_tokens,
        "block_tokens": trace.block_tokens,
        "distinct_blocks": trace.num_distinct,
        "longest_blocks": trace.num_blocks_max,
        "notes": list(trace.notes),
    }


def _runs(trace: Trace, setups: Sequence[ReplaySetup], num_jobs: int) -> Iterator[ReplayRun]:
    if num_jobs == 1 or len(setups) == 1:
        yield from (_replay(trace, setup) for setup in setups)
        return
    context = multiprocessing.get_context("spawn")
    num_workers = min(num_jobs, len(setups))
    with ProcessPoolExecutor(num_workers, context, _follow_parent) as pool:
        try:
            yield from pool.map(partial(_replay, trace), setups)
        except BrokenProcessPool:
            raise StartError(
                "--jobs", "a run was killed, perhaps for lack of memory", "use fewer"
            ) from None
        except BaseException:
            # The other results of an interrupted study are useless, and a run takes minutes.
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


def _follow_parent() -> None:
    """Let this process end with its parent, and ignore signals meant for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers follow a parent"

    def wait(parent: BaseProcess = parent) -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="kvtier-parent", daemon=True).start()


def _replay(trace: Trace, setup: ReplaySetup) -> ReplayRun:
    """Replay a trace once."""
    return replay_instant(trace, setup) if setup.is_instant else replay_timed(trace, setup)
