"""Showing the frames of ``kvtier top``: in a terminal taken over, or one after the other."""

import os
import sys
import time

from rich.console import Console, Group

from kvtier.cli.shown import COLUMNS
from kvtier.cli.top_frame import Size, frame
from kvtier.cli.top_poll import Poller
from kvtier.cli.top_screen import Screen

__all__ = ["show"]

_REDRAW_S = 1.0
"""Without news, so that it shows how old is what it shows."""

_LEAVE = frozenset("qQ\x03\x04")
"""Also Ctrl-D, and Ctrl-C where the terminal makes no signal of it."""

_LINES = 60
"""Of a frame that no window bounds: all that is told fits."""


def show(poller: Poller, *, is_once: bool, with_color: bool) -> int:
    """Show what the daemon does until told to leave; returns the exit code."""
    for name in ("COLUMNS", "LINES"):  # the window is asked, which may change
        os.environ.pop(name, None)
    # None: unless the environment says NO_COLOR.
    console = Console(no_color=None if with_color else True, highlight=False)
    if is_once or not sys.stdout.isatty() or console.is_dumb_terminal:
        return _print_frames(poller, console, is_once=is_once)
    with Screen(console) as screen, poller:
        while True:
            size = Size(*console.size, is_ascii=console.options.ascii_only)
            screen.draw(Group(*frame(poller.view(), size, "q quits")))
            if _LEAVE & set(screen.wait(poller.news, _REDRAW_S)):
                return 0


def _print_frames(poller: Poller, console: Console, *, is_once: bool) -> int:
    """Print frames as text."""
    size = Size(COLUMNS, _LINES, is_ascii=console.options.ascii_only)
    while True:
        poller.step()
        view = poller.view()
        for line in frame(view, size):
            console.print(line, no_wrap=True, crop=False)
        if is_once:
            return 2 if view.problem else 0
        console.print()
        time.sleep(poller.interval_s)
