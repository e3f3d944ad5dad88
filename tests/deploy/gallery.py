"""Pictures of the dashboards, for eyes: the files that Grafana reads, drawn from a Prometheus.

``make dashboards`` runs it: a node under load for a minute, and one PNG a dashboard. It draws what
is drawn by every Grafana (titles, lines, stacks, figures, units, thresholds), in Grafana's grid.
"""

import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.testing.child import await_true, work_directory
from tests.deploy.observed import ROOT, Prometheus, observed
from tests.programs import requires

BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
WIDTH = 1440
SPAN_S = 60.0
STEP_S = 1.0
_CELL = 38
"""Pixels of a row of Grafana's grid, gap included."""

_PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0")
_NAMED = {
    "green": "#73bf69",
    "blue": "#5794f2",
    "orange": "#ff9830",
    "purple": "#b877d9",
    "red": "#f2495c",
}
_STYLE = """
body{margin:0;padding:12px;background:#111217;color:#ccccdc;font:13px Inter,Arial,sans-serif}
h1{font-size:18px;margin:4px 0 12px}
main{display:grid;grid-template-columns:repeat(24,1fr);gap:8px;grid-auto-rows:30px}
section{background:#181b1f;border:1px solid #2a2d33;border-radius:2px;padding:6px;overflow:hidden}
h2{font-size:14px;font-weight:500;margin:8px 0 0}h3{font-size:13px;font-weight:500;margin:0}
.legend{font-size:11px;line-height:15px;color:#aaaab8}.legend i{display:inline-block;width:10px;
height:3px;margin:0 4px 3px 8px}.figures{display:flex;gap:16px;flex-wrap:wrap;align-items:baseline}
.figures b{font-size:30px;font-weight:500}.figures.many b{font-size:20px}
.empty{color:#f2495c;font-weight:700}text{fill:#aaaab8;font-size:10px}
"""


@dataclass(frozen=True)
class Line:
    """One series: its name, its colour, and (second, value) pairs without what is no number."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def drawn(board: Any, prometheus: Prometheus) -> str:
    """Return a dashboard as one page."""
    cells = [_cell(panel, prometheus) for panel in board["panels"]]
    title = html.escape(board["title"])
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><main>{''.join(cells)}</main>"
    )


def _cell(panel: Any, prometheus: Prometheus) -> str:
    at = panel["gridPos"]
    place = f"grid-column:{at['x'] + 1}/span {at['w']};grid-row:{at['y'] + 1}/span {at['h']}"
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f'<h2 style="{place}">{title}</h2>'
    lines = _lines(panel, prometheus)
    if not lines:
        content = '<p class="empty">No data</p>'
    elif panel["type"] == "stat":
        content = _figures(panel, lines)
    else:
        width = at["w"] * (WIDTH - 24) // 24 - 22
        content = _chart(panel, lines, width, at["h"] * _CELL - 84)
    return f'<section style="{place}"><h3>{title}</h3>{content}</section>'


def _lines(panel: Any, prometheus: Prometheus) -> list[Line]:
    found: list[Line] = []
    for target in panel["targets"]:
        for series in prometheus.lately(target["expr"], SPAN_S):
            points = [(float(at), float(value)) for at, value in series["values"]]
            points = [point for point in points if math.isfinite(point[1])]
            name = named(target["legendFormat"], series["metric"])
            if points:
                usual = _PALETTE[len(found) % len(_PALETTE)]
                found.append(Line(name, _colour(panel, name, usual, points[-1][1]), points))
    return found


def _colour(panel: Any, name: str, usual: str, value: float) -> str:
    """Return a series' colour: of the last override that names it, of a threshold, or ``usual``."""
    field = panel["fieldConfig"]
    colour = usual
    if panel["type"] == "stat":
        steps = field["defaults"]["thresholds"]["steps"]
        colour = [s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1]
    for each in field["overrides"]:
        kind, pattern = each["matcher"]["id"], each["matcher"]["options"]
        pattern = f"^{re.escape(pattern)}$" if kind == "byName" else pattern.strip("/")
        if re.search(pattern, name):
            colour = each["properties"][0]["value"]["fixedColor"]
    return _NAMED.get(colour, colour)


def named(legend: str, labels: dict[str, str]) -> str:
    """Return what a series is called; fails where the legend names a label that it has not."""
    for label in legend.split("{{")[1:]:
        name = label.partition("}}")[0]
        legend = legend.replace(f"{{{{{name}}}}}", labels[name])
    return legend


