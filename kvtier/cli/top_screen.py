"""The terminal that ``kvtier top`` draws on: taken over whole, and given back as it was.

It is given back on whatever way out: the key, a signal, an exception. What kills without asking
(SIGKILL) leaves it to `reset`.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live

from kvtier.cli.formatting import COLUMNS
from kvtier.cli.top import Poller
from kvtier.cli.top_frame import WindowSize, render_frame

__all__ = ["Screen", "show"]

_READ_BYTES = 1024
_END_OF_KEYS = b"\x04"
"""Ctrl-D: the terminal has hung up."""


class Screen:
    """The terminal of ``console`` and standard input, between entering the context and leaving."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        # What cannot be typed at is always readable, and would only spin.
        self._keys = [sys.stdin.fileno()] if sys.stdin and sys.stdin.isatty() else []
        self._before: list[Any] = []
        self._signals: dict[signal.Signals, Any] = {}
        self._resized, self._resize = os.pipe()
        os.set_blocking(self._resize, False)

    def draw(self, frame: RenderableType) -> None:
        """Show a frame in place of the one before, in one write."""
        assert self._live is not None, "the screen was entered"
        self._live.update(frame, refresh=True)

    def wait(self, news: int, timeout_s: float) -> str:
        """Wait for a key, for ``news`` to be readable, for another size, or for the time.

        Returns the keys; the end of what can be typed is Ctrl-D.
        """
        ready, _, _ = select.select([*self._keys, news, self._resized], [], [], timeout_s)
        for pipe in (news, self._resized):
            if pipe in ready:
                os.read(pipe, _READ_BYTES)
        typed = [os.read(keys, _READ_BYTES) or _END_OF_KEYS for keys in self._keys if keys in ready]
        return b"".join(typed).decode(errors="replace")

    def _take(self) -> None:
        for keys in self._keys:
            self._before = termios.tcgetattr(keys)
            tty.setcbreak(keys, termios.TCSANOW)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _give_back(self) -> None:
        live, self._live = self._live, None
        before, self._before = self._before, []
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            if live is not None:
                live.stop()
            for keys in self._keys if before else ():
                termios.tcsetattr(keys, termios.TCSANOW, before)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Stop as Ctrl-Z has any program stop, and go on when told to."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self._note_size(0, None)

    def _note_size(self, _number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._resize, b"!")

    def __enter__(self) -> Self:
        hear: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: _end,
            signal.SIGHUP: _end,
            signal.SIGTSTP: self._suspend,
            signal.SIGWINCH: self._note_size,
        }
        self._signals = {
            number: signal.signal(number, hear[number])
            for number in hear
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
        }
        try:
            self._take()
        except BaseException:  # also a signal that came meanwhile
            self._give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, before in self._signals.items():
            signal.signal(number, before)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


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
            size = WindowSize(*console.size, is_ascii=console.options.ascii_only)
            screen.draw(Group(*render_frame(poller.view(), size, "q quits")))
            if _LEAVE & set(screen.wait(poller.news, _REDRAW_S)):
                return 0


def _print_frames(poller: Poller, console: Console, *, is_once: bool) -> int:
    """Print frames as text."""
    size = WindowSize(COLUMNS, _LINES, is_ascii=console.options.ascii_only)
    while True:
        poller.step()
        view = poller.view()
        for line in render_frame(view, size):
            console.print(line, no_wrap=True, crop=False)
        if is_once:
            return 2 if view.problem else 0
        console.print()
        time.sleep(poller.interval_s)
