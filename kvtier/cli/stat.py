"""``kvtier stat``: prints the daemon's status document, as text of 80 columns or as JSON."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier.cli.call import add_target_options, fetch_status, target_from
from kvtier.cli.formatting import (
    count_noun,
    format_bytes,
    format_count,
    format_counts,
    format_row,
    format_seconds,
    join_parts,
    printable,
    wrap_lines,
)
from kvtier.cli.options import parse_wait

__all__ = ["add_options", "run", "stat_text"]

_FAULTY = frozenset({"degraded", "out"})
"""States that no operator asked for."""

_ROWS_MAX = 8
"""Rows of a table of traffic classes, engines or key spaces."""

_TIERS = (-8, -9, 11, 11, 11, 12, 13)
_TRANSFERS = (-14, 10, 9, 9, 11)
_KEY_SPACES = (-10, -24, 12, 12, 12)
_ENGINES = (-28, 7, 11, 11, 9, 9)
_ROUTES = (-15, 9, 10, 12, 10, 12)
_MODELS = (-13, 15, 12, 10, 11, 12)
_CLASSES = (-22, 14, 20)
"""Column widths of the tables; a negative width aligns to the left."""

_Document = Mapping[str, Any]
"""Part of the status document."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--check",
        action="store_true",
        help="print one line per problem; exit 1 if there are any",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=parse_wait,
        const=2.0,
        metavar="TIME",
        help="repeat every TIME (default: 2s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the status once, or repeatedly until interrupted."""
    target = target_from(options)
    while True:
        code = _print(fetch_status(target), options)
        if not options.watch:
            return code
        time.sleep(options.watch)


def _print(document: _Document, options: argparse.Namespace) -> int:
    """Print the status in the chosen form; returns the exit code."""
    if options.check:
        problems = _problems(document)
        for line in problems:
            print(line, flush=True)
        return 1 if problems else 0
    if options.watch and not options.json and sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    print(json.dumps(document) if options.json else stat_text(document), flush=True)
    return 0


def _problems(document: _Document) -> list[str]:
    """Return a line for each faulty tier and each rejected or expiring secret."""
    tiers = [
        printable(f"{name} is {tier['state']}: {tier['reason']}")
        for name, tier in document["tiers"].items()
        if tier["state"] in _FAULTY
    ]
    return [*tiers, *_secrets(document["config"])]


def stat_text(document: _Document) -> str:
    """Return the status as text, the most important parts first."""
    head = f"kvtier {document['version']}, pid {document['pid']}, boot {document['boot']}"
    parts: list[Sequence[str]] = [
        [f"{head}, up {document['uptime_s']:.0f} s", *_benefit(document["worth"])],
        [*_tiers(document), *_reasons(document["tiers"]), *_stores(document["tiers"])],
        [*_misses(document)],
        [*_transfers(document["transfers"])],
        [*_policy(document["policy"], document["worth"]), *_classes(document["policy"]["classes"])],
        [*_cost(document["cost"])],
        [*_key_spaces(document["key_spaces"])],
        [*_engines(document["engines"])],
        [*_holds(document), *_reload(document["config"]["last_reload"])],
        [line for secret in _secrets(document["config"]) for line in wrap_lines(secret)],
    ]
    return join_parts(parts)


def _benefit(worth: _Document) -> Iterator[str]:
    """Yield the time that restoring saved and lost, and the counts of decisions."""
    saved_s, lost_s, measured_s = worth["saved_s"], worth["lost_s"], worth["saved_measured_s"]
    saved, lost = format_seconds(saved_s), format_seconds(lost_s)
    net_s = saved_s - lost_s
    net = f"net benefit {'' if net_s >= 0 else '-'}{format_seconds(abs(net_s))}"
    if not worth["actual_s"]["restore"]:
        net = "no engine has reported a restore yet"
    yield f"time to first token: saved {saved}, lost {lost}; {net}"
    if saved_s:
        measured, predicted = format_seconds(measured_s), format_seconds(saved_s - measured_s)
        yield f"  saved: measured {measured}, predicted {predicted}"
    tiers = [
        f"{name} +{format_seconds(each['saved_s'])} -{format_seconds(each['lost_s'])}"
        for name, each in worth["tiers"].items()
        if each["saved_s"] or each["lost_s"]
    ]
    if tiers:
        yield f"  by tier: {', '.join(tiers)}"
    if not worth["decisions"]:
        return
    yield from wrap_lines(f"decisions: {format_counts(worth['decisions'])}", "  ")
    for of, name in (("first_token", "time to first token"), ("restore", "restores")):
        if worth["actual_s"][of]:
            actual, predicted_s = format_seconds(worth["actual_s"][of]), worth["predicted_s"][of]
            yield f"  {name}: {actual} (predicted {format_seconds(predicted_s)})"
    if worth["regret_s"]:
        yield f"  regret: the alternative would have saved {format_seconds(worth['regret_s'])}"


