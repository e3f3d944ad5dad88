"""``kvtier explain``: what is cached of a prompt or a request, what was decided, and why."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.cli.call import Target, add_socket_options, ask, socket_of
from kvtier.cli.chain import NamedChain, add_chain_options, chain_of, checked_text, names_a_chain
from kvtier.cli.explain_text import explain_text
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["add_options", "run"]

_TIMEOUT_S = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_socket_options(parser)
    parser.add_argument("--request", metavar="ID", help="a recent request, by the id of its answer")
    add_chain_options(parser)
    parser.add_argument(
        "--text", action="store_true", help="show the text where the two prompts part"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is known; exit code 2 where nothing is."""
    request_id: str | None = options.request
    if request_id is None and not names_a_chain(options):
        raise StartError("explain", "of what?", "give --request ID, --prompt TEXT or --tokens FILE")
    if request_id == "":  # mostly a shell variable that is not set
        raise StartError("--request", "is empty", "give the id of an answer")
    request_id = checked_text("--request", request_id or "")
    target = socket_of(options)
    daemon = target if isinstance(target, Path) else None
    chain = None
    if names_a_chain(options):
        chain = chain_of(options, with_text=options.text, daemon=daemon)
    document = _explained(target, request_id, chain)
    if chain is not None:
        document["prompt"] = dict(chain.told)
    print(json.dumps(document) if options.json else explain_text(document))
    return 0


def _explained(target: Target, request_id: str, chain: NamedChain | None) -> dict[str, Any]:
    """Ask for a request, under the names that it may go by, and for a chain."""
    # An answer may be several completions; the engine's own id has the number of one behind it.
    names = [request_id, f"{request_id}-0"] if request_id else [""]
    document: dict[str, Any] | None = None
    for name in names:
        question = pb.ExplainRequest(request_id=name)
        if chain is not None:
            question.key_space = chain.key_space
            question.chain.CopyFrom(chain.message)
            question.unsalted.hashes = chain.unsalted
            question.num_tokens = chain.num_tokens
        told = ask(target, _explain(question))
        document = json.loads(told) if told else document
        if document is not None and document["decision"]:
            break
    if document is not None:
        return document | {"request_id": request_id}
    raise StartError(
        "--request",
        f"no decision about {request_id!r} is remembered",
        "give the id of a recent answer; one for which the GPU had all has no decision",
    )


def _explain(question: pb.ExplainRequest) -> Callable[[operator_pb2_grpc.OperatorStub], str]:
    return lambda stub: stub.Explain(question, timeout=_TIMEOUT_S).json
