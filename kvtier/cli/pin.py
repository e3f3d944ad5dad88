"""``kvtier pin``: keep a prompt's blocks for a time, or no longer."""

import argparse
import json
from collections.abc import Mapping

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.chain import add_prompt_options, prompt_from
from kvtier.cli.formatting import NO_FULL_BLOCK
from kvtier.cli.options import parse_ttl
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_TIMEOUT_S = 10.0
_TTL_S = 3600

_REASONS: Mapping[str, str] = {
    "budget": "what policy.pin_share lets pins keep is used up",
    "unknown": "no engine has stored blocks of this model here",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    add_prompt_options(parser)
    parser.add_argument(
        "--ttl",
        type=parse_ttl,
        default=_TTL_S,
        metavar="SECONDS",
        help=f"for how long ({_TTL_S}); 0: no longer",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pin, or end a pin; exit code 1 where not all of the prompt is kept."""
    target = target_from(options)
    chain = prompt_from(options)
    request = pb.PinRequest(key_space=chain.key_space, chain=chain.message, ttl_s=options.ttl)
    reply = call_daemon(target, lambda stub: stub.Pin(request, timeout=_TIMEOUT_S))
    if options.json:
        kept = {"blocks": reply.blocks, "of_blocks": chain.num_blocks, "reason": reply.reason}
        print(json.dumps(kept | {"ttl_s": options.ttl}))
    elif not chain.num_blocks:
        print(NO_FULL_BLOCK)
    elif options.ttl:
        line = f"keeps {reply.blocks} of {chain.num_blocks} blocks for {options.ttl} s"
        why = _REASONS.get(reply.reason, reply.reason)
        print(line + (f": {why}" if why else ""))
    else:
        print(f"the {chain.num_blocks} blocks are kept no longer than others")
    return int(bool(options.ttl) and not 0 < chain.num_blocks <= reply.blocks)
