"""``kvtier probe``: measure what transfers of each tier take, now."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import format_bytes, format_seconds, wrap_lines
from kvtier.core.residency import TierName
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

__all__ = ["add_options", "probe_text", "run"]

_TIMEOUT_S = 180.0
"""Reads of requests go first, and each of a handful of sizes may wait for them for a while."""

_Document = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        choices=[*TierName],
        help="tier to measure; may be repeated (all below the CPU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; exit code 1 where nothing could be measured."""
    request = pb.ProbeRequest(tiers=[tier_to_wire(TierName(each)) for each in options.tier])
    reply = call_daemon(target_from(options), lambda stub: stub.Probe(request, timeout=_TIMEOUT_S))
    document = json.loads(reply.json)
    print(reply.json if options.json else probe_text(document))
    tiers = document["tiers"].values()
    return int(not any(tier["rounds"] and not tier.get("is_kept") for tier in tiers))


def probe_text(document: _Document) -> str:
    """Return the document for people: what was measured, against what the model says."""
    if not document["tiers"]:
        return "there is no tier below the CPU"
    parts = [_tier(name, tier) for name, tier in document["tiers"].items()]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _tier(name: str, tier: _Document) -> Iterator[str]:
    head = f"{name}: {tier['device']}" if tier["device"] else name
    if tier["measured_s"]:
        day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tier["measured_s"]))
        head += f", measured {day}"
    yield from wrap_lines(head)
    if tier["rounds"]:
        yield "     block  at once      wrote       each       read       each   by model"
    sizes = sorted({each["block_bytes"] for each in tier["rounds"]})
    for size in sizes:
        rounds = [each for each in tier["rounds"] if each["block_bytes"] == size]
        written = next((each for each in rounds if not each["is_read"]), None)
        for place, each in enumerate(each for each in rounds if each["is_read"]):
            yield _row(size, each, written if place == 0 else None)
    if tier["reason"]:
        said = "no larger sizes measured" if tier["rounds"] else "not measured"
        if tier.get("is_kept"):
            said = "not measured again"
        yield from wrap_lines(f"{said}: {tier['reason']}")


def _row(size: int, read: _Document, written: _Document | None) -> str:
    wrote = ["", ""]
    if written is not None:
        seconds = written["seconds"] / written["num_blocks"]
        wrote = [_rate(written["block_bytes"], seconds), format_seconds(seconds)]
    rate = _rate(size * read["depth"], read["seconds"])
    model = "" if read["model_s"] is None else format_seconds(read["model_s"])
    columns = [*wrote, rate, format_seconds(read["seconds"]), model]
    line = f"{format_bytes(size):>10}{read['depth']:>9}" + "".join(f"{c:>11}" for c in columns)
    return line.rstrip()


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else "-"
