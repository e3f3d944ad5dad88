"""``python -m kvtier.sim``: run the node under many seeds; one that fails says how to repeat it."""

import argparse
import sys
import time
import traceback

from kvtier.sim.simulation import Report, Simulation

__all__ = ["main"]


def main() -> int:
    """Run seeds one after the other; exit 1 at the first that fails."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--events", type=int, default=600, help="events of the node in one run")
    options = parser.parse_args()
    start_s = time.monotonic()
    reports: list[Report] = []
    for seed in range(options.first, options.first + options.seeds):
        try:
            reports.append(Simulation(seed).run(options.events))
        except Exception:
            traceback.print_exc()
            _say(f"seed {seed} fails; replay it with")
            _say(f"  python -m kvtier.sim --first {seed} --seeds 1 --events {options.events}")
            return 1
    _say(_summary(reports, time.monotonic() - start_s))
    return 0


def _summary(reports: list[Report], elapsed_s: float) -> str:
    served: dict[str, int] = {}
    ends: dict[str, int] = {}
    for report in reports:
        for total, part in ((served, report.tally.served), (ends, report.tally.ends)):
            for name, number in part.items():
                total[name] = total.get(name, 0) + number
    num_events = sum(report.num_events for report in reports)
    simulated_s = sum(report.simulated_s for report in reports)
    crashes = sum(report.num_crashes for report in reports)
    return (
        f"{len(reports)} seeds, {num_events} events, {simulated_s:.0f} s simulated in"
        f" {elapsed_s:.1f} s, {crashes} crashes of the node\n"
        f"blocks served, each as it was stored: {_counts(served)}\n"
        f"loads by their end: {_counts(ends)}"
    )


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items()))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
