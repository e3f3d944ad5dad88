"""Times on the command line: as plain seconds, or as in the configuration."""

import argparse

import pytest

from kvtier.cli.options import parse_ttl, parse_wait


@pytest.mark.parametrize(
    ("text", "value"), [("10", 10), ("0.5", 0.5), ("10s", 10), ("250ms", 0.25), ("5min", 300)]
)
def test_a_time_to_wait(text, value):
    assert parse_wait(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("86400", 86_400), ("2h", 7200)])
def test_a_time_to_live_is_whole_seconds(text, value):
    assert parse_ttl(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "5 parsecs", "2000h", "1e99"])
def test_what_is_no_time_is_refused_with_an_example(text):
    for read in (parse_wait, parse_ttl):
        with pytest.raises(
            argparse.ArgumentTypeError, match=r"expected seconds or a duration such as 5min"
        ):
            read(text)


@pytest.mark.parametrize("text", ["1e3", "0.5", "500ms", "1_000"])
def test_a_time_to_live_is_written_plainly(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_ttl(text)
