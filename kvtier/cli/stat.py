"""``kvtier stat``: what the daemon holds and has done."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import format_bytes, format_count, format_seconds, printable, wrap_lines
from kvtier.cli.options import parse_wait
from kvtier.v1 import operator_pb2 as pb

__all__ = [
    "add_options",
    "cost_lines",
    "format_counts",
    "policy_lines",
    "run",
    "secret_lines",
    "stat_text",
    "worth_lines",
]

_TIMEOUT_S = 1.0
"""With the time it takes to start, within the two seconds that a script may wait for an answer."""

_TROUBLED = frozenset({"degraded", "out"})
"""States that nobody asked for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument(
        "--check",
        action="store_true",
        help="print only what is wrong, a line each, and exit with 1 if anything is",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=parse_wait,
        const=2.0,
        metavar="SECONDS",
        help="print again every SECONDS (2)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the status once, or again and again until interrupted."""
    target = target_from(options)
    while True:
        told = call_daemon(
            target, lambda stub: stub.Stat(pb.StatRequest(), timeout=_TIMEOUT_S).json
        )
        code = _print(told, options)
        if not options.watch:
            return code
        time.sleep(options.watch)


def _print(told: str, options: argparse.Namespace) -> int:
    """Print what is wanted of a document; returns the exit code for it."""
    if options.check:
        wrong = _wrong(json.loads(told))
        for line in wrong:
            print(line, flush=True)
        return 1 if wrong else 0
    if options.watch and not options.json and sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    print(told if options.json else stat_text(json.loads(told)), flush=True)
    return 0


def _wrong(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each tier that is not as it was configured, and each secret's fault."""
    tiers = [
        printable(f"{name} is {tier['state']}: {tier['reason']}")
        for name, tier in document["tiers"].items()
        if tier["state"] in _TROUBLED
    ]
    return [*tiers, *secret_lines(document["config"])]


_KEY_SPACES_MAX = 10

_Document = Mapping[str, Any]
"""Part of the status document."""


def stat_text(document: _Document) -> str:
    """Return the whole document, or the parts of it that an operator looks at first."""
    who = f"kvtier {document['version']}, pid {document['pid']}, boot {document['boot']}"
    parts = [
        [f"{who}, up {document['uptime_s']:.0f} s", *worth_lines(document["worth"])],
        [*_tiers(document), *_reasons(document["tiers"]), *_stores(document["tiers"])],
        [*_misses(document)],
        [*_transfers(document["transfers"])],
        [*policy_lines(document["policy"], document["worth"])],
        [*cost_lines(document["cost"])],
        [*_key_spaces(document["key_spaces"])],
        [*_engines(document["engines"])],
        [*_ends(document), *_reload(document["config"]["last_reload"])],
        [line for told in secret_lines(document["config"]) for line in wrap_lines(told)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def secret_lines(config: _Document) -> list[str]:
    """Return a line for each secret that is refused or whose time is over or soon will be."""
    told = config.get("secrets", {}).items()  # older daemons tell of none
    return [printable(f"{name}: {each['fault']}") for name, each in told if each["fault"]]


def _tiers(document: _Document) -> Iterator[str]:
    yield "tier    state           used   capacity     blocks      tokens   hit blocks"
    hits = document["lookup_blocks"]["hit"]
    for name, tier in document["tiers"].items():
        if tier["state"] == "untold":  # what is not known is no zero
            yield f"{name:<8}{tier['state']:<9}{'-':>11}{'-':>11}{'-':>11}{'-':>12}{'-':>13}"
            continue
        used = f"{format_bytes(tier['used_bytes']):>11}{format_bytes(tier['capacity_bytes']):>11}"
        blocks = format_count(tier["blocks"])
        # The GPU's hits are the engine's own account, which is in tokens.
        hit = (
            format_count(hits[name]) if name in hits else f"{format_count(tier['hit_tokens'])} tok"
        )
        yield (
            f"{name:<8}{tier['state']:<9}{used}{blocks:>11}"
            f"{format_count(tier['tokens']):>12}{hit:>13}"
        )


def _reasons(tiers: _Document) -> Iterator[str]:
    for name, tier in tiers.items():
        if tier["reason"]:
            yield from wrap_lines(f"{name} is {tier['state']}: {tier['reason']}")
        if tier.get("hung_calls"):
            yield f"{name}: {tier['hung_calls']} calls hang"


def _stores(tiers: _Document) -> Iterator[str]:
    for name, tier in tiers.items():
        if "segments" in (detail := tier.get("detail", {})):
            yield from _store(name, detail)


def _store(name: str, detail: _Document) -> Iterator[str]:
    direct = "direct I/O" if detail.get("direct_io") else "through the page cache"
    held = format_bytes(detail.get("block_bytes", 0))
    yield f"{name} holds {held} of blocks in {detail['segments']} segments, {direct}"
    blocks = detail.get("written_blocks_bytes", 0)
    moved, other = detail.get("written_moved_bytes", 0), detail.get("written_metadata_bytes", 0)
    line = f"{name} wrote {format_bytes(blocks)} of blocks, {format_bytes(moved)} moved, "
    line += f"{format_bytes(other)} besides"
    if blocks:
        line += f": amplification {(blocks + moved + other) / blocks:.2f}"
    if "write_budget_bytes" in detail:
        line += f"; {format_bytes(detail['write_budget_bytes'])} may be written now"
    yield from wrap_lines(line)
    if detail.get("quarantined_blocks"):
        count = format_count(detail["quarantined_blocks"])
        yield f"{name} found {count} damaged blocks since its start"
    if detail.get("files_set_aside"):
        count, size = (
            format_count(detail["files_set_aside"]),
            format_bytes(detail["set_aside_bytes"]),
        )
        yield from wrap_lines(
            f"{name} files of another version, set aside: {count}, {size}. That version finds them "
            "again, and they go first when room is needed; with the daemon stopped, "
            "`kvtier fsck --remove-set-aside` removes them"
        )
    lost = [
        f"{format_count(detail[f'files_{what}_at_start'])} {what}"
        for what in ("dropped", "unreadable")
        if detail.get(f"files_{what}_at_start")
    ]
    if lost:
        yield f"{name} files at start: {', '.join(lost)}"


def _misses(document: _Document) -> Iterator[str]:
    line = f"blocks found nowhere  {format_count(document['lookup_blocks']['miss'])}"
    probed = document["probed_lookups"]
    if probed:
        line += f" (lookups at the remote tier: {format_counts(probed)})"
    yield from wrap_lines(line)
    for tier, reasons in document["miss_reasons"].items():
        if reasons:
            yield from wrap_lines(f"not served by {tier}: {format_counts(reasons)}")


def _transfers(transfers: _Document) -> Iterator[str]:
    yield "transfer           bytes   failed    count    average"
    for route, done in transfers.items():
        moved = f"{format_bytes(done['bytes']):>10}{format_bytes(done['failed_bytes']):>9}"
        count, average = "-", "-"  # what engines copy they time themselves
        if done["count"] is not None:
            count = format_count(done["count"])
            average = format_seconds(done["seconds"] / done["count"] if done["count"] else 0.0)
        yield f"{route:<14}{moved}{count:>9}{average:>11}"


def _key_spaces(spaces: list[_Document]) -> Iterator[str]:
    if not spaces:
        return
    yield "key space engine                             cpu         ssd      remote"
    for space in spaces[:_KEY_SPACES_MAX]:
        name = printable(space["names"][0]) if space["names"] else "?"
        sizes = (format_bytes(tier["bytes"]) for tier in space["tiers"].values())
        columns = "".join(f"{size:>12}" for size in sizes)
        yield f"{space['key_space'][:8]}  {name[:24]:<24}{columns}"
    if len(spaces) > _KEY_SPACES_MAX:
        yield f"and {len(spaces) - _KEY_SPACES_MAX} more"


def _engines(engines: list[_Document]) -> Iterator[str]:
    yield "engine                          pid  transport    GPU used  loading  storing"
    for engine in engines:
        used = format_bytes(engine["gpu_used_bytes"]) if engine["gpu_capacity_bytes"] else "-"
        yield (
            f"{printable(engine['engine'])[:28]:<28}{engine['pid']:>7}  {engine['transport']:<10}"
            f"{used:>11}{engine['loads']:>9}{engine['stores']:>9}"
        )
    if not engines:
        yield "none"


def _ends(document: _Document) -> Iterator[str]:
    yield f"leases {document['leases']}, pins {document['pins']}"
    if document["background_faults"]:
        yield f"faults in the background: {format_counts(document['background_faults'])}"


def _reload(last: _Document | None) -> Iterator[str]:
    """Yield what became of the last reload."""
    if last is None:
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["at_s"]))
    yield f"configuration: reload {last['outcome']} at {at}"
    for line in (*last["changed"], *last["reasons"]):
        yield from wrap_lines(line, "  ")


_CLASSES_MAX = 8
_ENGINES_MAX = 8


def worth_lines(worth: _Document) -> Iterator[str]:
    """Yield the time that restoring saved and lost, and what was decided."""
    saved, lost = format_seconds(worth["saved_s"]), format_seconds(worth["lost_s"])
    yield f"saved {saved} of time to first token, lost {lost}; {_net(worth)}"
    if worth["saved_s"]:
        measured_s = worth["saved_measured_s"]
        yield (
            f"  saved, measured {format_seconds(measured_s)}, "
            f"predicted {format_seconds(worth['saved_s'] - measured_s)}"
        )
    tiers = [
        f"{name} +{format_seconds(each['saved_s'])} -{format_seconds(each['lost_s'])}"
        for name, each in worth["tiers"].items()
        if each["saved_s"] or each["lost_s"]
    ]
    if tiers:
        yield f"  by tier: {', '.join(tiers)}"
    if not worth["decisions"]:
        return
    yield from wrap_lines(f"decided: {format_counts(worth['decisions'])}", "  ")
    predicted, actual = worth["predicted_s"], worth["actual_s"]
    for of, name in (("first_token", "time to first token"), ("restore", "restores")):
        if actual[of]:
            yield (
                f"  {name} {format_seconds(actual[of])} (predicted {format_seconds(predicted[of])})"
            )
    if worth["regret_s"]:
        yield f"  the other road would have saved {format_seconds(worth['regret_s'])} (regret)"


def policy_lines(policy: _Document, worth: _Document) -> Iterator[str]:
    """Yield what is kept by which rule, and what was refused and missed."""
    remembered = format_count(policy["remembered_blocks"])
    line = f"keeps by {policy['eviction']}, remembers {remembered} blocks"
    if policy["retained_bytes"]:
        line += f", retains {format_bytes(policy['retained_bytes'])} for pins and hints"
    yield from wrap_lines(line)
    for tier, gate in policy["gates"].items():
        yield from wrap_lines(
            f"the gate to {tier} lets {100 * gate['share']:.0f} % through; took "
            f"{format_count(gate['taken_blocks'])} of {format_count(gate['offered_blocks'])} "
            "blocks",
            "  ",
        )
    for tier, rules in worth["refused_blocks"].items():
        if rules:
            yield from wrap_lines(f"refused by {tier}: {format_counts(rules)}", "  ")
    if worth["missed_blocks"]:
        yield from wrap_lines(f"missed: {format_counts(worth['missed_blocks'])}", "  ")
    yield from _classes(policy["classes"])


def cost_lines(cost: _Document) -> Iterator[str]:
    """Yield what routes and models are expected to take."""
    if cost["routes"]:
        yield "route              start   a block   bandwidth   P95/mean     samples"
    for name, route in cost["routes"].items():
        yield (
            f"{name:<15}{format_seconds(route['start_s']):>9}{format_seconds(route['per_block_s']):>10}"
            f"{format_bytes(route['bytes_per_s']):>10}/s{route['p95_over_mean']:>10.1f}"
            f"{format_count(route['samples']):>12}"
        )
    if cost["engines"]:
        yield "model        prefill of 4,096    a step     floor   P95/mean     samples"
    for name, engine in list(cost["engines"].items())[:_ENGINES_MAX]:
        yield (
            f"{printable(name)[:8]:<13}{format_count(engine['tokens_per_s']):>9} tok/s"
            f"{format_seconds(engine['step_s']):>12}{format_seconds(engine['floor_s']):>10}"
            f"{engine['p95_over_mean']:>11.1f}{format_count(engine['samples']):>12}"
        )
    for tier, reason in cost.get("unmeasured", {}).items():
        is_known = any(name.startswith(f"{tier}_") for name in cost["routes"])
        instead = "using earlier figures" if is_known else "using an estimate until it is read"
        yield from wrap_lines(f"{tier} was not measured: {reason}; {instead}")
    if cost["guarded"]:
        yield f"not used for a while, because restoring did not pay: {', '.join(cost['guarded'])}"


def _net(worth: _Document) -> str:
    if not worth["actual_s"]["restore"]:
        return "no engine has reported a restore"
    net_s = worth["saved_s"] - worth["lost_s"]
    return f"net benefit {'' if net_s >= 0 else '-'}{format_seconds(abs(net_s))}"


def _classes(classes: list[_Document]) -> Iterator[str]:
    """Yield how deep prompts of each class come back."""
    if not classes:
        return
    yield "class of traffic            requests    offloads at most   reuse by depth"
    busiest = sorted(classes, key=lambda each: -each["requests"])
    for each in busiest[:_CLASSES_MAX]:
        name = printable(f"{each['kind'] or 'any'} {each['tenant'][:8]}").strip()
        if each["continues"] != "unknown":
            name += f" ({each['continues']})"
        most = each["max_offload_tokens"]
        limit = "all" if most is None else f"{format_count(most)} tok"
        requests = format_count(each["requests"])
        yield f"{name[:22]:<22}{requests:>14}{limit:>20}   {_reuse(each)}"
    if len(classes) > _CLASSES_MAX:
        yield f"and {len(classes) - _CLASSES_MAX} more"


def _reuse(each: _Document) -> str:
    """Return reuses per block stored, from the front of prompts on."""
    depths = [depth for depth in each["depths"] if depth["stored_blocks"]]
    shares = [f"{depth['reused_blocks'] / depth['stored_blocks']:.2f}" for depth in depths[:4]]
    return " ".join(shares) or "-"


def format_counts(counts: _Document) -> str:
    """Return counts by name, in words."""
    return ", ".join(f"{name} {format_count(count)}" for name, count in counts.items())
