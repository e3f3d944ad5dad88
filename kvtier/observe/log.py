"""The log: one event a line, as ``key=value`` pairs or as JSON, on standard error.

    time=2026-03-01T09:15:02.123Z level=warning log=kvtier.daemon event="tier is down" tier=ssd

Rules
-----
* An event is a constant sentence; what varies goes into fields, so that lines can be counted.
* A line about a request has its ``request``, and its ``decision`` where there is one.
* What may repeat, goes through ``RateLimitedLog``: one line a period, with the number left out.
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

_REPEATED_MAX = 256  # events are constants of the source, some dozens: reached only by a bug

_Tell = Callable[..., None]


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
        self._logger.error(event, exc_info=True, extra={FIELDS: _told(fields)}, stacklevel=2)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={FIELDS: _told(fields)}, stacklevel=3)


def _told(fields: dict[str, object]) -> dict[str, object]:
    """Return what is written: of errors their words, since they hold the frames they came through.

    Whoever keeps a line would keep those, and all that they refer to.
    """
    return {
        name: str(value) if isinstance(value, BaseException) else value
        for name, value in fields.items()
    }


class RateLimitedLog:
    """What may come in thousands, mostly warnings: each event is written once a period.

    The first one is written at once. Of those that follow within a period the last is written at
    its end, with the number of those left out in between: lines and ``left_out`` add up to all.
    ``later`` has something done after so many seconds, on any thread.
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
        """By event within its period: how many were not written, and how to write the last."""

    def info(self, event: str, **fields: object) -> None:
        """Write the event, or keep it for the end of its period if there was one in it."""
        tell = partial(self._log.info, event, **_told(fields))
        self._tell(event, tell, tell)

    def warning(self, event: str, **fields: object) -> None:
        """Write a warning likewise."""
        tell = partial(self._log.warning, event, **_told(fields))
        self._tell(event, tell, tell)

    def exception(self, event: str, **fields: object) -> None:
        """Write a bug likewise; only the first one of a period with its trace."""
        fields = _told(fields)
        later = partial(self._log.error, event, **fields, error=repr(sys.exception()))
        self._tell(event, partial(self._log.exception, event, **fields), later)

    def record(self, record: logging.LogRecord) -> None:
        """Write another library's record likewise; its unformatted message is the event."""

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
    """Folds what other libraries say: a stranger's bad requests must not fill the log."""

    def __init__(self, repeated: RateLimitedLog) -> None:
        super().__init__()
        self._repeated = repeated

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass what is ours, or was folded; the rest comes again when it is its turn."""
        if FIELDS in record.__dict__ or record.name.startswith("kvtier"):
            return True
        self._repeated.record(record)
        return False


def _later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # no thread is to be had: better more lines than none ever again
        call()


def start_log(
    level: str, form: str = "text", write: Callable[[str], object] = write_to_stderr
) -> None:
    """Write what is at least ``level``; called once, where a process starts.

    ``form`` is a key of ``FORMS``. Other libraries are heard from warnings on. Calling it again
    replaces what was there.
    """
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.flush()
        old.close()
    outlet = LogWriter(FORMS[form], write)
    outlet.addFilter(RateLimitFilter(RateLimitedLog(Log("kvtier.log"))))
    root.addHandler(outlet)
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Write what is at least ``level`` from now on; of other libraries it stays as it was."""
    logging.getLogger("kvtier").setLevel(level.upper())


def flush_log() -> None:
    """Wait a moment until what was logged is written, before an end that runs nothing more."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_unhandled_exceptions() -> None:
    """Have the log say what else would be written past it: warnings, and what nobody caught.

    For a process of our own.
    """
    reserve_standard_descriptors()
    logging.captureWarnings(True)
    log = logging.getLogger("kvtier")

    def run_in_thread(fault: threading.ExceptHookArgs) -> None:
        if fault.exc_value is not None and fault.exc_type is not SystemExit:
            name = fault.thread.name if fault.thread else "unknown"
            trace = (fault.exc_type, fault.exc_value, fault.exc_traceback)
            log.error("a thread ended", exc_info=trace, extra={FIELDS: {"thread": name}})

    def unraisable(fault: "sys.UnraisableHookArgs") -> None:
        if fault.exc_value is not None:
            trace = (fault.exc_type, fault.exc_value, fault.exc_traceback)
            log.error("a fault that nobody could catch", exc_info=trace)

    threading.excepthook, sys.unraisablehook = run_in_thread, unraisable
