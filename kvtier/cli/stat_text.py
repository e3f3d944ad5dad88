"""The status document as text for a terminal: 80 columns, no colour."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.cli.shown import plain, shown_bytes, shown_count, shown_seconds, wrapped
from kvtier.cli.stat_worth import cost_lines, counted, policy_lines, worth_lines

__all__ = ["secret_lines", "stat_text"]

_KEY_SPACES_MAX = 10

_Document = Mapping[str, Any]
"""Part of the status document."""


def stat_text(document: _Document) -> str:
    """Return the whole document, or the parts of it that an operator looks at first."""
    who = f"kvtier {document['version']}, pid {document['pid']}, boot {document['boot']}"
    parts = [
        [f"{who}, up {document['uptime_s']:.0f} s", *worth_lines(document["worth"])],
        [*_tiers(document), *_reasons(document["tiers"]), *_ssd(document["tiers"]["ssd"])],
        [*_misses(document)],
        [*_transfers(document["transfers"])],
        [*policy_lines(document["policy"], document["worth"])],
        [*cost_lines(document["cost"])],
        [*_key_spaces(document["key_spaces"])],
        [*_engines(document["engines"])],
        [*_ends(document), *_reload(document["config"]["last_reload"])],
        [line for told in secret_lines(document["config"]) for line in wrapped(told)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def secret_lines(config: _Document) -> list[str]:
    """Return a line for each secret that is refused or whose time is over or soon will be."""
    told = config.get("secrets", {}).items()  # older daemons tell of none
    return [plain(f"{name}: {each['fault']}") for name, each in told if each["fault"]]


def _tiers(document: _Document) -> Iterator[str]:
    yield "tier    state           used   capacity     blocks      tokens   hit blocks"
    hits = document["lookup_blocks"]["hit"]
    for name, tier in document["tiers"].items():
        if tier["state"] == "untold":  # what is not known is no zero
            yield f"{name:<8}{tier['state']:<9}{'-':>11}{'-':>11}{'-':>11}{'-':>12}{'-':>13}"
            continue
        used = f"{shown_bytes(tier['used_bytes']):>11}{shown_bytes(tier['capacity_bytes']):>11}"
        blocks = shown_count(tier["blocks"])
        # The GPU's hits are the engine's own account, which is in tokens.
        hit = shown_count(hits[name]) if name in hits else f"{shown_count(tier['hit_tokens'])} tok"
        yield (
            f"{name:<8}{tier['state']:<9}{used}{blocks:>11}"
            f"{shown_count(tier['tokens']):>12}{hit:>13}"
        )


def _reasons(tiers: _Document) -> Iterator[str]:
    for name, tier in tiers.items():
        if tier["reason"]:
            yield from wrapped(f"{name} is {tier['state']}: {tier['reason']}")
        if tier.get("hung_calls"):
            yield f"{name}: {tier['hung_calls']} calls hang"


def _ssd(tier: _Document) -> Iterator[str]:
    detail = tier.get("detail")
    if not detail or "segments" not in detail:
        return
    direct = "direct I/O" if detail.get("direct_io") else "through the page cache"
    held = shown_bytes(detail.get("block_bytes", 0))
    yield f"ssd holds {held} of blocks in {detail['segments']} segments, {direct}"
    blocks = detail.get("written_blocks_bytes", 0)
    moved, other = detail.get("written_moved_bytes", 0), detail.get("written_metadata_bytes", 0)
    line = f"ssd wrote {shown_bytes(blocks)} of blocks, {shown_bytes(moved)} moved, "
    line += f"{shown_bytes(other)} besides"
    if blocks:
        line += f": amplification {(blocks + moved + other) / blocks:.2f}"
    if "write_budget_bytes" in detail:
        line += f"; {shown_bytes(detail['write_budget_bytes'])} may be written now"
    yield from wrapped(line)
    if detail.get("quarantined_blocks"):
        count = shown_count(detail["quarantined_blocks"])
        yield f"ssd found {count} damaged blocks since its start"
    if detail.get("files_set_aside"):
        count, size = shown_count(detail["files_set_aside"]), shown_bytes(detail["set_aside_bytes"])
        yield from wrapped(
            f"ssd files of another version, set aside: {count}, {size}. That version finds them "
            "again, and they go first when room is needed; with the daemon stopped, "
            "`kvtier fsck --remove-set-aside` removes them"
        )
    lost = [
        f"{shown_count(detail[f'files_{what}_at_start'])} {what}"
        for what in ("dropped", "unreadable")
        if detail.get(f"files_{what}_at_start")
    ]
    if lost:
        yield f"ssd files at start: {', '.join(lost)}"


def _misses(document: _Document) -> Iterator[str]:
    line = f"blocks found nowhere  {shown_count(document['lookup_blocks']['miss'])}"
    probed = document["probed_lookups"]
    if probed:
        line += f" (lookups at the remote tier: {counted(probed)})"
    yield from wrapped(line)
    for tier, reasons in document["miss_reasons"].items():
        if reasons:
            yield from wrapped(f"not served by {tier}: {counted(reasons)}")


def _transfers(transfers: _Document) -> Iterator[str]:
    yield "transfer           bytes   failed    count    average"
    for route, done in transfers.items():
        moved = f"{shown_bytes(done['bytes']):>10}{shown_bytes(done['failed_bytes']):>9}"
        count, average = "-", "-"  # what engines copy they time themselves
        if done["count"] is not None:
            count = shown_count(done["count"])
            average = shown_seconds(done["seconds"] / done["count"] if done["count"] else 0.0)
        yield f"{route:<14}{moved}{count:>9}{average:>11}"


def _key_spaces(spaces: list[_Document]) -> Iterator[str]:
    if not spaces:
        return
    yield "key space engine                             cpu         ssd      remote"
    for space in spaces[:_KEY_SPACES_MAX]:
        name = plain(space["names"][0]) if space["names"] else "?"
        sizes = (shown_bytes(tier["bytes"]) for tier in space["tiers"].values())
        columns = "".join(f"{size:>12}" for size in sizes)
        yield f"{space['key_space'][:8]}  {name[:24]:<24}{columns}"
    if len(spaces) > _KEY_SPACES_MAX:
        yield f"and {len(spaces) - _KEY_SPACES_MAX} more"


def _engines(engines: list[_Document]) -> Iterator[str]:
    yield "engine                          pid  transport    GPU used  loading  storing"
    for engine in engines:
        used = shown_bytes(engine["gpu_used_bytes"]) if engine["gpu_capacity_bytes"] else "-"
        yield (
            f"{plain(engine['engine'])[:28]:<28}{engine['pid']:>7}  {engine['transport']:<10}"
            f"{used:>11}{engine['loads']:>9}{engine['stores']:>9}"
        )
    if not engines:
        yield "none"


def _ends(document: _Document) -> Iterator[str]:
    yield f"leases {document['leases']}, pins {document['pins']}"
    if document["background_faults"]:
        yield f"faults in the background: {counted(document['background_faults'])}"


def _reload(last: _Document | None) -> Iterator[str]:
    """Yield what became of the last reload."""
    if last is None:
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["at_s"]))
    yield f"configuration: reload {last['outcome']} at {at}"
    for line in (*last["changed"], *last["reasons"]):
        yield from wrapped(line, "  ")
