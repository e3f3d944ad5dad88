"""An event as one line of text or JSON, whatever is in it.

What comes from outside (names of engines, answers of servers, paths) cannot begin a line, steer a
terminal or fill the disk: what is not printable is escaped, and a long text loses its middle.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping

__all__ = ["FIELDS", "FORMS", "json_line", "line_of", "text_line"]

FIELDS = "kvtier_fields"
"""The attribute of a record that holds the fields of its event."""

_PLAIN = re.compile(r"[\w.:/@+\-]+")
_END_CHARACTERS = 2000
"""Of each end of a long text: room for the last calls of a trace."""


def text_line(record: logging.LogRecord) -> str:
    """Return a record as ``key=value`` pairs."""
    return _pairs(_fields_of(record))


def json_line(record: logging.LogRecord) -> str:
    """Return a record as a JSON object; numbers stay numbers."""
    return _escaped({name: _plain(value) for name, value in _fields_of(record).items()})


FORMS: Mapping[str, Callable[[logging.LogRecord], str]] = {"text": text_line, "json": json_line}
"""How a line may be written, as ``daemon.log_format`` names it."""


def line_of(record: logging.LogRecord) -> str:
    """Return an event with its fields, for the log of a process that is not ours."""
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
    """Return what JSON has of a value."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _shortened(str(value))


def _shortened(text: str) -> str:
    num_left_out = len(text) - 2 * _END_CHARACTERS
    if num_left_out <= 0:
        return text
    return f"{text[:_END_CHARACTERS]} ({num_left_out} left out) {text[-_END_CHARACTERS:]}"


def _escaped(value: object) -> str:
    """Return JSON that anyone can read, or where that would not be safe, in ASCII."""
    readable = json.dumps(value, ensure_ascii=False)
    return readable if readable.isprintable() else json.dumps(value)