def _figures(panel: Any, lines: Sequence[Line]) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    figures = []
    for line in lines:
        name = "" if len(lines) == 1 else f"<br>{html.escape(line.name)}"
        text = shown(line.points[-1][1], defaults["unit"])
        figures.append(f'<span><b style="color:{line.colour}">{text}</b>{name}</span>')
    many = " many" if len(lines) > 1 else ""
    return f'<div class="figures{many}">{"".join(figures)}</div>'


def _chart(panel: Any, lines: Sequence[Line], width: int, height: int) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    is_stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    layers = _stacked(lines) if is_stacked else [(line, None) for line in lines]
    values = [value for line, _ in layers for _, value in line.points]
    low, high = min(0.0, *values), defaults.get("max", max(0.0, *values))
    high = high if high > low else low + 1
    end_s = max(at for line in lines for at, _ in line.points)
    left, bottom = 62, 14

    def place(at: float, value: float) -> str:
        x = left + (width - left) * (1 - (end_s - at) / SPAN_S)
        return f"{x:.1f},{(height - bottom) * (1 - (value - low) / (high - low)) + 12:.1f}"

    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        y = place(end_s, value).partition(",")[2]
        parts.append(f'<path d="M{left} {y}H{width}" stroke="#2a2d33"/>')
        parts.append(f'<text x="2" y="{float(y) + 3}">{shown(value, defaults["unit"])}</text>')
    for line, floor in layers:
        top = [place(*point) for point in line.points]
        if floor is not None:
            base = [place(*point) for point in reversed(floor)]
            parts.append(
                f'<polygon points="{" ".join(top + base)}" fill="{line.colour}" fill-opacity=".4"/>'
            )
        parts.append(
            f'<path d="{_path(line, top)}" fill="none" stroke="{line.colour}" stroke-width="1.3"/>'
        )
    legend = "".join(
        f'<i style="background:{line.colour}"></i>{html.escape(line.name)}' for line in lines
    )
    svg = f'<svg width="{width}" height="{height + 12}">{"".join(parts)}</svg>'
    return f'{svg}<div class="legend">{legend}</div>'


def _path(line: Line, places: Sequence[str]) -> str:
    """Return the way along ``places``; where seconds are missing it begins anew."""
    ends = [-math.inf, *(at for at, _ in line.points)]
    return "".join(
        f"{'L' if at - before < STEP_S * 1.5 else 'M'}{place}"
        for (at, _), before, place in zip(line.points, ends, places, strict=False)
    )


def _stacked(
    lines: Sequence[Line],
) -> list[tuple[Line, Sequence[tuple[float, float]]]]:
    """Return each line on top of those before it, and what it stands on."""
    height: dict[float, float] = {}
    layers = []
    for line in lines:
        floor = [(at, height.get(at, 0.0)) for at, _ in line.points]
        height |= {at: height.get(at, 0.0) + value for at, value in line.points}
        layers.append((Line(line.name, line.colour, [(at, height[at]) for at, _ in floor]), floor))
    return layers


def shown(value: float, unit: str) -> str:
    """Return a value as Grafana would write it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s" and value and abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    base, letters, suffix = {
        "bytes": (1024, "KMGT", "iB"),
        "Bps": (1000, "kMGT", "B/s"),
        "s": (1e9, "", "s"),
        "reqps": (1000, "kM", "req/s"),
        "short": (1000, "KMG", ""),
    }.get(unit, (1000, "kMG", unit.removeprefix("si:")))
    letter = ""
    for larger in letters:
        if abs(value) < base:
            break
        value, letter = value / base, larger
    if unit == "bytes" and not letter:
        suffix = "B"
    return f"{value:.3g} {letter}{suffix}".rstrip()


def photograph(page: Path, picture: Path, height: int) -> None:
    """Have a browser draw a page into a PNG."""
    program = requires("chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with work_directory() as profile:
        options += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}"]
        command = [program, *options, f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def main(folder: Path) -> None:
    """Draw every dashboard into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with work_directory() as directory, observed(directory) as seen:
        began = f"count_over_time(up[10m]) > {SPAN_S / 2}"
        await_true(lambda: seen.prometheus.now(began), "a minute of load", SPAN_S * 3)
        for file in BOARDS:
            board = json.loads(file.read_text())
            page = folder / f"{file.stem}.html"
            page.write_text(drawn(board, seen.prometheus))
            rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
            photograph(page, page.with_suffix(".png").absolute(), rows * _CELL + 70)
            print(page.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
