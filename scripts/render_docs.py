"""Write the documents that come from code; ``make docs`` runs it, and a test compares them."""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtier import __version__
from kvtier.cli.commands import COMMANDS, EXIT_CODES, CommandHelp, make_parser, verbs_of
from kvtier.config import reference as settings_reference
from kvtier.config.model import section_models
from kvtier.config.section import extra_of, key_of
from kvtier.config.toml_text import default_of
from kvtier.observe import reference

COMMON_MIN = 6
"""An option of so many commands is described once for all of them."""

ESCAPES = str.maketrans({"\\": r"\e", "-": r"\-", "'": r"\(aq", "~": r"\(ti", "^": r"\(ha"})
"""What a terminal would get a typographic sign for, which no shell takes."""

Option = tuple[str, str]
"""How it is written, and what it does."""


def render_command_manual() -> str:
    """Return the page of section 1: every command with its options, examples and exit codes."""
    parser = make_parser(COMMANDS)
    leaves = [leaf for each in verbs_of(parser).values() for leaf in _leaves(each)]
    uses = Counter(option for leaf in leaves for option in set(_options(leaf)))
    common = [option for option, count in uses.items() if count >= COMMON_MIN]
    lines = [
        *_head("kvtier", 1, "keep KV blocks of LLM engines in tiers"),
        ".SH SYNOPSIS",
        r"\fBkvtier\fR \fICOMMAND\fR [\fIOPTION\fR ...]",
        ".SH DESCRIPTION",
        _text(parser.description or ""),
        ".SH COMMANDS",
    ]
    for name, command in COMMANDS.items():
        lines += _command(verbs_of(parser)[name], command, set(common))
    lines.append(".SH COMMON OPTIONS")
    lines.append(_text("Most commands take these."))
    for written, meaning in sorted(common):
        lines += [".TP", _bold(written), _text(meaning)]
    lines.append(".SH EXIT STATUS")
    lines.append(_text("0 and 1 are told with each command. For all of them:"))
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", _bold(str(code)), _text(meaning)]
    lines += [
        ".SH ENVIRONMENT",
        ".TP",
        r"\fBKVTIER_\fISECTION\fB_\fIKEY\fR",
        _text("A key of the configuration, such as KVTIER_CPU_CAPACITY=8GiB."),
        ".SH SEE ALSO",
        r"\fBkvtier.toml\fR(5)",
    ]
    return "\n".join(lines) + "\n"


def render_settings_manual() -> str:
    """Return the page of section 5: every key of the configuration file."""
    lines = [
        *_head("kvtier.toml", 5, "configuration of kvtier"),
        ".SH DESCRIPTION",
        _text(
            "A TOML file, given with --config. Without one the defaults hold. Later ones win, key "
            "by key: defaults, the file, environment variables KVTIER_SECTION_KEY, options --set "
            "section.key=value. Sizes are whole bytes or carry a unit (B, KB, MB, GB, TB, KiB, "
            "MiB, GiB, TiB); durations always carry one (ns, us, ms, s, min, h, d). A key that is "
            "live is taken anew on SIGHUP or `kvtier config reload`."
        ),
    ]
    for section, model in section_models().items():
        lines += [f".SH [{section}]", _text(model.__doc__ or "")]
        for name, field in model.model_fields.items():
            extra = extra_of(field)
            default = default_of(name, field).strip('"') or "empty"
            kind = f"{default}, live" if extra.get("live") else default
            lines += [".TP", f"{_bold(key_of(name))} ({_escaped(kind)})"]
            lines.append(_text(f"{field.description} {extra['reason']}"))
    lines += [".SH SEE ALSO", r"\fBkvtier\fR(1)"]
    return "\n".join(lines) + "\n"


def _head(name: str, section: int, purpose: str) -> list[str]:
    # No date: a page changes with the version, and must come out the same on every day.
    title = f'.TH {name.upper()} {section} "" "kvtier {__version__}"'
    return [title, ".SH NAME", rf"{name} \- {purpose}"]


def _command(
    parser: argparse.ArgumentParser, command: CommandHelp, common: set[Option]
) -> list[str]:
    lines = [f".SS {_escaped(parser.prog)}", _text(command.description)]
    for leaf in _leaves(parser):
        own = [option for option in _options(leaf) if option not in common]
        if leaf is not parser:
            lines += [".PP", f"{_bold(leaf.prog)}:", _text(leaf.description or "")]
        for written, meaning in own:
            lines += [".TP", _bold(written), _text(meaning)]
    lines += [".PP", "Examples:", ".PP", ".nf"]
    lines += [f"    {_escaped(example)}" for example in command.examples]
    ends = f"Exit status 0: {command.done}; 1: {command.failed}."
    return [*lines, ".fi", ".PP", _text(ends)]


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of a command's verbs, or its own where it has none."""
    return list(verbs_of(parser).values()) or [parser]


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        choices = "|".join(map(str, action.choices)) if action.choices else None
        value = str(action.metavar or choices or action.dest.upper())
        words = ", ".join(action.option_strings) or value
        if action.option_strings and action.nargs != 0:
            words += f" [{value}]" if action.nargs == "?" else f" {value}"
        yield words, action.help or ""


def _bold(text: str) -> str:
    return rf"\fB{_escaped(text)}\fR"


def _text(prose: str) -> str:
    """Return a paragraph, of a document's own marks only what a terminal can show."""
    prose = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(prose.split()))
    prose = _escaped(prose)
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", prose)


def _escaped(text: str) -> str:
    escaped = re.sub(
        r"[^\x00-\x7f]", lambda sign: rf"\[u{ord(sign[0]):04X}]", text.translate(ESCAPES)
    )
    return rf"\&{escaped}" if escaped.startswith(".") else escaped


ROOT = Path(__file__).resolve().parent.parent

RENDERED = {
    "docs/operations/configuration.md": settings_reference.render_reference,
    "docs/operations/metrics.md": reference.render_reference,
    "docs/man/kvtier.1": render_command_manual,
    "docs/man/kvtier.toml.5": render_settings_manual,
    "deploy/kvtier.toml.example": settings_reference.render_example,
}


def main() -> None:
    """Write each document in its place."""
    for name, render in RENDERED.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render())


if __name__ == "__main__":
    main()
