"""One frame of ``kvtier top``: lines that fit the window, the most important ones on top.

Color is never the only signal. A window of 24 lines shows all parts, a larger one more engines and
requests. Below 80 columns lines end at the last whole word.
"""

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvtier.cli.formatting import (
    COLUMNS,
    format_bytes,
    format_count,
    format_elapsed,
    format_seconds,
    printable,
)
from kvtier.cli.top import StatusView
from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS

__all__ = ["WindowSize", "render_frame"]

_BAR = 10
_FLOWS_OF = ("gpu", *SLOW_TIERS)
_STATES: Mapping[str, str] = {"up": "green", "degraded": "yellow", "out": "bold red"}

_TIER_COLUMNS = (-8, -10, -16, 10, 11, 12, 13)
_ENGINE_COLUMNS = (-24, 9, 9, 10, 9, 9, 10)
_REQUEST_COLUMNS = (-19, 8, 10, 10, -8, -8, 8, 9)
"""Column widths; a negative width aligns to the left."""

_NAME_SPARE_MAX = 40

_ENGINES_SHARE = 3
"""Engines get a third of the remaining lines, requests the rest."""

_PROBLEM_LINES_MAX = 3

_ROOMY_LINES = 30
"""Smaller windows show another request instead of an empty line."""

_Lines = list[Text]

_Document = Mapping[str, Any]
"""The status document or a part of it."""


@dataclass(frozen=True, slots=True)
class WindowSize:
    """Columns and lines of the window, and whether it can only show ASCII."""

    columns: int
    lines: int
    is_ascii: bool = False


def render_frame(view: StatusView, size: WindowSize, hint: str = "") -> _Lines:
    """Return the lines of a frame; ``hint`` explains the keys."""
    problem = textwrap.wrap(printable(view.problem), max(20, size.columns))[:_PROBLEM_LINES_MAX]
    problems = [Text(line, style="bold red") for line in problem]
    if view.document is None:
        lines = [Text("kvtier top", style="bold"), Text(), *(problems or [Text("connecting")])]
    else:
        lines = [_title(view, view.document, size, hint), *_benefit(view.document), *problems]
        lines += _body(view.document, size, size.lines - len(lines))
    return [_cut(line, size) for line in lines[: size.lines]]


