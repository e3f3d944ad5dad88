"""Numbers for people, on the command line; the status page is held to the same table."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from kvtier.cli.formatting import (
    format_bytes,
    format_count,
    format_elapsed,
    format_seconds,
    wrap_lines,
)

TIB = 1 << 40

SHOWN: Mapping[str, Sequence[tuple[float, str]]] = {
    "bytes": (
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (-1536, "-1.5 KiB"),
        (123_456_789, "118 MiB"),
        (1023 << 20, "1023 MiB"),
        (5 * TIB // 4, "1.25 TiB"),
        (900 * TIB, "900 TiB"),
        (123_456 * TIB, "123456 TiB"),
    ),
    "count": ((0, "0"), (999, "999"), (1_234_567, "1,234,567"), (41.6, "42")),
    "seconds": (
        (0, "0 ms"),
        (0.000_25, "0.25 ms"),
        (0.123_456, "123 ms"),
        (1, "1 s"),
        (12.345, "12.3 s"),
        (999.4, "999 s"),
        (123_456.7, "123,457 s"),
    ),
    "span": (
        (0, "0 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7500, "2 h 5 min"),
        (100 * 3600, "4 d 4 h"),
    ),
}
"""By what is shown: numbers, and how."""

SHOW: Mapping[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "count": format_count,
    "seconds": format_seconds,
    "span": format_elapsed,
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_number_is_shown_as_people_write_it(what: str) -> None:
    assert [SHOW[what](number) for number, _ in SHOWN[what]] == [text for _, text in SHOWN[what]]


def test_what_others_say_is_wrapped_and_steers_no_terminal() -> None:
    lines = wrap_lines("ssd is out: \x1b[2J" + "no room, " * 12 + "\nit says")
    assert lines[0].startswith("ssd is out: ?[2Jno room, ")
    assert lines[1].startswith("  no room, ")
    assert "".join(lines).isprintable()
    assert max(map(len, lines)) <= 80
