"""Formats log records as text or JSON lines, and writes them from a thread of its own.

Text from outside (engine names, server replies, paths) cannot start a new line, control a terminal
or fill the disk: unprintable characters are escaped, and the middle of a long text is cut out.

Logging never blocks on the reader: lines wait in a bounded queue. A full pipe, a full disk or a
closed descriptor loses lines. Lost lines are counted, and their number is logged with the next line
that can be written.
"""

import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

__all__ = [
    "FIELDS",
    "FORMS",
    "LogWriter",
    "json_line",
    "line_of",
    "reserve_standard_descriptors",
    "text_line",
    "write_to_stderr",
]

FIELDS = "kvtier_fields"
"""Name of the attribute of a record with the fields of its event."""

_PLAIN = re.compile(r"[\w.:/@+\-]+")
_END_CHARACTERS = 2000
"""Characters kept at each end of a long text: enough for the last calls of a traceback."""


def text_line(record: logging.LogRecord) -> str:
    """Return a record as ``key=value`` pairs."""
    return _pairs(_fields_of(record))


def json_line(record: logging.LogRecord) -> str:
    """Return a record as a JSON object; numbers stay numbers."""
    return _escaped({name: _plain(value) for name, value in _fields_of(record).items()})


FORMS: Mapping[str, Callable[[logging.LogRecord], str]] = {"text": text_line, "json": json_line}
"""Formats of a line, by the values of ``daemon.log_format``."""


def line_of(record: logging.LogRecord) -> str:
    """Return an event with its fields, for the log of another program."""
    return " ".join(filter(None, (record.getMessage(), _pairs(getattr(record, FIELDS, {})))))


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, object] = {
        "time": f"{at}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "log": record.name,
        "event": record.getMessage(),
    }
    fields |= getattr(record, FIELDS, {})
    if record.exc_info:
        fields["trace"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _pairs(fields: dict[str, object]) -> str:
    return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())


def _quoted(value: object) -> str:
    text = _shortened(str(value))
    return text if _PLAIN.fullmatch(text) else _escaped(text)


def _plain(value: object) -> object:
    """Return a value that JSON can represent."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _shortened(str(value))


def _shortened(text: str) -> str:
    num_omitted = len(text) - 2 * _END_CHARACTERS
    if num_omitted <= 0:
        return text
    return f"{text[:_END_CHARACTERS]} ({num_omitted} characters omitted) {text[-_END_CHARACTERS:]}"


def _escaped(value: object) -> str:
    """Return JSON with Unicode characters, or in ASCII if some are not printable."""
    readable = json.dumps(value, ensure_ascii=False)
    return readable if readable.isprintable() else json.dumps(value)


_LINES_MAX = 4096
"""Maximum number of waiting lines: a minute at debug level under load, and a few MB of memory."""

_LAST_S = 0.5
"""Time to write the last lines when the process ends."""

_LOST = "log lines lost because they could not be written"

_STDERR = 2


def write_to_stderr(line: str) -> None:
    """Write a whole line to standard error without buffering; raises OSError."""
    # Not through sys.stderr, whose buffer could block the exit of the process.
    rest = memoryview(line.encode())
    while rest:
        rest = rest[os.write(_STDERR, rest) :]


def reserve_standard_descriptors() -> None:
    """Open descriptors 0 to 2 on /dev/null if they are closed.

    Otherwise a process started without standard error could write its log into another file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class LogWriter(logging.Handler):
    """Formats records with ``form``, and writes them with ``write`` on a thread of its own."""

    def __init__(
        self, form: Callable[[logging.LogRecord], str], write: Callable[[str], object]
    ) -> None:
        super().__init__()
        self._form = form
        self._write = write
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._is_cut = False
        """Whether the last line may have been written in part."""
        self._is_closing = False
        self._is_writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="kvtier-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; never blocks."""
        try:
            line = self._form(record)
        except Exception as error:  # another library passed wrong arguments
            line = self._form(_unformed(record, error))
        with self._changed:
            if len(self._lines) >= _LINES_MAX:
                self._num_lost += 1
                return
            self._lines.append(line)
            self._changed.notify_all()

    @property
    def is_pending(self) -> bool:
        """Return whether a line is waiting or being written."""
        return bool(self._lines) or self._is_writing

    def flush(self) -> None:
        """Wait shortly until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_pending, _LAST_S)

    def close(self) -> None:
        """Drop waiting lines, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._lines.clear()
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closing)
                if not self._lines:
                    return
                line, num_lost = self._lines.popleft(), self._num_lost
                self._is_writing = True
            self._put(line, num_lost)

    def _put(self, line: str, num_lost: int) -> None:
        """Write a line, preceded by the number of lost lines; never raises."""
        start = "\n" if self._is_cut else ""
        try:
            if num_lost:
                start += self._form(_event(_LOST, left_out=num_lost)) + "\n"
            self._write(f"{start}{line}\n")
        except Exception:  # it cannot be reported anywhere, and the next line may succeed
            self._is_cut = True
            with self._changed:
                self._num_lost += 1
        else:
            self._is_cut = False
            with self._changed:
                self._num_lost -= num_lost


def _event(event: str, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("kvtier.log", logging.WARNING, __file__, 0, event, None, None)
    record.__dict__[FIELDS] = fields
    return record


def _unformed(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    where = f"{record.pathname}:{record.lineno}"
    return _event("could not format a log line", of=record.name, where=where, error=repr(error))