def _body(now: _Document, size: WindowSize, most: int) -> _Lines:
    """Return everything below the benefit line, in up to ``most`` lines."""
    lately = now["grown"]["lately"]
    gap = [Text()] if size.lines >= _ROOMY_LINES else []
    lines = [*gap, *_tiers(now, size), *gap, *_flows(lately, size)]
    lines += [*gap, *_decisions(lately, size), _current(now), Text()]
    # Reserve two headings and the line between them.
    num_engines = min(len(now["engines"]), max(2, (most - len(lines) - 3) // _ENGINES_SHARE))
    lines += [*_engines(now, num_engines, size), Text()]
    return [*lines, *_requests(now["requests"], max(0, most - len(lines) - 1), size)]


def _title(view: StatusView, now: _Document, size: WindowSize, hint: str) -> Text:
    line = Text(f"kvtier {now['version']}", style="bold")
    line.append(f"  pid {now['pid']}  up {format_elapsed(now['uptime_s'])}", style="not bold")
    at = time.strftime("%H:%M:%S", time.localtime(now["time_s"]))
    right = f"{format_elapsed(view.age_s)} old" if view.is_old else f"{at}  {hint}".rstrip()
    line.append(" " * max(2, size.columns - len(line) - len(right)))
    return line.append(right, style="bold reverse" if view.is_old else "not bold dim")


def _benefit(now: _Document) -> _Lines:
    """Show the time to first token that restoring saved."""
    minute, worth = now["grown"]["minute"], now["worth"]
    saved_s, lost_s = minute["saved_s"], minute["lost_s"]
    line = Text()
    if saved_s or lost_s:
        without_s = minute["actual_s"] + saved_s - lost_s
        line.append(f"saved {_signed(saved_s - lost_s)}", style="bold green")
        line.append(f" of {format_seconds(without_s)} time to first token")
    else:
        line.append("no restores")
    line.append(f" in the last {format_elapsed(minute['seconds'])}")
    total = Text(
        f"since start: saved {format_seconds(worth['saved_s'])} "
        f"({format_seconds(worth['saved_measured_s'])} measured), "
        f"lost {format_seconds(worth['lost_s'])}, regret {format_seconds(worth['regret_s'])}"
    )
    return [line, total]


def _tiers(now: _Document, size: WindowSize) -> Iterator[Text]:
    heads = ("tier", "state", "occupied", "used", "capacity", "blocks", "served")
    yield _heading(_row(_TIER_COLUMNS, heads))
    lately = now["grown"]["lately"]
    for name, tier in now["tiers"].items():
        used, capacity, state = tier["used_bytes"], tier["capacity_bytes"], str(tier["state"])
        is_known = state != "unknown"
        cells = (
            name,
            state,
            _bar(used / capacity if capacity else None, size),
            format_bytes(used) if is_known else "-",
            format_bytes(capacity) if capacity else "-",
            format_count(tier["blocks"]) if is_known else "-",
            f"{_short(_rate(lately['served_tokens'][name], lately))} tok/s",
        )
        line = Text(_row(_TIER_COLUMNS, cells))
        line.stylize(_STATES.get(state, "dim"), 8, 18)
        yield line
        if tier["reason"]:
            yield Text(f"        {printable(tier['reason'])}", style=_STATES.get(state, "dim"))


def _bar(share: float | None, size: WindowSize) -> str:
    if share is None:
        return ""
    full, empty = ("#", ".") if size.is_ascii else ("█", "░")
    num_full = round(_BAR * min(share, 1.0))
    return f"{full * num_full}{empty * (_BAR - num_full)}{100 * share:>4.0f}%"


def _flows(lately: _Document, size: WindowSize) -> Iterator[Text]:
    """Show the transfers between the CPU tier and each other tier."""
    away, back = ("->", "<-") if size.is_ascii else ("→", "←")
    for arrow, route in ((away, "cpu_to_{}"), (back, "{}_to_cpu")):
        line = Text()
        for other in _FLOWS_OF:
            rate = _rate(lately["moved_bytes"][route.format(other)], lately)
            flow = f"cpu {arrow} {other}"
            line.append(f"{flow:<15}{format_bytes(rate) + '/s':>10}  ", "" if rate else "dim")
        yield line


def _decisions(lately: _Document, size: WindowSize) -> Iterator[Text]:
    for what, name in (("decisions", "decisions"), ("missed blocks", "missed_blocks")):
        rates = {each: _rate(number, lately) for each, number in lately[name].items() if number}
        yield _rates(what, sorted(rates.items(), key=lambda each: -each[1]), size)


def _rates(what: str, rates: Sequence[tuple[str, float]], size: WindowSize) -> Text:
    """Show as many rates as fit."""
    line = Text(f"{what:<15}")
    for number, (name, rate) in enumerate(rates):
        shown = f"{', ' if number else ''}{name} {_short(rate)}/s"
        if len(line) + len(shown) > size.columns:
            break
        line.append(shown)
    return line if rates else line.append("none", style="dim")


def _current(now: _Document) -> Text:
    parts = [f"leases {format_count(now['leases'])}", f"pins {format_count(now['pins'])}"]
    for name, tier in now["tiers"].items():
        if "write_budget_bytes" in (detail := tier.get("detail", {})):
            parts.append(f"{name} write budget {format_bytes(detail['write_budget_bytes'])}")
    if now["cost"]["guarded"]:
        parts.append(f"paused: {', '.join(now['cost']['guarded'])}")
    return Text(f"{'current':<15}{', '.join(parts)}")


def _engines(now: _Document, most: int, size: WindowSize) -> Iterator[Text]:
    columns = _widened(_ENGINE_COLUMNS, size)
    heads = ("engine", "requests", "tokens", "restored", "TTFT", "running", "GPU used")
    yield _heading(_row(columns, heads))
    engines = now["engines"]
    for each in engines[: most - 1 if len(engines) > most else most]:
        yield Text(_row(columns, _engine(each, now["grown"]["lately"])))
    if len(engines) > most:
        yield Text(f"and {len(engines) - most + 1} more", style="dim")
    if not engines:
        yield Text("none", style="dim")


def _engine(engine: _Document, over: _Document) -> Sequence[str]:
    lately, capacity = engine["lately"], engine["gpu_capacity_bytes"]
    tokens, first_tokens = lately["prompt_tokens"], lately["first_tokens"]
    return (
        printable(engine["engine"]),
        f"{_short(_rate(lately['requests'], over))}/s",
        f"{_short(_rate(tokens, over))}/s",
        f"{100 * lately['restored_tokens'] / tokens:.0f} %" if tokens else "-",
        format_seconds(lately["first_token_s"] / first_tokens) if first_tokens else "-",
        format_count(engine["running"]),
        f"{100 * engine['gpu_used_bytes'] / capacity:.0f} %" if capacity else "-",
    )


def _requests(requests: Sequence[_Document], most: int, size: WindowSize) -> Iterator[Text]:
    columns = _widened(_REQUEST_COLUMNS, size)
    heads = ("request", "age", "prompt", "restored", " from", "reason", "TTFT", "saved")
    yield _heading(_row(columns, heads))
    for each in requests[:most]:
        yield _request(each, columns)
    if not requests:
        yield Text("none yet", style="dim")


def _request(request: _Document, columns: Sequence[int]) -> Text:
    restored, saved_s = request["restored_tokens"], request["saved_s"]
    tiers = [tier.value for tier in LOWER_TIERS if restored and restored[tier.value]]
    first_s = request["first_token_s"]
    cells = (
        printable(request["request_id"]) or "-",
        format_elapsed(request["age_s"]),
        format_count(request["prompt_tokens"]),
        format_count(sum(restored.values())) if restored else "-",
        f" {tiers[-1]}" if tiers else "",  # the slowest tier, which determines the wait
        request["reason"],
        format_seconds(first_s) if first_s is not None else "-",
        _saved(saved_s, request["cold_s"]) if tiers and saved_s is not None else "-",
    )
    line = Text(_row(columns, cells))
    line.stylize("dim" if not tiers else "red" if (saved_s or 0) < 0 else "green", -columns[-1])
    return line


def _saved(saved_s: float, cold_s: float | None) -> str:
    """Return the time saved, with ~ if it is predicted because computing was never measured."""
    return f"{'~' if cold_s is None else ''}{_signed(saved_s)}"


def _widened(columns: Sequence[int], size: WindowSize) -> Sequence[int]:
    """Give the first column the spare width of a wide window."""
    spare = max(0, min(size.columns - COLUMNS, _NAME_SPARE_MAX))
    return (columns[0] - spare, *columns[1:])


def _row(columns: Sequence[int], cells: Sequence[str]) -> str:
    """Return a row; unlike ``format_row`` it truncates names and knows wide characters."""
    return "".join(
        f"{_fitted(cell, -width - 1)} " if width < 0 else f" {cell:>{width - 1}}"
        for width, cell in zip(columns, cells, strict=True)
    )


def _fitted(text: str, width: int) -> str:
    if cell_len(text) > width:
        text = f"{set_cell_size(text, width - 2)}.."
    return set_cell_size(text, width)


def _heading(text: str) -> Text:
    return Text(text, style="bold underline")


def _rate(number: float, over: _Document) -> float:
    """Return a rate per second, given the growth in a window."""
    return number / over["seconds"] if over["seconds"] else 0.0


def _short(number: float) -> str:
    """Return a number in about four characters."""
    for unit in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.2g}{unit}" if number < 9.95 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else ''}{format_seconds(abs(seconds))}"


def _cut(line: Text, size: WindowSize) -> Text:
    """Return the line, cut after the last whole word that fits."""
    if line.cell_len <= size.columns:
        return line
    shown = line.plain[: size.columns + 1]
    return line[: max(1, shown.rfind(" "))]
