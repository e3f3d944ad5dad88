"""Charts as SVG text, drawn without a library so that a page needs no external resources.

Rules
-----
* Colours and fonts come from the page, by class: ``s0`` to ``s7`` for series, so a page may be
  dark.
* Each point shows its value when hovered.
* Labels do not overlap on phones either, where the page enlarges them by half.
* External text, such as names, is escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Series", "bars", "lines"]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 30, 16, 56
_COLOURS = 8
_BAR_COLOURS = 6
"""First colour of bars, so that a tier is not mistaken for the policy of that colour."""

_APART = 56.0
"""Least distance between the numbers of a horizontal axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its title, scale and number format."""

    title: str
    shown: Callable[[float], str]
    is_log: bool = False
    marks: Sequence[float] = ()
    """Values to label; empty: chosen automatically."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line; ``style`` is a class of the page, such as ``bound``."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = ""


def lines(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Return a figure with lines and a legend below."""
    across = _Scale.of(x, [at for each in series for at, _ in each.points], _LEFT, _WIDTH - _RIGHT)
    up = _Scale.of(y, [at for each in series for _, at in each.points], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x, y, across, up)]
    for number, each in enumerate(series):
        style = each.style or f"s{number % _COLOURS}"
        places = [(across.at(a), up.at(b), a, b) for a, b in each.points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
        parts.append(f'<polyline class="line {style}" points="{path}"/>')
        if len(places) <= 20:
            for px, py, a, b in places:
                tip = f"{escape(each.name)}: {y.shown(b)} at {x.shown(a)}"
                dot = f'<circle class="dot {style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                parts.append(f"{dot}<title>{tip}</title></circle>")
    return _figure(title, parts, [(each.name, each.style) for each in series])


def bars(title: str, y: Axis, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Return a figure with grouped bars; each row has the same bars, by name.

    Each line of a row's label is written below the one before it.
    """
    names = [name for name, _ in rows[0][1]] if rows else []
    values = [value for _, pieces in rows for _, value in pieces]
    up = _Scale.of(y, values, _HEIGHT - _BOTTOM, _TOP)
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(1, len(rows))
    width = pitch * 0.7 / max(1, len(names))
    parts = [*_lines_across(y, up)]
    for number, (label, pieces) in enumerate(rows):
        left = _LEFT + pitch * (number + 0.15)
        for place, (name, value) in enumerate(pieces):
            low, high = up.at(0.0), up.at(value)
            tip = f"{escape(' '.join(label.split()))}, {escape(name)}: {y.shown(value)}"
            parts.append(
                f'<rect class="bar {_bar_style(place)}" x="{left + width * place:.1f}" '
                f'y="{high:.1f}" width="{width:.1f}" height="{max(0.0, low - high):.1f}">'
                f"<title>{tip}</title></rect>"
            )
        middle = left + pitch * 0.35
        for row, line in enumerate(label.splitlines()):
            parts.append(_text(middle, _HEIGHT - _BOTTOM + 22 * (row + 1), line, "middle"))
    return _figure(title, parts, [(name, _bar_style(place)) for place, name in enumerate(names)])


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to positions."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], start: float, end: float) -> "_Scale":
        finite = [value for value in values if math.isfinite(value)]
        if axis.is_log:
            positive = [value for value in finite if value > 0] or [1.0]
            low, high = min(positive), max(positive)
            return cls(low, high if high > low else low * 10, start, end, is_log=True)
        low, high = min(0.0, *finite, 0.0), max(0.0, *finite, 0.0)
        high = high + 0.05 * (high - low) if high > low else low + 1.0
        return cls(low, high, start, end, is_log=False)

    def at(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [step * 10.0**power for power in powers for step in (1, 2, 5)]
            inside = [each for each in found if self.low * 0.99 <= each <= self.high * 1.01]
            return inside if len(inside) <= 9 else inside[:: -(-len(inside) // 9)]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
        first = math.ceil(self.low / step)
        return [step * count for count in range(first, math.floor(self.high / step) + 1)]


def _grid(x: Axis, y: Axis, across: _Scale, up: _Scale) -> Sequence[str]:
    parts = [*_lines_across(y, up)]
    floor = _HEIGHT - _BOTTOM
    written = -_APART
    for value in x.marks or across.ticks():
        place = across.at(value)
        parts.append(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{floor}"/>'
        )
        if place - written >= _APART:
            parts.append(_text(place, floor + 22, x.shown(value), "middle"))
            written = place
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x.title, "middle"))
    return parts


def _lines_across(y: Axis, up: _Scale) -> Sequence[str]:
    parts: list[str] = []
    for value in y.marks or up.ticks():
        place = up.at(value)
        ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(_text(_LEFT - 8, place + 4, y.shown(value), "end"))
    turned = f'transform="rotate(-90)" x="{-(_TOP + _HEIGHT - _BOTTOM) / 2}" y="14"'
    parts.append(f'<text class="label" {turned} text-anchor="middle">{escape(y.title)}</text>')
    return parts


def _bar_style(place: int) -> str:
    return f"s{(place + _BAR_COLOURS) % _COLOURS}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="label" {where}>{escape(text)}</text>'


def _figure(title: str, parts: Sequence[str], names: Sequence[tuple[str, str]]) -> str:
    keys = "".join(
        f'<span class="key {style or f"s{number % _COLOURS}"}">{escape(name)}</span>'
        for number, (name, style) in enumerate(names)
    )
    drawing = "".join(parts)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{drawing}</svg><div class="keys">{keys}</div></figure>'
    )
