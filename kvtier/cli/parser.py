"""The command line's own grammar: every command, with the options of those that are wanted."""

import argparse
import importlib
import textwrap
from collections.abc import Collection, Mapping

from kvtier import __version__
from kvtier.cli.commands import COMMANDS, EXIT_CODES, CommandHelp

__all__ = ["make_parser", "verbs_of"]

_WIDTH = 78
"""Of texts; argparse breaks the rest at the terminal's width."""


def make_parser(wanted: Collection[str]) -> argparse.ArgumentParser:
    """Return a parser that knows each command's name, and the options of those ``wanted``.

    Importing the modules of these is what takes the time.
    """
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="Keeps KV blocks of LLM engines in tiers, and brings them back when it pays.",
        epilog="kvtier COMMAND --help has a command's options, examples and exit codes.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, description=command.description)
        if name in wanted:
            importlib.import_module(f"kvtier.cli.{name}").add_options(added)
            for each in (added, *verbs_of(added).values()):
                _explain(each, command)
    return parser


def verbs_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers below one, by name; none for most commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _explain(parser: argparse.ArgumentParser, command: CommandHelp) -> None:
    """Have its help say what a command is for, show examples, and list the exit codes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", _WIDTH)
    fitting = [each for each in command.examples if parser.prog in each]
    codes = {0: command.done, 1: command.failed, **EXIT_CODES}
    lines = ["examples:", *(f"  {each}" for each in fitting or command.examples), "", "exit codes:"]
    for code, meaning in codes.items():
        lines += textwrap.wrap(
            meaning, _WIDTH, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7
        )
    parser.epilog = "\n".join(lines)
