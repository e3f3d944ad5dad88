"""``kvtier warm``: bring a prompt's blocks into the CPU tier before they are asked for."""

import argparse
import json
from collections.abc import Mapping

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.chain import add_prompt_options, prompt_from
from kvtier.cli.formatting import NO_FULL_BLOCK
from kvtier.cli.options import parse_wait
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_MARGIN_S = 2.0

_REASONS: Mapping[str, str] = {
    "absent": "no tier has the next one",
    "identity": "the next one is not what its name says",
    "busy": "enough is on its way; ask again in a moment",
    "no_room": "the CPU tier has no room that may be taken",
    "worth": "the next one is worth less than what would have to go for it; pin it first",
    "unknown": "no engine has stored blocks of this model here",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    add_prompt_options(parser)
    parser.add_argument(
        "--timeout", type=parse_wait, default=10.0, metavar="SECONDS", help="how long to wait (10)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Have blocks brought; exit code 1 where not all of the prompt is there or coming."""
    target = target_from(options)
    chain = prompt_from(options)
    request = pb.WarmRequest(
        key_space=chain.key_space,
        chain=chain.message,
        deadline_ms=max(1, int(options.timeout * 1000)),
    )
    reply = call_daemon(
        target, lambda stub: stub.Warm(request, timeout=options.timeout + _MARGIN_S)
    )
    if options.json:
        document = {
            "ready_blocks": reply.ready_blocks,
            "coming_blocks": reply.coming_blocks,
            "of_blocks": chain.num_blocks,
            "reason": reply.reason,
        }
        print(json.dumps(document))
    elif not chain.num_blocks:
        print(NO_FULL_BLOCK)
    else:
        line = f"of {chain.num_blocks} blocks {reply.ready_blocks} are in the CPU tier"
        line += f" and {reply.coming_blocks} on their way"
        why = _REASONS.get(reply.reason, reply.reason)
        print(line + (f"; {why}" if why else ""))
    return int(not 0 < chain.num_blocks <= reply.ready_blocks + reply.coming_blocks)
