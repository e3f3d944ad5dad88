"""``kvtier completion``: prints a script that completes commands, options and file names."""

import argparse
import re
from pathlib import Path

import shtab

from kvtier.cli.commands import COMMANDS, make_parser, verbs_of

__all__ = ["add_options", "run"]

_SHELLS = ("bash", "zsh", "fish")
_PATH = re.compile(r"MODEL|DIRECTORY|(KEY_)?FILE|SOCKET(\|HOST:PORT)?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument("shell", choices=_SHELLS, help="shell to generate the script for")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    parser = make_parser(COMMANDS)
    _complete_files(parser)
    print(shtab.complete(parser, options.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Complete file names for options that take a path."""
    for action in parser._actions:
        if action.type is Path or _PATH.fullmatch(str(action.metavar)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
    for verb in verbs_of(parser).values():
        _complete_files(verb)
