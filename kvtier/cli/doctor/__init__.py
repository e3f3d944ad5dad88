"""``kvtier doctor``: checks the machine and the configuration, and recommends changes."""

import argparse
import contextlib
import json
import os
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier.cli.doctor import daemon, machine
from kvtier.cli.doctor.check import (
    Check,
    CheckContext,
    CheckVerdict,
    Finding,
    RunningDaemon,
    fail,
    ok,
    run_checks,
    warn,
)
from kvtier.cli.options import add_config_options, config_from
from kvtier.config import Config
from kvtier.config.model import SYSTEM_CONFIG, default_socket, with_secrets
from kvtier.daemon.tiers.opening import configured
from kvtier.errors import ConfigError, StartError
from kvtier.observe.log import start_log
from kvtier.tiers.backend import backend_of
from kvtier.tiers.finding import KernelFiles, TierCheck

__all__ = ["add_options", "run"]

_DAEMON_HUNG = "see its log, and restart it"
_WIDTH_MAX = 100

_Named = tuple[str, Finding]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the SSD with a temporary file of 256 MiB in ssd.directory",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks and print the findings; exit code 1 if one failed."""
    start_log("error")  # warnings about servers are findings here
    config, first = _configuration(options)
    running: list[RunningDaemon] = []
    inspect = partial(daemon.inspect_daemon, config, running.append)
    found = [first, *run_checks([Check("daemon", inspect, if_hung=_DAEMON_HUNG)])]
    context = CheckContext(config=config, running=running[0] if running else None)
    found += run_checks(_checks(context))
    if options.measure:
        for each in _tier_checks(config, is_measurement=True):  # one by one, undisturbed
            found += run_checks([_as_check(each, context)])
    print(_document(found) if options.json else _text(found))
    return int(any(finding.verdict is CheckVerdict.FAIL for _, finding in found))


def _configuration(options: argparse.Namespace) -> tuple[Config, _Named]:
    """Return the configuration, or the defaults if it is invalid."""
    try:
        config, finding = _found(options)
    except ConfigError as error:
        found = f"{error.field}: {error.problem}; the defaults are checked instead"
        return Config(), ("config", fail(found, error.remedy))
    with contextlib.suppress(ConfigError):  # the check of files reports it
        config = with_secrets(config)
    return config, ("config", finding)


def _found(options: argparse.Namespace) -> tuple[Config, Finding]:
    """Return the selected configuration, else the machine's, and a finding that says why.

    Raises ConfigError.
    """
    config = config_from(options)
    if options.config is not None:
        return config, ok(str(options.config))
    socket, user = config.daemon.socket, f"user {os.geteuid()}"
    why_none = ""
    if socket != default_socket():
        why_none = "daemon.socket is set"
    elif os.access(socket, os.F_OK):
        why_none = f"{user} has a daemon at {socket}"
    elif not os.access(SYSTEM_CONFIG, os.F_OK):
        why_none = f"{SYSTEM_CONFIG} does not exist"
    if why_none:
        return config, ok(f"no file ({why_none}): using defaults and environment")
    if not os.access(SYSTEM_CONFIG, os.R_OK):
        return config, warn(
            f"{user} cannot read {SYSTEM_CONFIG}; the defaults are checked instead",
            "run this as the daemon's user or root, or pass --config",
        )
    options.config = SYSTEM_CONFIG
    return config_from(options), ok(f"{SYSTEM_CONFIG} (default)")


def _checks(context: CheckContext) -> list[Check]:
    def check(name: str, inspect: Callable[[CheckContext], Finding], **more: Any) -> Check:
        return Check(name, partial(inspect, context), **more)

    def closed(name: str, inspect: Callable[[CheckContext], Finding], **more: Any) -> Check:
        return check(name, _as_daemon_user(inspect), **more)

    config = context.config
    checks = [
        check("versions", machine.inspect_versions),
        check("kernel", machine.inspect_kernel),
        check("service", machine.inspect_service),
        check("cpu", machine.inspect_numa_nodes),
        check("clock", machine.inspect_clock),
        check("gpu", machine.inspect_gpu),
        check("nofile", machine.inspect_descriptors),
        check("memlock", machine.inspect_locking),
        check("memory", machine.inspect_memory),
        check("arena", machine.inspect_arena),
        check("overcommit", machine.inspect_overcommit),
        check("swap", machine.inspect_swap),
        check("shm", machine.inspect_shm),
    ]
    checks += [_as_check(each, context) for each in _tier_checks(config, is_measurement=False)]
    return [
        *checks,
        closed("files", daemon.inspect_files),
        check("socket", daemon.inspect_socket),
        check("ports", daemon.inspect_ports),
    ]


def _as_daemon_user(
    inspect: Callable[[CheckContext], Finding],
) -> Callable[[CheckContext], Finding]:
    """Run a check of the daemon's files only as its user or root; others cannot read them."""

    def inspected(context: CheckContext) -> Finding:
        owner = context.running.uid if context.running else None
        if owner is None or os.geteuid() in {0, owner}:
            return inspect(context)
        return warn(f"not accessible to user {os.geteuid()}", f"run this as user {owner} or root")

    return inspected


def _tier_checks(config: Config, *, is_measurement: bool) -> list[TierCheck]:
    """Return the checks of the configured tiers; a missing package is a failing check."""
    checks: list[TierCheck] = []
    for name in configured(config):
        try:
            checks += backend_of(name).checks(config.tiers[name])
        except StartError as error:
            checks.append(TierCheck(name, partial(_raise, error), ""))
    return [each for each in checks if each.is_measurement is is_measurement]


def _raise(error: StartError, _kernel: KernelFiles) -> Finding:
    raise error


def _as_check(each: TierCheck, context: CheckContext) -> Check:
    inspect = _as_daemon_user(each.inspect) if each.is_private else each.inspect
    return Check(each.name, partial(inspect, context), each.deadline_s, each.if_hung)


def _text(found: list[_Named]) -> str:
    """Return a line for each finding and each remedy, and the totals."""
    width = min(_WIDTH_MAX, shutil.get_terminal_size().columns)
    lines = []
    for name, finding in found:
        head = f"{finding.verdict:<5} {name:<11} "
        text = [finding.found, *([f"-> {finding.remedy}"] if finding.remedy else [])]
        for place, part in enumerate(text):
            begin = head if place == 0 else " " * len(head)
            indent = " " * (len(head) + 3 * place)
            lines += textwrap.wrap(part, width, initial_indent=begin, subsequent_indent=indent)
    counts = {
        verdict: sum(finding.verdict is verdict for _, finding in found) for verdict in CheckVerdict
    }
    return "\n".join([*lines, "", ", ".join(f"{count} {name}" for name, count in counts.items())])


def _document(found: list[_Named]) -> str:
    checks = [
        {
            "check": name,
            "verdict": finding.verdict,
            "found": finding.found,
            "remedy": finding.remedy,
        }
        for name, finding in found
    ]
    return json.dumps({"checks": checks}, indent=2)
