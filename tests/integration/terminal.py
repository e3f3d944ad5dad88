"""A program in a terminal of its own, whose screen a test reads as somebody who looks would."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyte

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
_LOOK_S = 0.05


class Terminal:
    """Runs ``command`` in a window of so many columns and lines, which emulates an xterm."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        lines: int = 24,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._master, self._slave = pty.openpty()
        self._screen: Any = pyte.Screen(columns, lines)
        self._stream: Any = pyte.ByteStream(self._screen)
        self.written = b""
        """All that the program wrote."""
        self._set_size(columns, lines)
        self.settings = termios.tcgetattr(self._slave)
        """How the terminal was before the program came."""
        self._popen = subprocess.Popen(
            ["setsid", "--ctty", *command],  # so that keys make signals
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=os.environ
            | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
            | dict(environment or {}),
        )

    @property
    def shown(self) -> str:
        """Return what stands on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def is_given_back(self) -> bool:
        """Tell whether the terminal is as it was, with the main screen and its cursor."""
        last = max(self.written.rfind(b"\x1b[?1049l"), 0)
        is_main = b"\x1b[?1049h" not in self.written[last:]
        is_cursor_shown = self.written.rfind(b"\x1b[?25h") >= self.written.rfind(b"\x1b[?25l")
        is_as_before = termios.tcgetattr(self._slave) == self.settings
        return is_main and is_cursor_shown and is_as_before

    def await_true(self, look: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Read what is written until ``look`` is true; fails with the screen."""
        deadline_s = time.monotonic() + timeout_s
        while not look():
            is_last = time.monotonic() > deadline_s
            ready, _, _ = select.select([self._master], [], [], _LOOK_S)
            if ready:
                with contextlib.suppress(OSError):  # the program has ended
                    self._read()
            assert not is_last or look(), f"not within {timeout_s} s: {what}\n{self.shown}"

    def await_shown(self, pattern: str, timeout_s: float = _START_TIMEOUT_S) -> str:
        """Wait until a pattern stands on the screen; returns all that stands there."""
        self.await_true(
            lambda: bool(re.search(pattern, self.shown, re.MULTILINE)), pattern, timeout_s
        )
        return self.shown

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size, as one does with the mouse."""
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def send(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        self._popen.send_signal(number)

    @property
    def is_over(self) -> bool:
        """Tell whether the program has ended."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """Close the terminal; programs that run in it get SIGHUP."""
        os.close(self._master)
        self._master = -1

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        self.await_true(lambda: self.is_over, "it ends", _STOP_TIMEOUT_S)
        while select.select([self._master], [], [], 0)[0]:
            self._read()
        code: int = self._popen.returncode
        return code

    def _read(self) -> None:
        piece = os.read(self._master, 1 << 16)
        self.written += piece
        self._stream.feed(piece)

    def _set_size(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if not self.is_over:
            self._popen.kill()
            self._popen.wait(_STOP_TIMEOUT_S)
        if self._master >= 0:
            os.close(self._master)
        os.close(self._slave)
