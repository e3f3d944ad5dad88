"""``kvtier stat``: what the daemon holds and has done."""

import argparse
import json
import sys
import time
from typing import Any

from kvtier.cli.call import add_socket_options, ask, socket_of
from kvtier.cli.options import seconds
from kvtier.cli.shown import shown_bytes, shown_count, shown_seconds
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_parser", "run", "stat_text"]

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


def stat_text(document: dict[str, Any]) -> str:
    """Return the document as text for 80 columns, without colour."""
    who = f"kvtier {document['version']}, pid {document['pid']}, boot {document['boot']}"
    lines = [
        f"{who}, up {document['uptime_s']:.0f} s",
        "",
        "tier     state         used   capacity     blocks      tokens   hit blocks",
    ]
    hits = document["lookup_blocks"]["hit"]
    for name, tier in document["tiers"].items():
        used = f"{shown_bytes(tier['used_bytes']):>12}{shown_bytes(tier['capacity_bytes']):>11}"
        blocks = shown_count(tier["blocks"])
        # The GPU's hits are the engine's own account, which is in tokens.
        hit = shown_count(hits[name]) if name in hits else f"{shown_count(tier['hit_tokens'])} tok"
        lines.append(
            f"{name:<9}{tier['state']:<6}{used}{blocks:>11}"
            f"{shown_count(tier['tokens']):>12}{hit:>13}"
        )
    lines += ["", f"blocks found nowhere  {shown_count(document['lookup_blocks']['miss'])}"]
    lines += [
        f"not served by {tier}: " + ", ".join(f"{r} {shown_count(n)}" for r, n in reasons.items())
        for tier, reasons in document["miss_reasons"].items()
        if reasons
    ]
    lines.append("")
    lines.append("transfer           bytes   failed    count    average")
    for route, done in document["transfers"].items():
        average = done["seconds"] / done["count"] if done["count"] else 0.0
        lines.append(
            f"{route:<14}{shown_bytes(done['bytes']):>10}{shown_bytes(done['failed_bytes']):>9}"
            f"{shown_count(done['count']):>9}{shown_seconds(average):>11}"
        )
    lines += ["", "engine                          pid  transport    GPU used  loading  storing"]
    for engine in document["engines"]:
        lines.append(
            f"{engine['engine'][:28]:<28}{engine['pid']:>7}  {engine['transport']:<10}"
            f"{shown_bytes(engine['gpu_used_bytes']):>11}{engine['loads']:>9}{engine['stores']:>9}"
        )
    if not document["engines"]:
        lines.append("none")
    lines += ["", f"leases {document['leases']}, pins {document['pins']}"]
    return "\n".join(lines)
