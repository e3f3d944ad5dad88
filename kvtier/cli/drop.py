"""``kvtier drop``: empty tiers, and say what was removed."""

import argparse
import json
from pathlib import Path
from typing import Any

from kvtier.cli.call import add_socket_options, ask, socket_of
from kvtier.cli.options import seconds
from kvtier.cli.shown import shown_bytes
from kvtier.client.wire import tier_from_wire, tier_to_wire
from kvtier.core.residency import TierName
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_parser", "run"]

_MARGIN_S = 2.0


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("drop", help="empty tiers")
    add_socket_options(parser)
    parser.add_argument(
        "--tier",
        action="append",
        required=True,
        choices=[*TierName, "all"],
        help="tier to empty; may be repeated",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="SECONDS", help="how long to wait"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Empty the tiers; exit code 1 where one could not be emptied."""
    path = socket_of(options)
    names = _tiers_here(path) if "all" in options.tier else map(TierName, options.tier)
    request = pb.DropRequest(
        tiers=map(tier_to_wire, names), deadline_ms=int(options.timeout * 1000)
    )
    timeout_s = options.timeout + _MARGIN_S
    reply = ask(path, lambda stub: stub.Drop(request, timeout=timeout_s))
    results = [
        {
            "tier": tier_from_wire(removed.tier).value,
            "blocks": removed.blocks,
            "bytes": removed.bytes,
            "kept_blocks": removed.kept_blocks,
            "error": removed.error,
        }
        for removed in reply.removed
    ]
    if options.json:
        print(json.dumps({"removed": results}))
    else:
        for result in results:
            print(_line(result))
    return int(any(result["error"] or result["kept_blocks"] for result in results))


def _tiers_here(path: Path) -> list[TierName]:
    """Return the tiers that the daemon has; the GPU tier is its engines'."""
    reply = ask(path, lambda stub: stub.Stat(pb.StatRequest(), timeout=_MARGIN_S))
    tiers = json.loads(reply.json)["tiers"]
    return [name for name in TierName if name is TierName.GPU or tiers[name]["state"] != "off"]


def _line(result: dict[str, Any]) -> str:
    line = f"{result['tier']:<7} removed {result['blocks']} blocks, {shown_bytes(result['bytes'])}"
    if result["kept_blocks"]:
        line += f"; kept {result['kept_blocks']} in use"
    return line + (f"; {result['error']}" if result["error"] else "")
