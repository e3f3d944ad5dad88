"""Options that several commands share, and the configuration that comes out of them."""

import argparse
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from kvtier.config import Config, load_config, read_config
from kvtier.config.units import parse_duration
from kvtier.core.limits import GAP_MAX_S
from kvtier.errors import ConfigError

__all__ = ["add_config_options", "config_from", "parse_ttl", "parse_wait", "reread_config"]

_NO_TIME = "no number of seconds, nor a time such as 5min,"

_SECONDS_MAX = 86_400.0
"""A day: more is a mistake in the unit."""


def parse_wait(text: str) -> float:
    """Read an option that is a time to wait; argparse refuses what raises ArgumentTypeError."""
    value = _seconds_of(text)
    if not 0 < value <= _SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is {_NO_TIME} up to a day")
    return value


def parse_ttl(text: str) -> int:
    """Read an option that is a time to live, 0 being none; argparse refuses what raises."""
    value = _seconds_of(text) if text.isascii() and text.isalnum() else math.nan
    if not 0 <= value <= GAP_MAX_S or value % 1 or "e" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is {_NO_TIME} up to {GAP_MAX_S // 86_400} days")
    return int(value)


def _seconds_of(text: str) -> float:
    """Return what ``10`` and ``10s`` are, in seconds; not a number for what is no time."""
    for read in (float, lambda each: parse_duration(each) / 1e9):
        with contextlib.suppress(ValueError):
            return read(text)
    return math.nan


def add_config_options(parser: argparse.ArgumentParser, *shortcuts: tuple[str, str, str]) -> None:
    """Add ``--config``, ``--set`` and ``shortcuts``: (option, key, help)."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (TOML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key of the configuration, such as cpu.capacity=8GiB; may be repeated",
    )
    for option, key, text in shortcuts:
        name = option.removeprefix("--")
        parser.add_argument(
            option,
            dest=f"key:{key}",
            metavar=name.upper().replace("-", "_"),
            help=f"{text} ({key})",
        )


def config_from(options: argparse.Namespace) -> Config:
    """Return the configuration of a command line. Raises ConfigError."""
    return load_config(options.config, _overrides(options))


def reread_config(options: argparse.Namespace) -> Config | Sequence[ConfigError]:
    """Return the same configuration as it is now, or all that is wrong with it."""
    return read_config(options.config, _overrides(options))


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    overrides: dict[str, str] = {}
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError("--set", f"{item!r} has no '='", "write --set section.key=value")
        overrides[key.strip()] = value.strip()
    for name, value in vars(options).items():
        if name.startswith("key:") and value is not None:
            if not value:  # mostly a shell variable that is not set
                key = name.removeprefix("key:")
                raise ConfigError(key, "is empty", "give a value, or leave the option out")
            overrides[name.removeprefix("key:")] = value
    return overrides
