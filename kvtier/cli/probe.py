"""``kvtier probe``: measures the transfer speed of each tier now."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import (
    format_bytes,
    format_row,
    format_seconds,
    join_parts,
    wrap_lines,
)
from kvtier.core.residency import TierName
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

__all__ = ["add_options", "probe_text", "run"]

_TIMEOUT_S = 180.0
"""Reads of requests go first, and the reads of each size may wait for them."""

_COLUMNS = (10, 10, 11, 11, 11, 11, 11)
_HEADS = ("block", "parallel", "write", "per block", "read", "per block", "modeled")

_Document = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        choices=[tier.value for tier in TierName],
        help="tier to measure; may be repeated (default: all below the CPU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if nothing could be measured."""
    request = pb.ProbeRequest(tiers=[tier_to_wire(TierName(each)) for each in options.tier])
    target = target_from(options)
    reply = call_daemon(target, lambda stub: stub.Probe(request, timeout=_TIMEOUT_S))
    document = json.loads(reply.json)
    print(reply.json if options.json else probe_text(document))
    tiers = document["tiers"].values()
    return int(not any(tier["rounds"] and not tier.get("is_kept") for tier in tiers))


def probe_text(document: _Document) -> str:
    """Return the results as text: measurements, and the predictions of the cost model."""
    if not document["tiers"]:
        return "no tier below the CPU"
    return join_parts([[*_tier(name, tier)] for name, tier in document["tiers"].items()])


def _tier(name: str, tier: _Document) -> Iterator[str]:
    head = f"{name}: {tier['device']}" if tier["device"] else name
    if tier["measured_s"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tier["measured_s"]))
        head += f", measured {at}"
    yield from wrap_lines(head)
    rounds = tier["rounds"]
    if rounds:
        yield format_row(_COLUMNS, _HEADS)
    for size in sorted({each["block_bytes"] for each in rounds}):
        of_size = [each for each in rounds if each["block_bytes"] == size]
        written = next((each for each in of_size if not each["is_read"]), None)
        for place, read in enumerate(each for each in of_size if each["is_read"]):
            yield _row(size, read, written if place == 0 else None)
    if tier["reason"]:
        outcome = "larger sizes not measured" if rounds else "not measured"
        if tier.get("is_kept"):
            outcome = "not measured again"
        yield from wrap_lines(f"{outcome}: {tier['reason']}")


def _row(size: int, read: _Document, written: _Document | None) -> str:
    writes = ("", "")
    if written is not None:
        seconds = written["seconds"] / written["num_blocks"]
        writes = (_rate(written["block_bytes"], seconds), format_seconds(seconds))
    rate = _rate(size * read["depth"], read["seconds"])
    modeled = "" if read["model_s"] is None else format_seconds(read["model_s"])
    reads = (rate, format_seconds(read["seconds"]), modeled)
    return format_row(_COLUMNS, (format_bytes(size), str(read["depth"]), *writes, *reads))


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else "-"
