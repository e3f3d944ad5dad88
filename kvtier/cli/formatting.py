"""Numbers and lines for people; the status page has the same forms of numbers (number.js)."""

import textwrap

__all__ = [
    "COLUMNS",
    "NO_FULL_BLOCK",
    "format_bytes",
    "format_count",
    "format_elapsed",
    "format_seconds",
    "printable",
    "wrap_lines",
]

COLUMNS = 80
"""Of a terminal that nobody has made wider."""

NO_FULL_BLOCK = "the prompt fills no block, and only full blocks are kept"


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.3g} {unit}" if abs(num_bytes) < 999.5 else f"{num_bytes:.0f} {unit}"


def format_count(count: float) -> str:
    """Return a whole number with thousands apart."""
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that leaves three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def format_elapsed(seconds: float) -> str:
    """Return a time that went by, in one or two units: 42 s, 3 min, 2 h 5 min, 4 d 3 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def printable(text: str) -> str:
    """Return what somebody else has named or said, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def wrap_lines(line: str, indent: str = "") -> list[str]:
    """Return a line in pieces that fit, and that are plain."""
    pieces = textwrap.wrap(line, COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ")
    return [printable(each) for each in pieces]
