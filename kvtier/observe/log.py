"""Structured logging to standard error: one event per line, as ``key=value`` pairs or JSON.

    time=2026-03-01T09:15:02.123Z level=warning log=kvtier.daemon event="tier is down" tier=ssd

Rules
-----
* An event is a constant sentence. Variable parts are fields, so that events can be counted.
* A line about a request has its ``request``, and its ``decision`` if there is one.
* Events that may repeat go through ``RateLimitedLog``.
* Prompts, tokens, salts, URLs with passwords and block contents are never fields.
* Logging never blocks: see ``log_output``.
"""

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial

from kvtier.observe.log_output import (
    FIELDS,
    FORMS,
    LogWriter,
    reserve_standard_descriptors,
    write_to_stderr,
)

__all__ = [
    "Log",
    "RateLimitFilter",
    "RateLimitedLog",
    "flush_log",
    "log_unhandled_exceptions",
    "set_level",
    "start_log",
]

_REPEATED_MAX = 256  # events are constants, a few dozen: reached only by a bug

_Tell = Callable[..., None]


class Log:
    """A named log; cheap if the level is disabled."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log details for developers."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event that an operator reads once a day."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a problem that kvtier handled at a cost."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a problem that needs attention."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log a bug, with the traceback of the current exception."""
        self._logger.error(event, exc_info=True, extra={FIELDS: _with_text(fields)}, stacklevel=2)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={FIELDS: _with_text(fields)}, stacklevel=3)


def _with_text(fields: dict[str, object]) -> dict[str, object]:
    """Return fields with exceptions as text.

    An exception in a queued record would keep its frames and all their variables alive.
    """
    return {
        name: str(value) if isinstance(value, BaseException) else value
        for name, value in fields.items()
    }


class RateLimitedLog:
    """Logs each event at most once per period.

    The first one is logged at once. Of those within a period, the last is logged at its end, with
    the number of omitted ones in ``left_out``. ``later`` calls a function after some seconds,
    on any thread.
    """

    def __init__(
        self,
        log: Log,
        period_ns: int = 10 * 10**9,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._log = log
        self._period_s = period_ns / 1e9
        self._later = later or _later
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, _Tell]] = {}
        """By event: the number of pending lines, and a function that logs the last one."""

    def info(self, event: str, **fields: object) -> None:
        """Log the event, now or at the end of its period."""
        tell = partial(self._log.info, event, **_with_text(fields))
        self._tell(event, tell, tell)

    def warning(self, event: str, **fields: object) -> None:
        """Log a warning, now or at the end of its period."""
        tell = partial(self._log.warning, event, **_with_text(fields))
        self._tell(event, tell, tell)

    def exception(self, event: str, **fields: object) -> None:
        """Log a bug likewise; only the first one of a period has a traceback."""
        fields = _with_text(fields)
        later = partial(self._log.error, event, **fields, error=repr(sys.exception()))
        self._tell(event, partial(self._log.exception, event, **fields), later)

    def record(self, record: logging.LogRecord) -> None:
        """Log a record of another library likewise; its unformatted message is the event."""

        def tell(**fields: object) -> None:
            record.__dict__[FIELDS] = fields
            logging.getLogger(record.name).handle(record)

        self._tell(f"{record.name}: {record.msg}", tell, tell)

    def _tell(self, event: str, now: _Tell, later: _Tell) -> None:
        with self._lock:
            if event in self._held:
                self._held[event] = (self._held[event][0] + 1, later)
                return
            is_counted = len(self._held) < _REPEATED_MAX
            if is_counted:
                self._held[event] = (0, later)
        if is_counted:
            self._later(self._period_s, partial(self._end_period, event))
        now()

    def _end_period(self, event: str) -> None:
        with self._lock:
            num_held, tell = self._held.pop(event)
            if num_held:
                self._held[event] = (0, tell)
        if num_held:
            self._later(self._period_s, partial(self._end_period, event))
            tell(**({"left_out": num_held - 1} if num_held > 1 else {}))


class RateLimitFilter(logging.Filter):
    """Rate-limits the records of other libraries, so that bad requests cannot fill the log."""

    def __init__(self, repeated: RateLimitedLog) -> None:
        super().__init__()
        self._repeated = repeated

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass our own and rate-limited records; others are logged later by ``RateLimitedLog``."""
        if FIELDS in record.__dict__ or record.name.startswith("kvtier"):
            return True
        self._repeated.record(record)
        return False


def _later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # cannot start a thread: too many lines are better than none
        call()


def start_log(
    level: str, form: str = "text", write: Callable[[str], object] = write_to_stderr
) -> None:
    """Start logging at ``level``; called once, when a process starts.

    ``form`` is a key of ``FORMS``. Other libraries log at level warning. A second call replaces the
    handlers of the first.
    """
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.flush()
        old.close()
    writer = LogWriter(FORMS[form], write)
    writer.addFilter(RateLimitFilter(RateLimitedLog(Log("kvtier.log"))))
    root.addHandler(writer)
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of kvtier's logs."""
    logging.getLogger("kvtier").setLevel(level.upper())


def flush_log() -> None:
    """Wait shortly until all lines are written; for use before an abrupt exit."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_unhandled_exceptions() -> None:
    """Log Python warnings and unhandled exceptions. Only for processes of kvtier."""
    reserve_standard_descriptors()
    logging.captureWarnings(True)
    log = logging.getLogger("kvtier")

    def run_in_thread(fault: threading.ExceptHookArgs) -> None:
        if fault.exc_value is not None and fault.exc_type is not SystemExit:
            name = fault.thread.name if fault.thread else "unknown"
            trace = (fault.exc_type, fault.exc_value, fault.exc_traceback)
            log.error(
                "unhandled exception in a thread", exc_info=trace, extra={FIELDS: {"thread": name}}
            )

    def unraisable(fault: "sys.UnraisableHookArgs") -> None:
        if fault.exc_value is not None:
            trace = (fault.exc_type, fault.exc_value, fault.exc_traceback)
            log.error("unhandled exception", exc_info=trace)

    threading.excepthook, sys.unraisablehook = run_in_thread, unraisable
