"""``kvtier explain``: shows what is cached of a prompt, and what was decided for a request and why.

The text has 80 columns, in this order: what is cached, what is missing and why, what was decided,
and how it turned out.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.call import Target, add_target_options, call_daemon, target_from
from kvtier.cli.formatting import (
    COLUMNS,
    count_noun,
    format_bytes,
    format_count,
    format_seconds,
    join_parts,
    printable,
)
from kvtier.cli.prompt import (
    HashedPrompt,
    add_prompt_options,
    has_prompt,
    prompt_from,
    require_utf8,
)
from kvtier.errors import StartError
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "explain_text", "run"]

_TIMEOUT_S = 10.0
_LABEL_WIDTH = 14
_RUNS_SHOWN = 6

_Document = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument("--request", metavar="ID", help="id of a recent request, from its response")
    add_prompt_options(parser)
    parser.add_argument(
        "--text",
        action="store_true",
        help="show the text around the point where the prompts diverge",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is known; exit code 2 if nothing is known."""
    request_id: str | None = options.request
    if request_id is None and not has_prompt(options):
        raise StartError(
            "explain", "nothing to explain", "pass --request, --prompt, --messages or --tokens"
        )
    if request_id == "":  # mostly an unset shell variable
        raise StartError("--request", "is empty", "give the id from a response")
    request_id = require_utf8("--request", request_id or "")
    target = target_from(options)
    daemon = target if isinstance(target, Path) else None
    prompt = None
    if has_prompt(options):
        prompt = prompt_from(options, with_text=options.text, daemon=daemon)
    document = _fetch(target, request_id, prompt)
    if prompt is not None:
        document["prompt"] = dict(prompt.answer)
    print(json.dumps(document) if options.json else explain_text(document))
    return 0


def _fetch(target: Target, request_id: str, prompt: HashedPrompt | None) -> dict[str, Any]:
    """Return the daemon's document about a request and a prompt. Raises StartError."""
    # A response may have several completions: the engine adds the number of each to the id.
    names = [request_id, f"{request_id}-0"] if request_id else [""]
    document: dict[str, Any] | None = None
    for name in names:
        request = pb.ExplainRequest(request_id=name)
        if prompt is not None:
            request.key_space = prompt.key_space
            request.chain.CopyFrom(prompt.chain)
            request.unsalted.hashes = prompt.unsalted
            request.num_tokens = prompt.num_tokens
        answer = _call(target, request)
        document = json.loads(answer) if answer else document
        if document is not None and document["decision"]:
            break
    if document is not None:
        return document | {"request_id": request_id}
    raise StartError(
        "--request",
        f"no decision recorded for {request_id!r}",
        "give the id of a recent request; those served entirely from the GPU have no decision",
    )


def _call(target: Target, request: pb.ExplainRequest) -> str:
    return call_daemon(target, lambda stub: stub.Explain(request, timeout=_TIMEOUT_S).json)


def explain_text(document: _Document) -> str:
    """Return the document as text."""
    parts: list[Sequence[str]] = [
        [*_prompt(document.get("prompt"))],
        [*_chain(document["chain"])],
        [*_decision(document["decision"])],
    ]
    if document["request_id"] and not document["decision"]:
        parts.append(_line("decision", f"none recorded for {document['request_id']}"))
    return join_parts(parts)


