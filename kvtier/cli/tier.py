"""``kvtier tier``: lists tiers, or drains, detaches or attaches one while requests run."""

import argparse
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kvtier.cli.call import add_target_options, call_daemon, fetch_status, target_from
from kvtier.cli.formatting import format_bytes, format_count, format_row, printable, wrap_lines
from kvtier.cli.options import parse_seconds
from kvtier.core.residency import TierName
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

__all__ = ["add_options", "list_tiers", "run"]

_MARGIN_S = 5.0
"""Added to the time that the daemon itself may wait."""

_parse_wait = partial(parse_seconds, low_s=0, high_s=86_400, span="at most 1 day")

_VERBS: Mapping[str, tuple["pb.TierVerb.ValueType", float, str]] = {
    "drain": (pb.TIER_VERB_DRAIN, 0.0, "stop writing new blocks to a tier; reads continue"),
    "resume": (pb.TIER_VERB_RESUME, 0.0, "write to a drained tier again"),
    "detach": (pb.TIER_VERB_DETACH, 30.0, "stop using a tier, and release its disk or server"),
    "attach": (pb.TIER_VERB_ATTACH, 60.0, "use a tier again, as currently configured"),
}
"""Verb, default wait in seconds, and help text by name."""

_BY_OPERATOR = "by an operator"
"""Reason of a change that this command made; printing it would say nothing."""

_COLUMNS = (-8, -10, 12, 12, 12, 12, 10)

_Document = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "list the tiers, their state and their queues"
    listing = verbs.add_parser("list", help=text, description=f"{text.capitalize()}.")
    listing.set_defaults(run=list_tiers)
    for name, (_, wait_s, text) in _VERBS.items():
        verb = verbs.add_parser(name, help=text, description=f"{text.capitalize()}.")
        verb.add_argument("tier", choices=[tier.value for tier in TierName], help="ssd or remote")
        if name != "resume":
            verb.add_argument(
                "--wait",
                type=_parse_wait,
                default=wait_s,
                metavar="TIME",
                help=f"how long to wait until it is done (default: {wait_s:g}s)",
            )
        if name == "detach":
            verb.add_argument(
                "--now",
                action="store_true",
                help="abort transfers in flight; affected blocks are recomputed",
            )
        verb.set_defaults(run=run)
    for verb in verbs.choices.values():
        add_target_options(verb)
        verb.add_argument("--json", action="store_true", help="print JSON")


def list_tiers(options: argparse.Namespace) -> int:
    """Print the tiers."""
    tiers = fetch_status(target_from(options), _MARGIN_S)["tiers"]
    print(json.dumps(tiers) if options.json else "\n".join(_lines(tiers)))
    return 0


def run(options: argparse.Namespace) -> int:
    """Change a tier; exit code 1 if it is not done in time. Raises StartError if refused."""
    verb, wait_s, _ = _VERBS[options.verb]
    wait_s = getattr(options, "wait", wait_s)
    request = pb.ChangeTierRequest(
        tier=tier_to_wire(TierName(options.tier)),
        verb=verb,
        wait_ms=int(wait_s * 1000),
        now=getattr(options, "now", False),
    )
    timeout_s = wait_s + _MARGIN_S
    reply = call_daemon(
        target_from(options), lambda stub: stub.ChangeTier(request, timeout=timeout_s)
    )
    if reply.HasField("refusal"):
        refusal = reply.refusal
        raise StartError(refusal.field, refusal.problem, refusal.remedy)
    if options.json:
        document = {"tier": options.tier, "state": reply.state, "reason": reply.reason}
        print(json.dumps(document | {"done": reply.done}))
    else:
        reason = reply.reason.removeprefix(_BY_OPERATOR).removeprefix("; ")
        print(printable(f"{options.tier} is {reply.state}" + (reason and f": {reason}")))
    return int(not reply.done)


def _lines(tiers: _Document) -> Iterator[str]:
    heads = ("tier", "state", "blocks", "used", "reading", "writing", "stuck")
    yield format_row(_COLUMNS, heads)
    for name, tier in tiers.items():
        queues = ("queued_reads", "queued_writes", "hung_calls")
        cells = (str(tier[each]) if "queued_reads" in tier else "" for each in queues)
        blocks, used = format_count(tier["blocks"]), format_bytes(tier["used_bytes"])
        yield format_row(_COLUMNS, (name, tier["state"], blocks, used, *cells))
    for name, tier in tiers.items():
        if tier["reason"]:
            yield from wrap_lines(f"{name} is {tier['state']}: {tier['reason']}")
