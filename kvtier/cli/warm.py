"""``kvtier warm``: loads a prompt's blocks into the CPU tier ahead of a request."""

import argparse
import json
from collections.abc import Mapping

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import count_noun
from kvtier.cli.options import add_timeout_option
from kvtier.cli.prompt import NO_FULL_BLOCK, add_prompt_options, prompt_from
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_MARGIN_S = 2.0

_REASONS: Mapping[str, str] = {
    "absent": "the next block is in no tier",
    "identity": "the next block belongs to another prompt",
    "busy": "enough reads are in flight; try again in a moment",
    "no_room": "no room in the CPU tier",
    "worth": "the next block is worth less than those it would evict; pin it first",
    "unknown": "no engine has stored blocks of this model here",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    add_prompt_options(parser)
    add_timeout_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the reads; exit code 1 unless all blocks are in the CPU tier or in flight."""
    target = target_from(options)
    prompt = prompt_from(options)
    request = pb.WarmRequest(
        key_space=prompt.key_space,
        chain=prompt.chain,
        deadline_ms=max(1, int(options.timeout * 1000)),
    )
    timeout_s = options.timeout + _MARGIN_S
    reply = call_daemon(target, lambda stub: stub.Warm(request, timeout=timeout_s))
    if options.json:
        document = {
            "ready_blocks": reply.ready_blocks,
            "coming_blocks": reply.coming_blocks,
            "of_blocks": prompt.num_blocks,
            "reason": reply.reason,
        }
        print(json.dumps(document))
    elif not prompt.num_blocks:
        print(NO_FULL_BLOCK)
    else:
        verb = "is" if prompt.num_blocks == 1 else "are"
        line = f"{reply.ready_blocks} of {count_noun(prompt.num_blocks, 'block')} {verb} in the "
        line += f"CPU tier, {reply.coming_blocks} in flight"
        reason = _REASONS.get(reply.reason, reply.reason)
        print(line + (reason and f"; {reason}"))
    return int(not 0 < prompt.num_blocks <= reply.ready_blocks + reply.coming_blocks)