def _tiers(document: _Document) -> Iterator[str]:
    heads = ("tier", "state", "used", "capacity", "blocks", "tokens", "hit blocks")
    yield format_row(_TIERS, heads)
    hits = document["lookup_blocks"]["hit"]
    for name, tier in document["tiers"].items():
        # The engines report the GPU's hits, in tokens.
        hit = format_count(hits[name] if name in hits else tier["hit_tokens"])
        cells = [
            format_bytes(tier["used_bytes"]),
            format_bytes(tier["capacity_bytes"]),
            format_count(tier["blocks"]),
            format_count(tier["tokens"]),
            hit if name in hits else f"{hit} tok",
        ]
        if tier["state"] == "unknown":
            cells = ["-"] * len(cells)
        yield format_row(_TIERS, (name, tier["state"], *cells))


def _reasons(tiers: _Document) -> Iterator[str]:
    for name, tier in tiers.items():
        if tier["reason"]:
            yield from wrap_lines(f"{name} is {tier['state']}: {tier['reason']}")
        if tier.get("hung_calls"):
            yield f"{name}: {count_noun(tier['hung_calls'], 'stuck call')}"


def _stores(tiers: _Document) -> Iterator[str]:
    for name, tier in tiers.items():
        if "segments" in (detail := tier.get("detail", {})):
            yield from _store(name, detail)


def _store(name: str, detail: _Document) -> Iterator[str]:
    access = "direct I/O" if detail.get("direct_io") else "through the page cache"
    held, segments = format_bytes(detail.get("block_bytes", 0)), detail["segments"]
    yield f"{name}: {held} of blocks in {count_noun(segments, 'segment')}, {access}"
    blocks = detail.get("written_blocks_bytes", 0)
    moved, other = detail.get("written_moved_bytes", 0), detail.get("written_metadata_bytes", 0)
    line = f"{name} writes: blocks {format_bytes(blocks)}, relocated {format_bytes(moved)}, "
    line += f"metadata {format_bytes(other)}"
    if blocks:
        line += f", amplification {(blocks + moved + other) / blocks:.2f}"
    if "write_budget_bytes" in detail:
        line += f"; write budget left {format_bytes(detail['write_budget_bytes'])}"
    yield from wrap_lines(line)
    if detail.get("quarantined_blocks"):
        yield f"{name}: {count_noun(detail['quarantined_blocks'], 'damaged block')} since the start"
    if detail.get("files_set_aside"):
        count, size = detail["files_set_aside"], format_bytes(detail["set_aside_bytes"])
        yield from wrap_lines(
            f"{name}: {count_noun(count, 'file')} of another version set aside, {size}. That "
            "version can still read them; they are removed first when space is needed. To remove "
            "them, stop the daemon and run `kvtier fsck --remove-set-aside`"
        )
    lost = [
        f"{format_count(detail[f'files_{what}_at_start'])} {what}"
        for what in ("dropped", "unreadable")
        if detail.get(f"files_{what}_at_start")
    ]
    if lost:
        yield f"{name} files at start: {', '.join(lost)}"


def _misses(document: _Document) -> Iterator[str]:
    line = f"blocks not found in any tier  {format_count(document['lookup_blocks']['miss'])}"
    probed = document["probed_lookups"]
    if probed:
        line += f" (lookups in the remote tier: {format_counts(probed)})"
    yield from wrap_lines(line)
    for tier, reasons in document["miss_reasons"].items():
        if reasons:
            yield from wrap_lines(f"not served by {tier}: {format_counts(reasons)}")


def _transfers(transfers: _Document) -> Iterator[str]:
    yield format_row(_TRANSFERS, ("transfer", "bytes", "failed", "count", "average"))
    for route, done in transfers.items():
        count, average = "-", "-"  # engines time their own copies
        if done["count"] is not None:
            count = format_count(done["count"])
            average = format_seconds(done["seconds"] / done["count"] if done["count"] else 0.0)
        moved, failed = format_bytes(done["bytes"]), format_bytes(done["failed_bytes"])
        yield format_row(_TRANSFERS, (route, moved, failed, count, average))


def _policy(policy: _Document, worth: _Document) -> Iterator[str]:
    """Yield the eviction policy, and the blocks that were refused and missed."""
    tracked = count_noun(policy["remembered_blocks"], "block")
    line = f"eviction policy {policy['eviction']}, tracking {tracked}"
    if policy["retained_bytes"]:
        line += f", {format_bytes(policy['retained_bytes'])} retained for pins and hints"
    yield from wrap_lines(line)
    for tier, gate in policy["gates"].items():
        taken, offered = gate["taken_blocks"], gate["offered_blocks"]
        yield from wrap_lines(
            f"gate to {tier} admits {100 * gate['share']:.0f} %; admitted {format_count(taken)} of "
            f"{count_noun(offered, 'block')}",
            "  ",
        )
    for tier, rules in worth["refused_blocks"].items():
        if rules:
            yield from wrap_lines(f"refused by {tier}: {format_counts(rules)}", "  ")
    if worth["missed_blocks"]:
        yield from wrap_lines(f"missed: {format_counts(worth['missed_blocks'])}", "  ")


