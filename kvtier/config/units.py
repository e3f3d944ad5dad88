"""Parses and formats sizes and durations such as ``64GiB``, ``500MB``, ``250ms``, ``1h``.

Units must be spelled exactly. ``Gb`` may mean gigabits or gigabytes, and ``64G`` either of two
sizes, so both are refused with a list of the valid units.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

__all__ = [
    "DURATION_UNITS",
    "SIZE_UNITS",
    "format_bytes",
    "format_duration",
    "format_seconds",
    "format_size",
    "parse_duration",
    "parse_size",
]

SIZE_UNITS: Mapping[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Size units in bytes."""

DURATION_UNITS: Mapping[str, int] = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
}
"""Duration units in nanoseconds."""

_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """Return bytes from ``"64GiB"`` or from an integer; raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if text.isdecimal():
        return int(text)
    return _parse(text, SIZE_UNITS, "size", "B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")


def parse_duration(value: object) -> int:
    """Return nanoseconds from ``"250ms"``; a number without a unit raises ValueError."""
    return _parse(str(value).strip(), DURATION_UNITS, "duration", ", ".join(DURATION_UNITS))


def _parse(text: str, units: Mapping[str, int], noun: str, spelled: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        shown = text.lower() if text in {"True", "False"} else repr(text)
        raise ValueError(f"{shown} is not a {noun}")
    number, unit = match.groups()
    if unit not in units:
        named = f"unknown unit {unit!r} in {text!r}" if unit else f"{text!r} has no unit"
        raise ValueError(f"{named}, use one of {spelled}")
    amount = Fraction(number) * units[unit]
    if amount.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of {next(iter(units))}")
    return int(amount)


def format_size(size_bytes: int) -> str:
    """Return a size in the largest binary unit that divides it, so that it parses back equal."""
    return _format(size_bytes, ("TiB", "GiB", "MiB", "KiB"), SIZE_UNITS, "B")


def format_duration(duration_ns: int) -> str:
    """Return a duration in the largest unit that divides it, so that it parses back equal."""
    return _format(duration_ns, ("h", "min", "s", "ms", "us"), DURATION_UNITS, "ns")


def _format(amount: int, names: tuple[str, ...], units: Mapping[str, int], least: str) -> str:
    for name in names:
        if amount and amount % units[name] == 0:
            return f"{amount // units[name]}{name}"
    return f"{amount}{least}"


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.3g} {unit}" if abs(num_bytes) < 999.5 else f"{num_bytes:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that leaves three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
