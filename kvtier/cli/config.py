"""``kvtier config``: check a configuration, show what holds, and have it read again."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.api.rpc.operator_client import local_operator
from kvtier.cli.call import add_target_options, call_daemon, target_from
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
"""One that is under way may have to end first, and each waits for a file for some seconds."""

_DEFAULT = "default"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = verbs.add_parser(
        "check",
        help="say all that is wrong with a configuration",
        description="Say all that is wrong with a configuration, a line each. Looks at nothing "
        "but the file, unless the machine is to be checked too. Exit code 2 where something is.",
    )
    add_config_options(check)
    check.add_argument(
        "--machine",
        action="store_true",
        help="check memory, ports, directories and files too, as `kvtier serve` does at its start",
    )
    show = verbs.add_parser(
        "show",
        help="show values, and where each came from",
        description="Show the keys that are set, or with --effective all of them, as a TOML file "
        "with the source of each value behind it. Secrets are hidden.",
    )
    add_target_options(show)
    show.add_argument("--effective", action="store_true", help="defaults too")
    show.add_argument(
        "--running", action="store_true", help="what the running daemon goes by, as it says itself"
    )
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--toml", action="store_true", help="print TOML (as without it)")
    verbs.add_parser(
        "schema",
        help="print the JSON Schema of the file",
        description="Print the JSON Schema (draft 2020-12) of the configuration file, for editors "
        "and CI.",
    )
    reload = verbs.add_parser(
        "reload",
        help="have the running daemon read its configuration again",
        description="Have the running daemon read its file and its keys again and apply what can "
        "be applied without a restart: all of it, or nothing. Exit code 1 where it refuses.",
    )
    add_target_options(reload)
    reload.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do what the verb says."""
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
    said = f"{options.config or 'the configuration'} is good, keys set: {num_set}"
    if not options.machine:
        print(said)
    elif _is_served(read.daemon.socket):
        print(f"{said}; the machine was not checked, for a daemon runs here and has what it needs")
    else:
        with _leaving_nothing(read.daemon.socket.parent, read.ssd.directory):
            found = find_problems(read)
        if found:
            return _refuse([_located(lack, read) for lack in found])
        print(f"{said}; the machine has what it takes")
    return 0


def _is_served(socket: Path) -> bool:
    try:
        with local_operator(socket):
            return True
    except DaemonUnavailable:
        return False


def _located(lack: StartError, config: Config) -> StartError:
    """Add where the value came from."""
    problem = f"{lack.problem} ({config.source_of(lack.field)})"
    return StartError(lack.field, problem, lack.remedy)


def _refuse(faults: Sequence[StartError]) -> int:
    for fault in faults:
        print(f"kvtier: {fault}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _leaving_nothing(*directories: Path) -> Iterator[None]:
    """Remove directories that were made within the context, to see whether they can be."""
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
            with contextlib.suppress(OSError):  # never made, or by now somebody's
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
        print(render_toml(found) or "# every key has its default")
    return 0


def _no_socket_options(options: argparse.Namespace) -> None:
    for option in ("connect", "token_file", "ca"):
        if getattr(options, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise StartError(name, "is for a running daemon", "add --running, or leave it out")


def _reload(options: argparse.Namespace) -> int:
    target = target_from(options)
    reply = call_daemon(
        target, lambda stub: stub.Reload(pb.ReloadRequest(), timeout=_RELOAD_TIMEOUT_S)
    )
    told = json.loads(reply.json)
    if options.json:
        print(reply.json)
        return int(told["outcome"] == "refused")
    for change in told["changed"]:
        print(change)
    for reason in told["reasons"]:
        print(f"kvtier: {reason}", file=sys.stderr)
    print(_OUTCOMES[told["outcome"]])
    return int(told["outcome"] == "refused")


_OUTCOMES: Mapping[str, str] = {
    "applied": "applied",
    "unchanged": "nothing has changed",
    "refused": "refused, nothing was applied",
}
