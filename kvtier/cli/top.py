"""``kvtier top``: what the daemon does, as it does it, and what that is worth."""

import argparse

from kvtier.cli.call import add_socket_options, ask, socket_of
from kvtier.config.units import parse_duration
from kvtier.v1 import operator_pb2 as pb

__all__ = ["add_options", "run"]

_TIMEOUT_S = 1.0

_INTERVAL_MIN_S = 0.2
_INTERVAL_MAX_S = 3600.0
"""Asked more often the daemon would notice, and more seldom nobody would."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_socket_options(parser)
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="TIME",
        help="how often to ask, such as 500ms or 2s (1s)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame and end; exit code 2 without an answer",
    )
    parser.add_argument("--no-color", action="store_true", help="as with NO_COLOR set")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show frames until told to leave; a daemon that is away is waited for."""
    target = socket_of(options)

    def asked() -> str:
        return ask(target, lambda stub: stub.Stat(pb.StatRequest(), timeout=_TIMEOUT_S).json)

    # Only now: what draws is half of the time that other commands take to start.
    from kvtier.cli.top_live import show
    from kvtier.cli.top_poll import Poller

    poller = Poller(asked, options.interval)
    return show(poller, is_once=options.once, with_color=not options.no_color)


def _interval(text: str) -> float:
    """Read how often to ask; argparse refuses what raises ArgumentTypeError."""
    try:
        interval_s = float(text) if text.isdecimal() else parse_duration(text) / 1e9
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not _INTERVAL_MIN_S <= interval_s <= _INTERVAL_MAX_S:
        span = f"{_INTERVAL_MIN_S:g} s to {_INTERVAL_MAX_S:g} s"
        raise argparse.ArgumentTypeError(f"{text} is not in the span from {span}")
    return interval_s
