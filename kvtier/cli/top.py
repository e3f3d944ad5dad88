"""``kvtier top``: a live view of the daemon's status document.

A thread fetches the status, so that keys and resizes are handled while a call is in flight.
"""

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from kvtier.cli.call import add_target_options, fetch_status, target_from
from kvtier.cli.options import parse_seconds
from kvtier.errors import KvtierError, StartError

__all__ = ["Poller", "StatusView", "add_options", "run"]

_LATE_S = 2.0
"""A document is old if it is this much older than the interval: a call may take that long."""

_STOP_TIMEOUT_S = 0.2
"""A call in flight ends by its own deadline; nothing waits for it."""

_Document = Mapping[str, Any]
"""The status document."""

# A shorter interval would be a load on the daemon.
_parse_interval = partial(parse_seconds, low_s=0.2, high_s=3600, span="from 0.2s to 1h")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_target_options(parser)
    parser.add_argument(
        "--interval",
        type=_parse_interval,
        default=1.0,
        metavar="TIME",
        help="refresh interval, such as 500ms or 2s (default: 1s)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame and exit; exit code 2 if the daemon does not answer",
    )
    parser.add_argument("--no-color", action="store_true", help="no colors, as with NO_COLOR set")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show frames until the user quits, also while the daemon is down."""
    fetch = partial(fetch_status, target_from(options))
    # Drawing takes half as long to import as other commands take to start.
    from kvtier.cli.top_screen import show

    poller = Poller(fetch, options.interval)
    return show(poller, is_once=options.once, with_color=not options.no_color)


@dataclass(frozen=True, slots=True)
class StatusView:
    """The last known status."""

    document: _Document | None = None
    """None until the first answer."""

    age_s: float = 0.0
    """Age of the document."""

    is_old: bool = False
    """Whether the next document is overdue."""

    problem: str = ""
    """Why there is no newer document."""


class Poller:
    """Calls ``fetch`` every ``interval_s`` while it is open; ``news`` is a pipe that signals it."""

    def __init__(
        self,
        fetch: Callable[[], _Document],
        interval_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self.interval_s = interval_s
        self._clock_s = clock_s
        self._document: _Document | None = None
        self._fetched_s = clock_s()
        self._problem = ""
        self._fault: Exception | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-top", daemon=True)
        self.news, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def view(self) -> StatusView:
        """Return the last known status; raises an unexpected exception of the thread."""
        with self._lock:
            if self._fault is not None:
                raise self._fault
            age_s = self._clock_s() - self._fetched_s
            is_old = age_s > self.interval_s + _LATE_S
            return StatusView(self._document, age_s, is_old, self._problem)

    def step(self) -> None:
        """Fetch the status once."""
        started_s = self._clock_s()
        try:
            document = _require_current(self._fetch())
        except KvtierError as error:
            with self._lock:
                self._problem = str(error)
        else:
            with self._lock:
                self._document, self._fetched_s, self._problem = document, started_s, ""
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(OSError):  # full, so the reader wakes up anyway; or closed
            os.write(self._wake, b"!")

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                start_s = self._clock_s()
                self.step()
                self._is_over.wait(max(0.0, start_s + self.interval_s - self._clock_s()))
        except Exception as fault:
            self._fault = fault
            self._signal()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self.news)
            os.close(self._wake)


def _require_current(document: _Document) -> _Document:
    """Return the document. Raises StartError if the daemon's version lacks what is shown."""
    if "grown" in document:
        return document
    problem = f"the daemon is kvtier {document['version']}, which is too old for this command"
    raise StartError("kvtier top", problem, "use the kvtier of the daemon's version")
