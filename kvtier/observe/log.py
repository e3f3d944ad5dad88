"""The log: one event a line, as ``key=value`` pairs, on standard error.

    time=2026-03-01T09:15:02.123Z level=warning log=kvtier.daemon event="tier is down" tier=ssd

Rules
-----
* An event is a constant sentence; what varies goes into fields, so that lines can be counted.
* What may repeat, goes through ``Repeated``: one line a period, with the number left out.
* Prompts, tokens, salts, URLs with passwords and block contents are never fields.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["Log", "Repeated", "line_of", "start_log"]

_PLAIN = re.compile(r"[\w.:/@+\-]+")
_FIELDS = "kvtier_fields"
_REPEATED_MAX = 256  # events are constants of the source, some dozens: reached only by a bug


class Log:
    """A named log; cheap where the level is not wanted."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Note what only a developer looks for."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Note what an operator wants to read once a day."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Note what kvtier got over by itself, at a cost."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Note what someone has to look at."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Note a bug, with the trace of the exception being handled."""
        self._logger.error(event, exc_info=True, extra={_FIELDS: fields}, stacklevel=2)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, stacklevel=3)


class Repeated:
    """Warnings that may come in thousands: each event is written once a period.

    The line says how many of its kind were left out since the last one.
    """

    def __init__(
        self,
        log: Log,
        period_ns: int = 10 * 10**9,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._log = log
        self._period_ns = period_ns
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._last: dict[str, tuple[int, int]] = {}  # event -> (written at, left out since)

    def warning(self, event: str, **fields: object) -> None:
        """Write the event, or count it if it was written less than a period ago."""
        with self._lock:
            now_ns = self._clock_ns()
            written_ns, left_out = self._last.get(event, (None, 0))
            if written_ns is not None and now_ns - written_ns < self._period_ns:
                self._last[event] = (written_ns, left_out + 1)
                return
            if len(self._last) >= _REPEATED_MAX:
                self._last.clear()
            self._last[event] = (now_ns, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)


class _LineFormatter(logging.Formatter):
    """One record, one line; a trace becomes one quoted field."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "log": record.name,
            "event": record.getMessage(),
        }
        fields |= getattr(record, _FIELDS, {})
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return _pairs(fields)


def line_of(record: logging.LogRecord) -> str:
    """Return an event with its fields, for the log of a process that is not ours."""
    return " ".join(filter(None, (record.getMessage(), _pairs(getattr(record, _FIELDS, {})))))


def _pairs(fields: dict[str, object]) -> str:
    return " ".join(f"{name}={_quote(value)}" for name, value in fields.items())


def _quote(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def start_log(level: str, stream: TextIO | None = None) -> None:
    """Send what is at least ``level`` to ``stream``; called once, where a process starts.

    Other libraries are heard from warnings on. Calling it again replaces the stream.
    """
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(_LineFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(output)
    root.setLevel(logging.WARNING)
    logging.getLogger("kvtier").setLevel(level.upper())
