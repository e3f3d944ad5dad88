"""``kvtier tier``: see which tiers serve; drain, detach and attach one while requests run."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import format_bytes, format_count, printable, wrap_lines
from kvtier.cli.options import parse_wait
from kvtier.core.residency import TierName
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

__all__ = ["add_options", "list_tiers", "run"]

_MARGIN_S = 5.0
"""Beyond what the daemon is told to wait."""

_VERBS: Mapping[str, tuple["pb.TierVerb.ValueType", float, str]] = {
    "drain": (pb.TIER_VERB_DRAIN, 0.0, "write nothing new to a tier; it is still read"),
    "resume": (pb.TIER_VERB_RESUME, 0.0, "write to a drained tier again"),
    "detach": (pb.TIER_VERB_DETACH, 30.0, "take a tier off: others may have its disk or server"),
    "attach": (pb.TIER_VERB_ATTACH, 60.0, "put a tier on, as it is configured now"),
}
"""By name: the verb, how long it is waited for, and what it does."""

_Document = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listed = "show the tiers, their state and what is under way"
    shown = verbs.add_parser("list", help=listed, description=listed.capitalize())
    shown.set_defaults(run=list_tiers)
    for name, (_, wait_s, text) in _VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text.capitalize())
        verb.add_argument("tier", choices=[*TierName], help="ssd or remote")
        if name != "resume":
            verb.add_argument(
                "--wait",
                type=_seconds,
                default=wait_s,
                metavar="SECONDS",
                help=f"how long to wait for it to be done ({wait_s:g})",
            )
        if name == "detach":
            verb.add_argument(
                "--now", action="store_true", help="give up what is under way; it is computed"
            )
        verb.set_defaults(run=run)
    for verb in verbs.choices.values():
        add_target_options(verb)
        verb.add_argument("--json", action="store_true", help="print JSON")


def list_tiers(options: argparse.Namespace) -> int:
    """Print the tiers."""
    reply = call_daemon(
        target_from(options), lambda stub: stub.Stat(pb.StatRequest(), timeout=_MARGIN_S)
    )
    tiers = json.loads(reply.json)["tiers"]
    print(json.dumps(tiers) if options.json else "\n".join(_lines(tiers)))
    return 0


def _seconds(text: str) -> float:
    """Read how long to wait, which may be not at all."""
    return 0.0 if text == "0" else parse_wait(text)


def run(options: argparse.Namespace) -> int:
    """Change a tier; exit code 1 where it is not done yet. Raises StartError for a refusal."""
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
        why = f": {reply.reason}" if reply.reason else ""
        print(printable(f"{options.tier} is {reply.state}{why}"))
    return int(not reply.done)


def _lines(tiers: _Document) -> Iterator[str]:
    yield "tier    state           blocks        used     reading     writing   hanging"
    for name, tier in tiers.items():
        is_idle = "queued_reads" not in tier
        queued = "" if is_idle else f"{tier['queued_reads']:>12}{tier['queued_writes']:>12}"
        hanging = "" if is_idle else f"{tier['hung_calls']:>10}"
        used = format_bytes(tier["used_bytes"])
        yield f"{name:<8}{tier['state']:<10}{format_count(tier['blocks']):>12}{used:>12}" + (
            queued + hanging
        )
    for name, tier in tiers.items():
        if tier["reason"]:
            yield from wrap_lines(f"{name} is {tier['state']}: {tier['reason']}")
