"""Threads that may hang: their faults are logged, their queue is bounded, and no exit waits."""

import logging
import subprocess
import sys
import threading

import pytest

from kvtier.connectors.kit.guard import Threads
from kvtier.observe.log import Log
from kvtier.testing.child import await_true

HANGING = """
import threading
from kvtier.connectors.kit.guard import Threads
from kvtier.observe.log import Log

threads, is_hanging = Threads(Log("kvtier.test"), "test", 1, 1), threading.Event()

def hang():
    is_hanging.set()
    threading.Event().wait()

assert threads.submit(hang)
assert is_hanging.wait(30)
"""


def made(queued_max: int = 4) -> Threads:
    return Threads(Log("kvtier.test"), "test", 1, queued_max)


def test_a_fault_is_logged_and_its_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    threads, ran = made(queued_max=200), threading.Event()
    with caplog.at_level(logging.ERROR, "kvtier.test"):
        for _ in range(100):
            assert threads.submit(divmod, 1, 0)
        assert threads.submit(ran.set)
        assert ran.wait(30)
    said = [record.message for record in caplog.records if record.name == "kvtier.test"]
    assert said == ["a thread of the connector failed"]
    assert "ZeroDivisionError" in caplog.text
    assert threads.close(10)


def test_what_waits_is_bounded_and_does_not_begin_after_the_end() -> None:
    threads, gate, began = made(queued_max=2), threading.Event(), threading.Event()
    late: list[int] = []

    def hang() -> None:
        began.set()
        gate.wait(30)

    assert threads.submit(hang)
    assert began.wait(30)
    assert [threads.submit(late.append, number) for number in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert not threads.close(0.01), "a call has not ended"
    gate.set()
    assert threads.close(10)
    assert not late
    assert not threads.submit(late.append, 5)


def test_where_no_thread_is_to_be_had_nobody_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ran = made(), threading.Event()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert not threads.submit(ran.set)
    assert threads.submit(ran.set), "and now there is one"
    await_true(ran.is_set, "it is done")
    assert threads.close(10)


def test_no_exit_waits_for_a_call_that_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], timeout=30, check=False)
    assert done.returncode == 0