def _classes(classes: Sequence[_Document]) -> Iterator[str]:
    """Yield the reuse of each traffic class by depth."""
    if not classes:
        return
    heads = ("traffic class", "requests", "max offload depth")
    yield f"{format_row(_CLASSES, heads)}   reuse by depth"
    busiest = sorted(classes, key=lambda each: -each["requests"])
    for each in busiest[:_ROWS_MAX]:
        name = printable(f"{each['kind'] or 'any'} {each['tenant'][:8]}").strip()
        if each["continues"] != "unknown":
            name += f" ({each['continues']})"
        most = each["max_offload_tokens"]
        limit = "all" if most is None else f"{format_count(most)} tok"
        cells = (name[:22], format_count(each["requests"]), limit)
        yield f"{format_row(_CLASSES, cells)}   {_reuse(each)}"
    yield from _more(len(classes))


def _reuse(each: _Document) -> str:
    """Return reuses per stored block, from the front of prompts on."""
    depths = [depth for depth in each["depths"] if depth["stored_blocks"]]
    shares = [f"{depth['reused_blocks'] / depth['stored_blocks']:.2f}" for depth in depths[:4]]
    return " ".join(shares) or "-"


def _cost(cost: _Document) -> Iterator[str]:
    """Yield the cost model's estimates for routes and models."""
    if cost["routes"]:
        heads = ("route", "start", "per block", "bandwidth", "P95/mean", "samples")
        yield format_row(_ROUTES, heads)
    for name, route in cost["routes"].items():
        cells = (
            name,
            format_seconds(route["start_s"]),
            format_seconds(route["per_block_s"]),
            f"{format_bytes(route['bytes_per_s'])}/s",
            f"{route['p95_over_mean']:.1f}",
            format_count(route["samples"]),
        )
        yield format_row(_ROUTES, cells)
    if cost["engines"]:
        heads = ("model", "prefill of 4096", "per step", "floor", "P95/mean", "samples")
        yield format_row(_MODELS, heads)
    for name, engine in list(cost["engines"].items())[:_ROWS_MAX]:
        cells = (
            printable(name)[:8],
            f"{format_count(engine['tokens_per_s'])} tok/s",
            format_seconds(engine["step_s"]),
            format_seconds(engine["floor_s"]),
            f"{engine['p95_over_mean']:.1f}",
            format_count(engine["samples"]),
        )
        yield format_row(_MODELS, cells)
    for tier, reason in cost.get("unmeasured", {}).items():
        is_known = any(name.startswith(f"{tier}_") for name in cost["routes"])
        instead = "using earlier figures" if is_known else "using an estimate until the first read"
        yield from wrap_lines(f"{tier} was not measured: {reason}; {instead}")
    if cost["guarded"]:
        yield f"paused because restoring did not pay off: {', '.join(cost['guarded'])}"


def _key_spaces(spaces: Sequence[_Document]) -> Iterator[str]:
    if not spaces:
        return
    yield format_row(_KEY_SPACES, ("key space", "engine", "cpu", "ssd", "remote"))
    for space in spaces[:_ROWS_MAX]:
        name = printable(space["names"][0]) if space["names"] else "?"
        sizes = (format_bytes(tier["bytes"]) for tier in space["tiers"].values())
        yield format_row(_KEY_SPACES, (space["key_space"][:8], name[:24], *sizes))
    yield from _more(len(spaces))


def _engines(engines: Sequence[_Document]) -> Iterator[str]:
    heads = ("engine", "pid", "  transport", "GPU used", "loading", "storing")
    yield format_row(_ENGINES, heads)
    for engine in engines:
        used = format_bytes(engine["gpu_used_bytes"]) if engine["gpu_capacity_bytes"] else "-"
        name, pid = printable(engine["engine"])[:28], str(engine["pid"])
        counts = (str(engine["loads"]), str(engine["stores"]))
        yield format_row(_ENGINES, (name, pid, f"  {engine['transport']:<9}", used, *counts))
    if not engines:
        yield "none"


def _holds(document: _Document) -> Iterator[str]:
    yield f"leases {document['leases']}, pins {document['pins']}"
    if document["background_faults"]:
        yield f"background faults: {format_counts(document['background_faults'])}"


def _reload(last: _Document | None) -> Iterator[str]:
    """Yield the outcome of the last reload."""
    if last is None:
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["at_s"]))
    yield f"configuration: reload {last['outcome']} at {at}"
    for line in (*last["changed"], *last["reasons"]):
        yield from wrap_lines(line, "  ")


def _secrets(config: _Document) -> list[str]:
    """Return a line for each secret that was rejected, or has expired or soon will."""
    secrets = config.get("secrets", {})  # missing in older versions
    return [
        printable(f"{name}: {each['fault']}") for name, each in secrets.items() if each["fault"]
    ]


def _more(num_rows: int) -> Iterator[str]:
    if num_rows > _ROWS_MAX:
        yield f"and {num_rows - _ROWS_MAX} more"
