"""``python -m kvtier.sim``: runs the node under many seeds, and prints how to repeat a failure."""

import argparse
import sys
import time

from kvtier.sim.campaign import Failure, replay_command, run_seeds, summarize
from kvtier.sim.simulation import SimulationReport

__all__ = ["main"]


def main() -> int:
    """Run seeds on several processes; exit with 1 at the first failure."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--events", type=int, default=200, help="events of the node in one run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    start_s = time.monotonic()
    reports: list[SimulationReport] = []
    seeds = range(options.first, options.first + options.seeds)
    for outcome in run_seeds(seeds, options.events, options.jobs):
        if isinstance(outcome, Failure):
            _say(outcome.trace)
            _say(f"seed {outcome.seed} fails; replay it with")
            _say(f"  {replay_command(outcome.seed, options.events)}")
            return 1
        reports.append(outcome)
    _say(summarize(reports))
    _say(f"took {time.monotonic() - start_s:.0f} s")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
