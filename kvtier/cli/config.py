"""``kvtier config``: checks, shows and reloads the configuration."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.api.rpc.operator_client import local_operator
from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.cli.formatting import count_noun
from kvtier.cli.options import add_config_options, config_from, reread_config
from kvtier.cli.preflight import find_problems
from kvtier.config import Config
from kvtier.config.reference import schema
from kvtier.config.toml_text import document, render_toml
from kvtier.errors import DaemonUnavailable, StartError
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_TIMEOUT_S = 2.0
_RELOAD_TIMEOUT_S = 20.0
"""A reload in progress must finish first, and each may wait seconds for a file."""

_DEFAULT = "default"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = verbs.add_parser(
        "check",
        help="report all errors in a configuration",
        description="Report all errors in a configuration, one per line. Exit code 2 if there are "
        "any. Only the configuration is checked, unless --machine is given.",
    )
    add_config_options(check)
    check.add_argument(
        "--machine",
        action="store_true",
        help="also check memory, ports, directories and files, as `kvtier serve` does at startup",
    )
    show = verbs.add_parser(
        "show",
        help="show values and their sources",
        description="Show the keys that are set, or all keys with --effective, as a TOML file with "
        "the source of each value. Secrets are hidden.",
    )
    add_target_options(show)
    show.add_argument("--effective", action="store_true", help="include defaults")
    show.add_argument(
        "--running", action="store_true", help="show the configuration of the running daemon"
    )
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--toml", action="store_true", help="print TOML (the default)")
    verbs.add_parser(
        "schema",
        help="print the JSON Schema of the configuration file",
        description="Print the JSON Schema (draft 2020-12) of the configuration file, for editors "
        "and CI.",
    )
    reload = verbs.add_parser(
        "reload",
        help="reload the configuration of the running daemon",
        description="Let the running daemon reload its configuration file and secrets, and apply "
        "what does not need a restart: everything, or nothing. Exit code 1 if it rejects them.",
    )
    add_target_options(reload)
    reload.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the verb."""
    match options.verb:
        case "check":
            return _check(options)
        case "show":
            return _show(options)
        case "reload":
            return _reload(options)
    print(json.dumps(schema(), indent=2))
    return 0


def _check(options: argparse.Namespace) -> int:
    read = reread_config(options)
    if not isinstance(read, Config):
        return _refuse(read)
    num_set = sum(each["source"] != _DEFAULT for each in document(read).values())
    result = f"{options.config or 'configuration'}: OK ({count_noun(num_set, 'key')} set)"
    if not options.machine:
        print(result)
    elif _is_served(read.daemon.socket):
        print(f"{result}; machine not checked: a daemon is running here")
    else:
        directories = [each.state_directory for each in read.tiers.values()]
        with _removing_created(read.daemon.socket.parent, *filter(None, directories)):
            found = find_problems(read)
        if found:
            return _refuse([_located(problem, read) for problem in found])
        print(f"{result}; machine: OK")
    return 0


def _is_served(socket: Path) -> bool:
    try:
        with local_operator(socket):
            return True
    except DaemonUnavailable:
        return False


def _located(error: StartError, config: Config) -> StartError:
    """Add the source of the rejected value to an error."""
    problem = f"{error.problem} ({config.source_of(error.field)})"
    return StartError(error.field, problem, error.remedy)


def _refuse(faults: Sequence[StartError]) -> int:
    for fault in faults:
        print(f"kvtier: {fault}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _removing_created(*directories: Path) -> Iterator[None]:
    """Remove directories that the context creates as a check."""
    missing = {
        folder
        for directory in directories
        for folder in (directory, *directory.parents)
        if not folder.exists()
    }
    try:
        yield
    finally:
        for folder in sorted(missing, key=lambda each: len(each.parts), reverse=True):
            with contextlib.suppress(OSError):  # never created, or in use by now
                folder.rmdir()


def _show(options: argparse.Namespace) -> int:
    if options.running:
        target = target_from(options)
        reply = call_daemon(
            target, lambda stub: stub.Config(pb.ConfigRequest(), timeout=_TIMEOUT_S)
        )
        found: Mapping[str, Mapping[str, Any]] = json.loads(reply.json)
    else:
        _no_socket_options(options)
        found = document(config_from(options))
    if not options.effective:
        found = {key: each for key, each in found.items() if each["source"] != _DEFAULT}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(render_toml(found) or "# all keys are at their defaults")
    return 0


def _no_socket_options(options: argparse.Namespace) -> None:
    for option in ("connect", "token_file", "ca"):
        if getattr(options, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise StartError(name, "only valid with --running", "add --running, or omit it")


def _reload(options: argparse.Namespace) -> int:
    target = target_from(options)
    reply = call_daemon(
        target, lambda stub: stub.Reload(pb.ReloadRequest(), timeout=_RELOAD_TIMEOUT_S)
    )
    result = json.loads(reply.json)
    if options.json:
        print(reply.json)
        return int(result["outcome"] == "refused")
    for change in result["changed"]:
        print(change)
    for reason in result["reasons"]:
        print(f"kvtier: {reason}", file=sys.stderr)
    print(_OUTCOMES[result["outcome"]])
    return int(result["outcome"] == "refused")


_OUTCOMES: Mapping[str, str] = {
    "applied": "applied",
    "unchanged": "no changes",
    "refused": "rejected, nothing was applied",
}
