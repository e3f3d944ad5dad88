"""Formats numbers and lines for people; the status page uses the same formats (number.js)."""

import textwrap
from collections.abc import Mapping, Sequence

from kvtier.config.units import format_bytes, format_seconds

__all__ = [
    "COLUMNS",
    "count_noun",
    "format_bytes",
    "format_count",
    "format_counts",
    "format_elapsed",
    "format_row",
    "format_seconds",
    "join_parts",
    "printable",
    "wrap_lines",
]

COLUMNS = 80
"""Width of text output."""


def format_count(count: float) -> str:
    """Return a whole number with thousands separators."""
    return f"{count:,.0f}"


def format_counts(counts: Mapping[str, float]) -> str:
    """Return named counts: hit 12, miss 3."""
    return ", ".join(f"{name} {format_count(count)}" for name, count in counts.items())


def count_noun(count: int, noun: str) -> str:
    """Return a count with its noun: 1 block, 2 blocks."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def format_elapsed(seconds: float) -> str:
    """Return a duration in one or two units: 42 s, 3 min, 2 h 5 min, 4 d 3 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def format_row(widths: Sequence[int], cells: Sequence[str]) -> str:
    """Return a table row; cells of a negative width are aligned to the left."""
    pairs = zip(widths, cells, strict=True)
    row = (f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for width, cell in pairs)
    return "".join(row).rstrip()


def join_parts(parts: Sequence[Sequence[str]]) -> str:
    """Return paragraphs of lines, without the empty ones, separated by blank lines."""
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def printable(text: str) -> str:
    """Return text from elsewhere without control characters, which could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def wrap_lines(line: str, indent: str = "") -> list[str]:
    """Return a line wrapped at 80 columns, without control characters."""
    pieces = textwrap.wrap(line, COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ")
    return [printable(each) for each in pieces]
