"""``kvtier explain``: what is cached of a prompt or a request, what was decided, and why."""

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier.cli.call import Target, add_target_options, call_daemon, target_from
from kvtier.cli.chain import HashedPrompt, add_prompt_options, has_prompt, prompt_from, require_utf8
from kvtier.cli.formatting import COLUMNS, format_bytes, format_count, format_seconds, printable
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["add_options", "explain_text", "run"]

_TIMEOUT_S = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument("--request", metavar="ID", help="a recent request, by the id of its answer")
    add_prompt_options(parser)
    parser.add_argument(
        "--text", action="store_true", help="show the text where the two prompts part"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is known; exit code 2 where nothing is."""
    request_id: str | None = options.request
    if request_id is None and not has_prompt(options):
        raise StartError("explain", "of what?", "give --request ID, --prompt TEXT or --tokens FILE")
    if request_id == "":  # mostly a shell variable that is not set
        raise StartError("--request", "is empty", "give the id of an answer")
    request_id = require_utf8("--request", request_id or "")
    target = target_from(options)
    daemon = target if isinstance(target, Path) else None
    chain = None
    if has_prompt(options):
        chain = prompt_from(options, with_text=options.text, daemon=daemon)
    document = _explained(target, request_id, chain)
    if chain is not None:
        document["prompt"] = dict(chain.told)
    print(json.dumps(document) if options.json else explain_text(document))
    return 0


def _explained(target: Target, request_id: str, chain: HashedPrompt | None) -> dict[str, Any]:
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
        told = call_daemon(target, _explain(question))
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


_MARGIN = 14
"""Where what is said begins; before it, of what."""

_RUNS_SHOWN = 6

_Document = Mapping[str, Any]


def explain_text(document: _Document) -> str:
    """Return the whole document for people."""
    parts = [
        [*_prompt(document.get("prompt"))],
        [*_chain(document["chain"])],
        [*_decision(document["decision"])],
    ]
    if document["request_id"] and not document["decision"]:
        parts.append(_said("decision", f"none about {document['request_id']} is remembered"))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _prompt(prompt: _Document | None) -> Iterator[str]:
    if prompt is None:
        return
    tokens, block_tokens = prompt["num_tokens"], prompt["block_tokens"]
    whole = tokens // block_tokens
    line = f"{format_count(tokens)} tokens: {format_count(whole)} full blocks of {block_tokens}"
    yield from _said("prompt", f"{line}, {_salted(prompt['tenant'])}")
    if "is_seen" not in prompt:
        yield from _said("differs", "unknown: only operators on the engine's node can see this")
        return
    if prompt["is_seen"]:
        yield from _said("", "this engine recently saw this prompt, or one that starts with it")
    if not prompt["has_nearest"]:
        yield from _said("differs", "there is no other recent prompt of this tenant")
        return
    at = prompt["nearest_tokens"]
    line = f"at token {format_count(at)}, in block {at // block_tokens}, from the nearest prompt"
    if at < block_tokens:
        line += ": they share no block"
    yield from _said("differs", line)
    text = prompt.get("text")
    if text is not None:
        for name, before in (("here", text["here"]), ("there", text["there"])):
            yield from _said(f"  {name}", repr(text["before"] + "│" + before))


def _chain(chain: _Document | None) -> Iterator[str]:
    if chain is None:
        return
    yield from _said("cached", f"of {format_count(chain['blocks'])} blocks, by tier")
    for name, tier in chain["tiers"].items():
        yield from _said(f"  {name}", _held(tier))
    served = chain["served"]
    if served["blocks"]:
        line = f"{_blocks(served['blocks'])}, {format_count(served['tokens'])} tokens, "
        yield from _said("would load", line + _runs(served["runs"]))
    else:
        yield from _said("would load", "nothing")
    missing = chain["missing"]
    if missing is None:
        yield from _said("missing", "no full block")
        return
    where = f"block {missing['block']}, from token {format_count(missing['first_token'])} on"
    yield from _said("missing", where)
    yield from _said("because", f"{missing['sentence']} ({missing['fate']})")


def _held(tier: _Document) -> str:
    if not tier["blocks"]:
        return "none"
    runs = [f"{first}" if n == 1 else f"{first}-{first + n - 1}" for first, n in tier["runs"]]
    more = len(runs) - _RUNS_SHOWN + tier["more_runs"]
    shown = ", ".join(runs[:_RUNS_SHOWN]) + (f" and {more} runs more" if more > 0 else "")
    return f"{format_count(tier['blocks'])}: {shown}"


def _decision(decision: _Document | None) -> Iterator[str]:
    if decision is None:
        return
    inputs, plan = decision["inputs"], decision["plan"]
    when = f"{_time(decision['age_s'])} ago"
    yield from _said("decision", f"number {decision['number']}, {when}, for {decision['engine']}")
    yield from _inputs(inputs)
    yield from _said("decided", f"{_plan(plan)}: {decision['sentence']} ({decision['reason']})")
    yield from _predicted(plan)
    for missed in decision["missed"]:
        line = f"{_blocks(missed['blocks'])}: {missed['sentence']} ({missed['fate']})"
        yield from _said("missed", line)
    yield from _outcome(decision["outcome"])
    yield from _judgement(decision["judgement"])


def _inputs(inputs: _Document) -> Iterator[str]:
    prompt = f"a prompt of {format_count(inputs['prompt_tokens'])} tokens, "
    first = inputs["first_token"]
    line = prompt + (f"the first {format_count(first)} on the GPU" if first else "none on the GPU")
    yield from _said("  of", line)
    found = _runs(inputs["found"]) or "nothing"
    yield from _said("  found", f"{found}; then: {inputs['found_reason']}")
    queues = [
        f"{format_bytes(each['queued_bytes'])} before it at {each['tier']}"
        for each in inputs["sources"]
        if each["queued_bytes"]
    ]
    load = f"{format_count(inputs['waiting_tokens'])} tokens to compute before it, "
    load += f"{inputs['running']} requests running"
    yield from _said("  load", "; ".join([load, *queues]))
    if inputs["limit_blocks"] is not None:
        yield from _said("  limit", f"{_blocks(inputs['limit_blocks'])}, by the request itself")


def _plan(plan: _Document) -> str:
    if not plan["blocks"]:
        return "compute everything"
    line = f"load {_blocks(plan['blocks'])}"
    if plan["split"]:
        line += " from the back"
    return line + f", wait {_time(plan['wait_s'])} for them at most"


def _predicted(plan: _Document) -> Iterator[str]:
    if plan["first_token_s"] is None:  # nothing was found, and so nothing compared
        return
    for name, of in (("loading", plan["restore_s"]), ("computing", plan["recompute_s"])):
        line = f"{name} takes {_time(of['mean'])}, seldom over {_time(of['p95'])}"
        yield from _said("  predicted" if name == "loading" else "", line)
    first, without = plan["first_token_s"], plan["first_token_by_recompute_s"]
    yield from _said("", f"first token after {_time(first)}; by computing, {_time(without)}")


def _outcome(outcome: _Document | None) -> Iterator[str]:
    if outcome is None:
        yield from _said("happened", "not reported by the engine yet")
        return
    restored = _runs(outcome["restored"])
    line = f"loaded {restored} in {_time(outcome['restore_s'])}" if restored else "loaded nothing"
    yield from _said("happened", line)
    computed = format_count(outcome["computed_tokens"])
    yield from _said("", f"computed {computed} tokens in {_time(outcome['compute_s'])}")
    line = f"first token after {_time(outcome['first_token_s'])}, "
    yield from _said("", line + f"of which {_time(outcome['wait_s'])} in the queue")


def _judgement(judgement: _Document | None) -> Iterator[str]:
    if judgement is None:
        return
    parts = [f"{tier} saved {_time(s)}" for tier, s in judgement["saved_s"].items() if s]
    parts += [f"{tier} cost {_time(s)}" for tier, s in judgement["lost_s"].items() if s]
    regret = judgement["regret_s"]
    if regret:
        parts.append(f"the other road would have saved {_time(regret)}")
    yield from _said("worth", "; ".join(parts) or "nothing, and the other road no more")
    if judgement["taken"] == "restore":
        cold_s = judgement["cold_s"]
        line = f"measured: computing the same prompt took {_time(cold_s)}"
        yield from _said(
            "",
            line
            if cold_s is not None
            else "predicted: computing the same prompt was never measured",
        )


def _salted(tenant: str) -> str:
    return f"tenant {tenant[:8]}" if tenant.strip("0") else "no salt"


def _blocks(count: int) -> str:
    return f"{format_count(count)} block{'s' if count != 1 else ''}"


def _runs(runs: list[_Document]) -> str:
    return ", ".join(f"{each['tier']} {format_count(each['blocks'])}" for each in runs)


def _time(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else format_seconds(seconds)


def _said(what: str, line: str) -> list[str]:
    """Return a line of the two columns, in as many lines as it takes."""
    return textwrap.wrap(
        printable(line),
        COLUMNS,
        initial_indent=f"{what:<{_MARGIN}}",
        subsequent_indent=" " * _MARGIN,
        break_on_hyphens=False,
    )
