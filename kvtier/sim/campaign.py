"""Runs many seeds on several processes. Runs share nothing, since each depends only on its seed."""

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvtier.sim.simulation import Simulation, SimulationReport

__all__ = ["Failure", "replay_command", "run_seed", "run_seeds", "summarize"]

_SEEDS_AT_ONCE = 8
"""Seeds handed to a process together: a run takes a fifth of a second, a message far less."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed seed."""

    seed: int
    trace: str


def run_seed(seed: int, num_events: int) -> SimulationReport | Failure:
    """Run one seed; any exception is returned as a failure."""
    try:
        return Simulation(seed).run(num_events)
    except Exception:
        return Failure(seed, traceback.format_exc())


def run_seeds(
    seeds: Iterable[int], num_events: int, num_jobs: int
) -> Iterator[SimulationReport | Failure]:
    """Run seeds on ``num_jobs`` processes and yield their results in order."""
    run = partial(run_seed, num_events=num_events)
    if num_jobs == 1:
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        yield from pool.map(run, seeds, chunksize=_SEEDS_AT_ONCE)


def replay_command(seed: int, num_events: int) -> str:
    """Return the command that runs one seed again."""
    return f"python -m kvtier.sim --first {seed} --seeds 1 --events {num_events}"


def summarize(reports: Iterable[SimulationReport]) -> str:
    """Return a summary of runs in words."""
    reports = list(reports)
    served, ends, faults = Counter[str](), Counter[str](), Counter[str]()
    plans = Counter[str]()
    for report in reports:
        served.update(report.counters.served)
        ends.update(report.counters.ends)
        plans.update(report.counters.plans)
        faults.update(report.faults)
    num_events = sum(report.num_events for report in reports)
    simulated_s = sum(report.simulated_s for report in reports)
    return (
        f"{len(reports)} seeds, {num_events} events, {simulated_s:.0f} s simulated\n"
        f"blocks served, each as it was stored: {_counts(served)}\n"
        f"loads by their end: {_counts(ends)}\n"
        f"plans by their reason: {_counts(plans)}\n"
        f"what went wrong: {_counts(faults)}"
    )


def _counts(numbers: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items()))
