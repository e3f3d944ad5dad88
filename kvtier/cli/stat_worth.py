"""The parts of the status text about kvtier's decisions and their benefit."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.shown import plain, shown_bytes, shown_count, shown_seconds, wrapped

__all__ = ["cost_lines", "counted", "policy_lines", "worth_lines"]

_CLASSES_MAX = 8
_ENGINES_MAX = 8

_Document = Mapping[str, Any]
"""Part of the status document."""


def worth_lines(worth: _Document) -> Iterator[str]:
    """Yield the time that restoring saved and lost, and what was decided."""
    saved, lost = shown_seconds(worth["saved_s"]), shown_seconds(worth["lost_s"])
    yield f"saved {saved} of time to first token, lost {lost}; {_net(worth)}"
    if worth["saved_s"]:
        measured_s = worth["saved_measured_s"]
        yield (
            f"  saved, measured {shown_seconds(measured_s)}, "
            f"predicted {shown_seconds(worth['saved_s'] - measured_s)}"
        )
    tiers = [
        f"{name} +{shown_seconds(each['saved_s'])} -{shown_seconds(each['lost_s'])}"
        for name, each in worth["tiers"].items()
        if each["saved_s"] or each["lost_s"]
    ]
    if tiers:
        yield f"  by tier: {', '.join(tiers)}"
    if not worth["decisions"]:
        return
    yield from wrapped(f"decided: {counted(worth['decisions'])}", "  ")
    predicted, actual = worth["predicted_s"], worth["actual_s"]
    for of, name in (("first_token", "time to first token"), ("restore", "restores")):
        if actual[of]:
            yield (
                f"  {name} {shown_seconds(actual[of])} (predicted {shown_seconds(predicted[of])})"
            )
    if worth["regret_s"]:
        yield f"  the other road would have saved {shown_seconds(worth['regret_s'])} (regret)"


def policy_lines(policy: _Document, worth: _Document) -> Iterator[str]:
    """Yield what is kept by which rule, and what was refused and missed."""
    remembered = shown_count(policy["remembered_blocks"])
    line = f"keeps by {policy['eviction']}, remembers {remembered} blocks"
    if policy["retained_bytes"]:
        line += f", retains {shown_bytes(policy['retained_bytes'])} for pins and hints"
    yield from wrapped(line)
    for tier, gate in policy["gates"].items():
        yield from wrapped(
            f"the gate to {tier} lets {100 * gate['share']:.0f} % through; took "
            f"{shown_count(gate['taken_blocks'])} of {shown_count(gate['offered_blocks'])} blocks",
            "  ",
        )
    for tier, rules in worth["refused_blocks"].items():
        if rules:
            yield from wrapped(f"refused by {tier}: {counted(rules)}", "  ")
    if worth["missed_blocks"]:
        yield from wrapped(f"missed: {counted(worth['missed_blocks'])}", "  ")
    yield from _classes(policy["classes"])


def cost_lines(cost: _Document) -> Iterator[str]:
    """Yield what routes and models are expected to take."""
    if cost["routes"]:
        yield "route              start   a block   bandwidth   P95/mean     samples"
    for name, route in cost["routes"].items():
        yield (
            f"{name:<15}{shown_seconds(route['start_s']):>9}{shown_seconds(route['per_block_s']):>10}"
            f"{shown_bytes(route['bytes_per_s']):>10}/s{route['p95_over_mean']:>10.1f}"
            f"{shown_count(route['samples']):>12}"
        )
    if cost["engines"]:
        yield "model        prefill of 4,096    a step     floor   P95/mean     samples"
    for name, engine in list(cost["engines"].items())[:_ENGINES_MAX]:
        yield (
            f"{plain(name)[:8]:<13}{shown_count(engine['tokens_per_s']):>9} tok/s"
            f"{shown_seconds(engine['step_s']):>12}{shown_seconds(engine['floor_s']):>10}"
            f"{engine['p95_over_mean']:>11.1f}{shown_count(engine['samples']):>12}"
        )
    for tier, reason in cost.get("unmeasured", {}).items():
        is_known = any(name.startswith(f"{tier}_") for name in cost["routes"])
        instead = "using earlier figures" if is_known else "using an estimate until it is read"
        yield from wrapped(f"{tier} was not measured: {reason}; {instead}")
    if cost["guarded"]:
        yield f"not used for a while, because restoring did not pay: {', '.join(cost['guarded'])}"


def _net(worth: _Document) -> str:
    if not worth["actual_s"]["restore"]:
        return "no engine has reported a restore"
    net_s = worth["saved_s"] - worth["lost_s"]
    return f"net benefit {'' if net_s >= 0 else '-'}{shown_seconds(abs(net_s))}"


def _classes(classes: list[_Document]) -> Iterator[str]:
    """Yield how deep prompts of each class come back."""
    if not classes:
        return
    yield "class of traffic            requests    offloads at most   reuse by depth"
    busiest = sorted(classes, key=lambda each: -each["requests"])
    for each in busiest[:_CLASSES_MAX]:
        name = plain(f"{each['kind'] or 'any'} {each['tenant'][:8]}").strip()
        if each["continues"] != "unknown":
            name += f" ({each['continues']})"
        most = each["max_offload_tokens"]
        limit = "all" if most is None else f"{shown_count(most)} tok"
        requests = shown_count(each["requests"])
        yield f"{name[:22]:<22}{requests:>14}{limit:>20}   {_reuse(each)}"
    if len(classes) > _CLASSES_MAX:
        yield f"and {len(classes) - _CLASSES_MAX} more"


def _reuse(each: _Document) -> str:
    """Return reuses per block stored, from the front of prompts on."""
    depths = [depth for depth in each["depths"] if depth["stored_blocks"]]
    shares = [f"{depth['reused_blocks'] / depth['stored_blocks']:.2f}" for depth in depths[:4]]
    return " ".join(shares) or "-"


def counted(counts: _Document) -> str:
    """Return counts by name, in words."""
    return ", ".join(f"{name} {shown_count(count)}" for name, count in counts.items())
