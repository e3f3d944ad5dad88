"""The document of ``kvtier explain`` as text for a terminal: 80 columns, no colour.

Written for someone who is woken by it: first what is there, then what is not and why, then what
was decided, and last what came of it.
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.shown import COLUMNS, plain, shown_bytes, shown_count, shown_seconds

__all__ = ["explain_text"]

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
    line = f"{shown_count(tokens)} tokens: {shown_count(whole)} full blocks of {block_tokens}"
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
    line = f"at token {shown_count(at)}, in block {at // block_tokens}, from the nearest prompt"
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
    yield from _said("cached", f"of {shown_count(chain['blocks'])} blocks, by tier")
    for name, tier in chain["tiers"].items():
        yield from _said(f"  {name}", _held(tier))
    served = chain["served"]
    if served["blocks"]:
        line = f"{_blocks(served['blocks'])}, {shown_count(served['tokens'])} tokens, "
        yield from _said("would load", line + _runs(served["runs"]))
    else:
        yield from _said("would load", "nothing")
    missing = chain["missing"]
    if missing is None:
        yield from _said("missing", "no full block")
        return
    where = f"block {missing['block']}, from token {shown_count(missing['first_token'])} on"
    yield from _said("missing", where)
    yield from _said("because", f"{missing['sentence']} ({missing['fate']})")


def _held(tier: _Document) -> str:
    if not tier["blocks"]:
        return "none"
    runs = [f"{first}" if n == 1 else f"{first}-{first + n - 1}" for first, n in tier["runs"]]
    more = len(runs) - _RUNS_SHOWN + tier["more_runs"]
    shown = ", ".join(runs[:_RUNS_SHOWN]) + (f" and {more} runs more" if more > 0 else "")
    return f"{shown_count(tier['blocks'])}: {shown}"


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
    prompt = f"a prompt of {shown_count(inputs['prompt_tokens'])} tokens, "
    first = inputs["first_token"]
    line = prompt + (f"the first {shown_count(first)} on the GPU" if first else "none on the GPU")
    yield from _said("  of", line)
    found = _runs(inputs["found"]) or "nothing"
    yield from _said("  found", f"{found}; then: {inputs['found_reason']}")
    queues = [
        f"{shown_bytes(each['queued_bytes'])} before it at {each['tier']}"
        for each in inputs["sources"]
        if each["queued_bytes"]
    ]
    load = f"{shown_count(inputs['waiting_tokens'])} tokens to compute before it, "
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
    computed = shown_count(outcome["computed_tokens"])
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
    return f"{shown_count(count)} block{'s' if count != 1 else ''}"


def _runs(runs: list[_Document]) -> str:
    return ", ".join(f"{each['tier']} {shown_count(each['blocks'])}" for each in runs)


def _time(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else shown_seconds(seconds)


def _said(what: str, line: str) -> list[str]:
    """Return a line of the two columns, in as many lines as it takes."""
    return textwrap.wrap(
        plain(line),
        COLUMNS,
        initial_indent=f"{what:<{_MARGIN}}",
        subsequent_indent=" " * _MARGIN,
        break_on_hyphens=False,
    )
