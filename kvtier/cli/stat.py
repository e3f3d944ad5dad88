"""``kvtier stat``: what the daemon holds and has done."""

import argparse
import json
import sys
import time
from typing import Any

from kvtier.cli.call import add_socket_options, ask, socket_of
from kvtier.cli.options import seconds
from kvtier.cli.stat_text import stat_text
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_parser", "run"]

_TIMEOUT_S = 1.0
"""With the time it takes to start, within the two seconds that a script may wait for an answer."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("stat", help="show what the daemon holds and has done")
    add_socket_options(parser)
    parser.add_argument("--json", action="store_true", help="print the document itself")
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
    path = socket_of(options)
    while True:
        reply = ask(path, lambda stub: stub.Stat(pb.StatRequest(), timeout=_TIMEOUT_S))
        if options.watch and not options.json and sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        print(reply.json if options.json else stat_text(json.loads(reply.json)), flush=True)
        if not options.watch:
            return 0
        time.sleep(options.watch)
