"""Options shared by several commands, and the configuration that they select."""

import argparse
import contextlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvtier.config import Config, load_config, read_config
from kvtier.config.units import parse_duration
from kvtier.core.limits import GAP_MAX_S
from kvtier.errors import ConfigError

__all__ = [
    "add_config_options",
    "add_timeout_option",
    "config_from",
    "parse_seconds",
    "parse_setting",
    "parse_ttl",
    "parse_wait",
    "reread_config",
]

_DAY_S = 86_400
_NANOSECOND_S = 1e-9


def parse_seconds(text: str, *, low_s: float, high_s: float, span: str) -> float:
    """Parse an option such as ``10`` or ``10s``; argparse reports the ArgumentTypeError."""
    value = math.nan
    for read in (float, lambda each: parse_duration(each) / 1e9):
        with contextlib.suppress(ValueError):
            value = read(text)
            break
    if not low_s <= value <= high_s:  # also false for NaN
        raise argparse.ArgumentTypeError(
            f"expected seconds or a duration such as 5min, {span}; got {text!r}"
        )
    return value


# Longer waits are a mistake in the unit.
parse_wait = partial(parse_seconds, low_s=_NANOSECOND_S, high_s=_DAY_S, span="at most 1 day")


def parse_ttl(text: str) -> int:
    """Parse a time to live in whole seconds, where 0 is allowed; raises ArgumentTypeError."""
    span = f"in whole seconds, at most {GAP_MAX_S // _DAY_S} days"
    value = parse_seconds(text, low_s=0, high_s=GAP_MAX_S, span=span)
    if value % 1 or not (text.isascii() and text.isalnum()) or "e" in text:
        raise argparse.ArgumentTypeError(f"expected a duration {span}; got {text!r}")
    return int(value)


def add_config_options(parser: argparse.ArgumentParser, *shortcuts: tuple[str, str, str]) -> None:
    """Add ``--config``, ``--set`` and ``shortcuts``: (option, key, help)."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (TOML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one configuration key, such as cpu.capacity=8GiB; may be repeated",
    )
    for option, key, text in shortcuts:
        name = option.removeprefix("--")
        parser.add_argument(
            option,
            dest=f"key:{key}",
            metavar=name.upper().replace("-", "_"),
            help=f"{text} ({key})",
        )


def add_timeout_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--timeout``, in seconds."""
    parser.add_argument(
        "--timeout",
        type=parse_wait,
        default=10.0,
        metavar="TIME",
        help="how long to wait (default: 10s)",
    )


def config_from(options: argparse.Namespace) -> Config:
    """Return the configuration of a command line. Raises ConfigError."""
    return load_config(options.config, _overrides(options))


def reread_config(options: argparse.Namespace) -> Config | Sequence[ConfigError]:
    """Return the current configuration of a command line, or all errors in it."""
    return read_config(options.config, _overrides(options))


def parse_setting(item: str) -> tuple[str, str]:
    """Return the key and the value of a ``--set``. Raises ConfigError."""
    key, equals, value = item.partition("=")
    if not equals:
        raise ConfigError("--set", f"{item!r} has no '='", "use --set section.key=value")
    return key.strip(), value.strip()


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    overrides = dict(map(parse_setting, options.set))
    for name, value in vars(options).items():
        if name.startswith("key:") and value is not None:
            key = name.removeprefix("key:")
            if not value:  # mostly an unset shell variable
                raise ConfigError(key, "is empty", "give a value, or omit the option")
            overrides[key] = value
    return overrides
