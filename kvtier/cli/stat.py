"""``kvtier stat``: what the daemon holds and has done."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from kvtier.cli.call import add_socket_options, ask, socket_of
from kvtier.cli.options import seconds
from kvtier.cli.shown import plain
from kvtier.cli.stat_text import secret_lines, stat_text
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_TIMEOUT_S = 1.0
"""With the time it takes to start, within the two seconds that a script may wait for an answer."""

_TROUBLED = frozenset({"degraded", "out"})
"""States that nobody asked for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_socket_options(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument(
        "--check",
        action="store_true",
        help="print only what is wrong, a line each, and exit with 1 if anything is",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=2.0,
        metavar="SECONDS",
        help="print again every SECONDS (2)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the status once, or again and again until interrupted."""
    target = socket_of(options)
    while True:
        told = ask(target, lambda stub: stub.Stat(pb.StatRequest(), timeout=_TIMEOUT_S).json)
        code = _print(told, options)
        if not options.watch:
            return code
        time.sleep(options.watch)


def _print(told: str, options: argparse.Namespace) -> int:
    """Print what is wanted of a document; returns the exit code for it."""
    if options.check:
        wrong = _wrong(json.loads(told))
        for line in wrong:
            print(line, flush=True)
        return 1 if wrong else 0
    if options.watch and not options.json and sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    print(told if options.json else stat_text(json.loads(told)), flush=True)
    return 0


def _wrong(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each tier that is not as it was configured, and each secret's fault."""
    tiers = [
        plain(f"{name} is {tier['state']}: {tier['reason']}")
        for name, tier in document["tiers"].items()
        if tier["state"] in _TROUBLED
    ]
    return [*tiers, *secret_lines(document["config"])]
