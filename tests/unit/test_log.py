"""The log: one event a line whatever is in it, storms folded, and nobody waits for its reader."""

import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from kvtier.observe.log import (
    Log,
    RateLimitedLog,
    RateLimitFilter,
    log_unhandled_exceptions,
    start_log,
)
from kvtier.observe.log_output import FORMS, LogWriter
from kvtier.testing.child import await_true

LOG = Log("kvtier.test")
WAIT_S = 60.0


class Written:
    """What was logged since ``start``; the root log is put back afterwards."""

    def __init__(self) -> None:
        self.text: list[str] = []

    def start(self, level: str = "info", form: str = "text") -> None:
        start_log(level, form, self.text.append)

    def lines(self) -> list[str]:
        for handler in logging.getLogger().handlers:
            handler.flush()
        text = "".join(self.text)
        assert not text or text.endswith("\n")
        return text.removesuffix("\n").split("\n") if text else []


@pytest.fixture
def written() -> Iterator[Written]:
    root, ours = logging.getLogger(), logging.getLogger("kvtier")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    root.handlers[:] = []
    written = Written()
    written.start()
    yield written
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_an_event_is_one_line_of_fields(written: Written) -> None:
    LOG.info("store complete", blocks=3, path="/a b", note="two\nlines")
    LOG.debug("not wanted")
    (line,) = written.lines()
    assert "level=info log=kvtier.test" in line
    assert line.endswith('event="store complete" blocks=3 path="/a b" note="two\\nlines"')


def test_in_json_numbers_stay_numbers(written: Written) -> None:
    written.start(form="json")
    LOG.warning("w", blocks=3, ttft_s=0.5, is_up=True, gone=None, nan=float("nan"), of=LOG)
    (line,) = written.lines()
    told = json.loads(line, parse_constant=pytest.fail)
    assert told.pop("time").endswith("Z")
    assert told.pop("of").startswith("<kvtier")
    assert told == {
        "level": "warning",
        "log": "kvtier.test",
        "event": "w",
        "blocks": 3,
        "ttft_s": 0.5,
        "is_up": True,
        "gone": None,
        "nan": "nan",
    }


def test_a_trace_stays_on_its_line(written: Written) -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        LOG.exception("step failed", step=1)
    (line,) = written.lines()
    assert 'event="step failed" step=1 trace="Traceback' in line
    assert "KeyError" in line


