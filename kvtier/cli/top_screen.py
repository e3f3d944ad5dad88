"""Draws ``kvtier top``: full-screen in a terminal, otherwise frame after frame.

The terminal is restored on every exit: a key, a signal or an exception. After SIGKILL, run `reset`.
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

_REDRAW_S = 1.0
"""Redraw interval without news, so that the age of the status stays current."""

_QUIT_KEYS = frozenset("qQ\x03\x04")
"""q, Ctrl-D, and Ctrl-C if the terminal does not turn it into a signal."""

_LINES = 60
"""Lines of a printed frame: enough for everything that is shown."""

_READ_BYTES = 1024
_END_OF_KEYS = b"\x04"
"""Ctrl-D: the terminal has hung up."""


def show(poller: Poller, *, is_once: bool, with_color: bool) -> int:
    """Show frames until the user quits; returns the exit code."""
    for name in ("COLUMNS", "LINES"):  # rich would trust them; the window may be resized
        os.environ.pop(name, None)
    # None: follow NO_COLOR.
    console = Console(no_color=None if with_color else True, highlight=False)
    if is_once or not sys.stdout.isatty() or console.is_dumb_terminal:
        return _print_frames(poller, console, is_once=is_once)
    with Screen(console) as screen, poller:
        while True:
            size = WindowSize(*console.size, is_ascii=console.options.ascii_only)
            screen.draw(Group(*render_frame(poller.view(), size, "q quits")))
            if _QUIT_KEYS & set(screen.wait(poller.news, _REDRAW_S)):
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


class Screen:
    """A context that takes over the terminal of ``console`` and standard input."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        # select() would always report anything but a terminal as readable.
        self._keys = [sys.stdin.fileno()] if sys.stdin and sys.stdin.isatty() else []
        self._saved_mode: list[Any] = []
        self._saved_signals: dict[signal.Signals, Any] = {}
        self._resized, self._resize = os.pipe()
        os.set_blocking(self._resize, False)

    def draw(self, frame: RenderableType) -> None:
        """Replace the frame on the screen, in one write."""
        assert self._live is not None, "the screen was entered"
        self._live.update(frame, refresh=True)

    def wait(self, news: int, timeout_s: float) -> str:
        """Wait for a key, for ``news`` to be readable, for a resize, or for the timeout.

        Returns the keys; Ctrl-D if the terminal has hung up.
        """
        ready, _, _ = select.select([*self._keys, news, self._resized], [], [], timeout_s)
        for pipe in (news, self._resized):
            if pipe in ready:
                os.read(pipe, _READ_BYTES)
        typed = [os.read(keys, _READ_BYTES) or _END_OF_KEYS for keys in self._keys if keys in ready]
        return b"".join(typed).decode(errors="replace")

    def _take(self) -> None:
        for keys in self._keys:
            self._saved_mode = termios.tcgetattr(keys)
            tty.setcbreak(keys, termios.TCSANOW)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _restore(self) -> None:
        live, self._live = self._live, None
        mode, self._saved_mode = self._saved_mode, []
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            if live is not None:
                live.stop()
            for keys in self._keys if mode else ():
                termios.tcsetattr(keys, termios.TCSANOW, mode)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Suspend on Ctrl-Z, and continue on SIGCONT."""
        self._restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self._note_resize(0, None)

    def _note_resize(self, _number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._resize, b"!")

    def __enter__(self) -> Self:
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: _exit,
            signal.SIGHUP: _exit,
            signal.SIGTSTP: self._suspend,
            signal.SIGWINCH: self._note_resize,
        }
        self._saved_signals = {
            number: signal.signal(number, handlers[number])
            for number in handlers
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
        }
        try:
            self._take()
        except BaseException:  # also a signal that arrived meanwhile
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number, before in self._saved_signals.items():
            signal.signal(number, before)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
