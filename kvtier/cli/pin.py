"""``kvtier pin``: protects a prompt's blocks from eviction for a while."""

import argparse
import json
from collections.abc import Mapping

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import count_noun, format_elapsed
from kvtier.cli.options import parse_ttl
from kvtier.cli.prompt import NO_FULL_BLOCK, add_prompt_options, prompt_from
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_TIMEOUT_S = 10.0

_REASONS: Mapping[str, str] = {
    "budget": "pins use all that policy.pin_share allows",
    "unknown": "no engine has stored blocks of this model here",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    add_prompt_options(parser)
    parser.add_argument(
        "--ttl",
        type=parse_ttl,
        default=3600,
        metavar="TIME",
        help="how long to pin, such as 600 (seconds) or 12h (default: 1h); 0 unpins",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Pin or unpin; exit code 1 if not all blocks are pinned."""
    target = target_from(options)
    prompt = prompt_from(options)
    request = pb.PinRequest(key_space=prompt.key_space, chain=prompt.chain, ttl_s=options.ttl)
    reply = call_daemon(target, lambda stub: stub.Pin(request, timeout=_TIMEOUT_S))
    if options.json:
        counts = {"blocks": reply.blocks, "of_blocks": prompt.num_blocks}
        print(json.dumps(counts | {"reason": reply.reason, "ttl_s": options.ttl}))
    elif not prompt.num_blocks:
        print(NO_FULL_BLOCK)
    elif options.ttl:
        blocks = f"{reply.blocks} of {count_noun(prompt.num_blocks, 'block')}"
        reason = _REASONS.get(reply.reason, reply.reason)
        print(f"pinned {blocks} for {format_elapsed(options.ttl)}" + (reason and f": {reason}"))
    else:
        print(f"unpinned {count_noun(prompt.num_blocks, 'block')}")
    return int(bool(options.ttl) and not 0 < prompt.num_blocks <= reply.blocks)
