"""Help of every command is of one form, and its examples are command lines that work."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from kvtier.cli.commands import COMMANDS, make_parser, verbs_of

PARSER = make_parser(COMMANDS)


def parsers() -> Iterator[argparse.ArgumentParser]:
    for parser in verbs_of(PARSER).values():
        yield from (parser, *verbs_of(parser).values())


EACH = pytest.mark.parametrize("parser", [*parsers()], ids=lambda parser: parser.prog)


@EACH
def test_it_says_what_for_how_and_how_it_ends(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    help_text = parser.format_help()
    assert parser.description[0].isupper()
    assert (
        max(map(len, help_text.partition("\n\n")[2].splitlines())) <= 80
    )  # the usage is argparse's
    examples, codes = re.fullmatch(
        r".*\n\nexamples:\n(.*)\n\nexit codes:\n(.*)\n", help_text, re.DOTALL
    ).groups()
    assert all(parser.prog in line for line in examples.splitlines())
    assert re.findall(r"^  (\d+)", codes, re.MULTILINE) == ["0", "1", "2", "130"]


@EACH
def test_its_examples_are_taken(parser):
    for line in re.findall(r"kvtier [^>)\n]+", parser.epilog):
        options = PARSER.parse_args(shlex.split(line)[1:])
        assert callable(options.run)


@EACH
def test_each_option_is_explained_and_the_common_ones_alike(parser):
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            assert action.help, action.dest
        if action.dest == "json":
            assert action.help == "print JSON"


def test_every_command_is_told_in_the_list():
    listed = PARSER.format_help()
    for name, command in COMMANDS.items():
        assert re.search(rf"^    {name}\s+{re.escape(command.summary)}", listed, re.MULTILINE)