def _prompt(prompt: _Document | None) -> Iterator[str]:
    if prompt is None:
        return
    tokens, block_tokens = prompt["num_tokens"], prompt["block_tokens"]
    blocks = count_noun(tokens // block_tokens, "full block")
    tenant = f"tenant {prompt['tenant'][:8]}" if prompt["tenant"].strip("0") else "no salt"
    yield from _line(
        "prompt", f"{format_count(tokens)} tokens: {blocks} of {block_tokens}, {tenant}"
    )
    if "is_seen" not in prompt:
        yield from _line("diverges", "unknown: only operators on the engine's node can see this")
        return
    if prompt["is_seen"]:
        yield from _line("", "this engine recently saw this prompt, or one that starts with it")
    if not prompt["has_nearest"]:
        yield from _line("diverges", "no other recent prompt of this tenant")
        return
    at = prompt["nearest_tokens"]
    line = f"at token {format_count(at)}, in block {at // block_tokens}, from the nearest prompt"
    if at < block_tokens:
        line += ": no shared blocks"
    yield from _line("diverges", line)
    text = prompt.get("text")
    if text is not None:
        yield from _line("  here", repr(f"{text['before']}│{text['here']}"))
        yield from _line("  there", repr(f"{text['before']}│{text['there']}"))


def _chain(chain: _Document | None) -> Iterator[str]:
    if chain is None:
        return
    yield from _line("cached", f"of {count_noun(chain['blocks'], 'block')}, by tier")
    for name, tier in chain["tiers"].items():
        yield from _line(f"  {name}", _positions(tier))
    served = chain["served"]
    loads = "nothing"
    if served["blocks"]:
        tokens = count_noun(served["tokens"], "token")
        loads = f"{_blocks(served['blocks'])}, {tokens}: {_runs(served['runs'])}"
    yield from _line("would load", loads)
    missing = chain["missing"]
    if missing is None:
        yield from _line("missing", "none")
        return
    first = f"block {missing['block']}, token {format_count(missing['first_token'])}"
    yield from _line("missing", f"from {first}")
    yield from _line("reason", f"{missing['sentence']} ({missing['fate']})")


def _positions(tier: _Document) -> str:
    if not tier["blocks"]:
        return "none"
    runs = [f"{first}" if n == 1 else f"{first}-{first + n - 1}" for first, n in tier["runs"]]
    more = len(runs) - _RUNS_SHOWN + tier["more_runs"]
    shown = ", ".join(runs[:_RUNS_SHOWN]) + (f" and {more} more runs" if more > 0 else "")
    return f"{format_count(tier['blocks'])}: {shown}"


def _decision(decision: _Document | None) -> Iterator[str]:
    if decision is None:
        return
    plan = decision["plan"]
    when = f"{_time(decision['age_s'])} ago"
    yield from _line("decision", f"number {decision['number']}, {when}, for {decision['engine']}")
    yield from _inputs(decision["inputs"])
    yield from _line("decided", f"{_plan(plan)}: {decision['sentence']} ({decision['reason']})")
    yield from _predicted(plan)
    for missed in decision["missed"]:
        line = f"{_blocks(missed['blocks'])}: {missed['sentence']} ({missed['fate']})"
        yield from _line("missed", line)
    yield from _outcome(decision["outcome"])
    yield from _judgement(decision["judgement"])


def _inputs(inputs: _Document) -> Iterator[str]:
    first = format_count(inputs["first_token"])
    on_gpu = f"the first {first} on the GPU" if inputs["first_token"] else "none on the GPU"
    yield from _line("  prompt", f"{count_noun(inputs['prompt_tokens'], 'token')}, {on_gpu}")
    found = _runs(inputs["found"]) or "nothing"
    yield from _line("  found", f"{found}; then: {inputs['found_reason']}")
    queues = [
        f"{format_bytes(each['queued_bytes'])} ahead of it at {each['tier']}"
        for each in inputs["sources"]
        if each["queued_bytes"]
    ]
    load = f"{count_noun(inputs['waiting_tokens'], 'token')} to compute ahead of it, "
    load += count_noun(inputs["running"], "running request")
    yield from _line("  load", "; ".join([load, *queues]))
    if inputs["limit_blocks"] is not None:
        yield from _line("  limit", f"{_blocks(inputs['limit_blocks'])}, set by the request")


def _plan(plan: _Document) -> str:
    if not plan["blocks"]:
        return "compute everything"
    order = ", last block first" if plan["split"] else ""
    return f"load {_blocks(plan['blocks'])}{order}, wait at most {_time(plan['wait_s'])}"


def _predicted(plan: _Document) -> Iterator[str]:
    if plan["first_token_s"] is None:  # nothing was found, so nothing was compared
        return
    for name, label, of in (
        ("loading", "  predicted", plan["restore_s"]),
        ("computing", "", plan["recompute_s"]),
    ):
        yield from _line(label, f"{name} takes {_time(of['mean'])} (P95 {_time(of['p95'])})")
    first, without = plan["first_token_s"], plan["first_token_by_recompute_s"]
    yield from _line("", f"first token after {_time(first)}, by computing after {_time(without)}")


def _outcome(outcome: _Document | None) -> Iterator[str]:
    if outcome is None:
        yield from _line("outcome", "not reported by the engine yet")
        return
    restored = _runs(outcome["restored"])
    line = f"loaded {restored} in {_time(outcome['restore_s'])}" if restored else "loaded nothing"
    yield from _line("outcome", line)
    computed = count_noun(outcome["computed_tokens"], "token")
    yield from _line("", f"computed {computed} in {_time(outcome['compute_s'])}")
    line = f"first token after {_time(outcome['first_token_s'])}, "
    yield from _line("", line + f"including {_time(outcome['wait_s'])} in the queue")


def _judgement(judgement: _Document | None) -> Iterator[str]:
    if judgement is None:
        return
    parts = [f"{tier} saved {_time(s)}" for tier, s in judgement["saved_s"].items() if s]
    parts += [f"{tier} cost {_time(s)}" for tier, s in judgement["lost_s"].items() if s]
    regret, was_restored = judgement["regret_s"], judgement["taken"] == "restore"
    if regret:
        other = "computing" if was_restored else "restoring"
        parts.append(f"{other} would have saved {_time(regret)}")
    yield from _line("benefit", "; ".join(parts) or "none, and no regret")
    if was_restored:
        cold_s = judgement["cold_s"]
        yield from _line(
            "",
            "predicted: computing this prompt was never measured"
            if cold_s is None
            else f"measured: computing this prompt took {_time(cold_s)}",
        )


def _blocks(count: int) -> str:
    return count_noun(count, "block")


def _runs(runs: Sequence[_Document]) -> str:
    return ", ".join(f"{each['tier']} {format_count(each['blocks'])}" for each in runs)


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)


def _line(label: str, text: str) -> list[str]:
    """Return a labeled line, wrapped at 80 columns."""
    return textwrap.wrap(
        printable(text),
        COLUMNS,
        initial_indent=f"{label:<{_LABEL_WIDTH}}",
        subsequent_indent=" " * _LABEL_WIDTH,
        break_on_hyphens=False,
    )
