"""``kvtier top``: what the daemon does, as it does it, and what that is worth."""

import argparse
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvtier.cli.call import add_target_options, call_daemon, target_from
from kvtier.config.units import parse_duration
from kvtier.errors import KvtierError, StartError
from kvtier.v1 import operator_pb2 as pb

__all__ = ["Poller", "StatusView", "add_options", "run"]

_TIMEOUT_S = 1.0

_INTERVAL_MIN_S = 0.2
_INTERVAL_MAX_S = 3600.0
"""Asked more often the daemon would notice, and more seldom nobody would."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
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
    target = target_from(options)

    def asked() -> str:
        return call_daemon(
            target, lambda stub: stub.Stat(pb.StatRequest(), timeout=_TIMEOUT_S).json
        )

    # Only now: what draws is half of the time that other commands take to start.
    from kvtier.cli.top_screen import show

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


_LATE_S = 2.0
"""A document this much behind its time is called old: that long a call may take, and no longer."""

_STOP_TIMEOUT_S = 0.2
"""A call under way ends by its own deadline, and nothing waits for it."""

_Document = Mapping[str, Any]
"""The status document."""


def _understood(document: _Document) -> _Document:
    """Return it; raises StartError where it is an older daemon's."""
    if "grown" in document:
        return document
    problem = f"the daemon is kvtier {document['version']}, and tells less than this needs"
    raise StartError("kvtier top", problem, "use the kvtier that it came with")


@dataclass(frozen=True, slots=True)
class StatusView:
    """What there is to be shown."""

    document: _Document | None = None
    """None: none has come yet."""
    age_s: float = 0.0
    """Of the document."""
    is_old: bool = False
    """Another one should have come by now."""
    problem: str = ""
    """Why the daemon gave no newer one."""


class Poller:
    """Asks with ``ask`` each ``interval_s`` while it is open; ``wake`` is written to at news."""

    def __init__(
        self,
        ask: Callable[[], str],
        interval_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self.interval_s = interval_s
        self._clock_s = clock_s
        self._document: _Document | None = None
        self._told_s = clock_s()
        self._problem = ""
        self._fault: Exception | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-top", daemon=True)
        self.news, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def view(self) -> StatusView:
        """Return what is known now; raises what a bug of ours raised on the thread."""
        with self._lock:
            if self._fault is not None:
                raise self._fault
            age_s = self._clock_s() - self._told_s
            is_old = age_s > self.interval_s + _LATE_S
            return StatusView(self._document, age_s, is_old, self._problem)

    def step(self) -> None:
        """Ask once."""
        asked_s = self._clock_s()
        try:
            document = _understood(json.loads(self._ask()))
        except KvtierError as error:
            with self._lock:
                self._problem = str(error)
        else:
            with self._lock:
                self._document, self._told_s, self._problem = document, asked_s, ""
        self.wake()

    def wake(self) -> None:
        """Have whoever reads ``news`` look."""
        with contextlib.suppress(OSError):  # it is full, so there is something to be read; or over
            os.write(self._wake, b"!")

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                start_s = self._clock_s()
                self.step()
                self._is_over.wait(max(0.0, start_s + self.interval_s - self._clock_s()))
        except Exception as fault:
            self._fault = fault
            self.wake()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self.news)
            os.close(self._wake)