FORGED = 'time=2026-01-01T00:00:00.000Z level=error log=kvtier.daemon event="all is lost"'
HOSTILE = {
    "newline": f"x\n{FORGED}",
    "carriage return": f"x\r{FORGED}",
    "other ends of lines": f"x\v{FORGED}\f\x1c\x85\u2028\u2029{FORGED}",
    "terminal": "\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\b\0",
    "direction": "\u202egpj.exe\u2066",
    "not text": "path\udcff\udc80",
    "quotes": 'x" level=error event="y\\',
    "pairs": "x level=error",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", HOSTILE)
def test_what_comes_from_outside_forges_no_line(written: Written, form: str, of: str) -> None:
    hostile = HOSTILE[of]
    written.start(form=form)
    LOG.warning("told", engine=hostile)
    logging.getLogger("redis").warning("answered %s", hostile)
    try:
        raise ValueError(hostile)
    except ValueError:
        LOG.exception("broke")
    lines = written.lines()
    assert len(lines) == 3
    for line in lines:
        assert line.isprintable(), repr(line)
        line.encode()  # or it could not be written
    if form == "json":
        assert json.loads(lines[0])["engine"] == hostile
    else:
        assert json.loads(lines[0].partition(" engine=")[2]) == hostile


def test_a_long_text_loses_its_middle(written: Written) -> None:
    LOG.warning("answered", error=f"begin{'x' * 1_000_000}end")
    (line,) = written.lines()
    assert len(line) < 5000
    assert "begin" in line
    assert "end" in line
    assert "(996008 characters omitted)" in line


def test_a_line_that_cannot_be_made_says_so(written: Written) -> None:
    written.start()  # without pytest's own handlers, which would fail
    logging.getLogger("uvicorn.error").warning("%d workers", "no number")
    (line,) = written.lines()
    assert 'event="could not format a log line" of=uvicorn.error' in line
    assert "test_log.py" in line


class Periods:
    """Ends periods when the test says so."""

    def __init__(self) -> None:
        self.open: list[Callable[[], None]] = []

    def later(self, _seconds: float, call: Callable[[], None]) -> None:
        self.open.append(call)

    def end(self) -> None:
        calls, self.open = self.open, []
        for call in calls:
            call()


def test_of_a_storm_the_first_and_the_last_of_each_period_are_written(written: Written) -> None:
    periods = Periods()
    log = RateLimitedLog(LOG, later=periods.later)
    for number in range(5):
        log.warning("write failed", number=number)
    log.warning("another thing")
    periods.end()
    log.warning("write failed", number=5)
    periods.end()
    periods.end()
    assert not periods.open, "nothing is left behind a storm"
    log.warning("write failed", number=6)
    assert [line.partition("event=")[2] for line in written.lines()] == [
        '"write failed" number=0',
        '"another thing"',
        '"write failed" number=4 left_out=3',
        '"write failed" number=5',
        '"write failed" number=6',
    ]


def test_the_end_of_a_storm_is_told_by_itself(written: Written) -> None:
    log = RateLimitedLog(LOG, period_ns=10**7)
    for _ in range(3):
        log.warning("write failed")
    await_true(lambda: len(written.lines()) > 1, "the rest is told")


def test_a_storm_of_a_hundred_thousand_costs_little_and_adds_up(written: Written) -> None:
    written.start(form="json")
    periods = Periods()
    log = RateLimitedLog(LOG, later=periods.later)

    def storm() -> None:
        for _ in range(25_000):
            log.warning("write failed", tier="ssd")

    threads = [threading.Thread(target=storm) for _ in range(4)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    print(f"took {time.monotonic() - began_s:.2f} s")
    periods.end()
    told = [json.loads(line) for line in written.lines()]
    assert len(told) == 2
    assert len(told) + sum(line.get("left_out", 0) for line in told) == 100_000


def test_of_a_bug_that_repeats_one_trace_is_written(written: Written) -> None:
    periods = Periods()
    log = RateLimitedLog(LOG, later=periods.later)
    for number in range(3):
        try:
            raise ValueError(number)
        except ValueError:
            log.exception("a hook failed", hook="load")
    periods.end()
    first, last = written.lines()
    assert "trace=" in first
    assert last.endswith('event="a hook failed" hook=load error="ValueError(2)" left_out=1')
    assert "level=error" in last


def test_a_storm_of_another_librarys_is_folded(written: Written) -> None:
    periods = Periods()
    written.start()
    (outlet,) = logging.getLogger().handlers
    outlet.filters[:] = [RateLimitFilter(RateLimitedLog(LOG, later=periods.later))]
    for number in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid request %d", number)
    periods.end()
    first, last = written.lines()
    assert first.endswith('log=uvicorn.error event="Invalid request 0"')
    assert last.endswith('event="Invalid request 999" left_out=998')


def test_nobody_waits_for_a_reader_that_stands_still(written: Written) -> None:
    goes_on, is_stuck = threading.Event(), threading.Event()

    def write(line: str) -> None:
        is_stuck.set()
        assert goes_on.wait(WAIT_S)
        written.text.append(line)

    start_log("info", "json", write)
    LOG.info("first")
    assert is_stuck.wait(WAIT_S)
    for number in range(10_000):
        LOG.info("event", number=number)
    goes_on.set()
    await_true(lambda: written.lines() and not pending(), "all is written")
    told = [json.loads(line) for line in written.lines()]
    left_out = [line["left_out"] for line in told if "left_out" in line]
    assert len(left_out) == 1
    assert len(told) - 1 + left_out[0] == 10_001
    assert len(told) < 5000


def pending() -> bool:
    (outlet,) = logging.getLogger().handlers
    assert isinstance(outlet, LogWriter)
    return outlet.is_pending


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("closed")])
def test_what_could_not_be_written_is_told_when_it_can_again(
    written: Written, fault: Exception
) -> None:
    faults = iter([None, fault, fault])

    def write(line: str) -> None:
        if failing := next(faults, None):
            raise failing
        written.text.append(line)

    start_log("info", "text", write)
    for number in range(4):
        LOG.info("event", number=number)
    first, cut, told, last = written.lines()
    assert first.endswith("number=0")
    assert not cut, "the last line may have been cut: the next one begins anew"
    assert "log lines lost" in told
    assert told.endswith("left_out=2")
    assert last.endswith("number=3")


def test_what_nobody_caught_is_a_line_of_the_log(written: Written) -> None:
    before = threading.excepthook, sys.unraisablehook
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            log_unhandled_exceptions()
            thread = threading.Thread(target=lambda: 1 // 0, name="kvtier-odd")
            thread.start()
            thread.join(WAIT_S)
            warnings.warn("an old\nway", stacklevel=1)
            logging.captureWarnings(False)
    finally:
        threading.excepthook, sys.unraisablehook = before
    thread_line, warning_line = written.lines()
    assert (
        'event="unhandled exception in a thread" thread=kvtier-odd trace="Traceback' in thread_line
    )
    assert "log=py.warnings" in warning_line
    assert "an old\\nway" in warning_line


@pytest.mark.parametrize("fault", [OSError("full"), ValueError("closed"), RuntimeError("a bug")])
def test_whatever_writing_raises_the_next_line_is_written(
    written: Written, fault: Exception
) -> None:
    faults = [fault]

    def write(line: str) -> None:
        if faults:
            raise faults.pop()
        written.text.append(line)

    start_log("info", "text", write)
    LOG.info("lost")
    await_true(lambda: not faults, "the first line was tried")
    LOG.info("written")
    lines = written.lines()
    assert "left_out=1" in lines[-2]
    assert lines[-1].endswith("event=written")


def test_without_a_thread_for_its_period_an_event_is_heard_again(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    log = RateLimitedLog(LOG)
    for number in range(3):
        log.warning("write failed", number=number)
    assert len(written.lines()) == 3, "rather all than none ever again"
