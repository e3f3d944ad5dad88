"""The grace of a stop, and what ends it early or late."""

import asyncio
import os
import signal
import threading
import time

import pytest

from kvtier.daemon.closing import ClosingStack
from kvtier.daemon.stop import Stop, handle_signals
from kvtier.errors import TierError
from kvtier.testing.child import await_true


class Ended:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.happened.set()


def test_told_once_it_wakes_the_loop_and_told_twice_it_ends() -> None:
    ended, killed = Ended(), threading.Event()
    stop = Stop(60, ended)
    stop.abandon = killed.set

    async def scenario() -> None:
        stopping = stop.attach()
        asking = threading.Thread(target=stop.request, args=(signal.SIGTERM,))
        asking.start()
        await asyncio.wait_for(stopping.wait(), 30)
        asking.join(30)
        assert not ended.happened.is_set()
        assert 50 < stop.left_s < 60, "some of the grace is kept for the end"

    asyncio.run(scenario())
    stop.request(signal.SIGINT)
    assert ended.code == 0
    assert killed.is_set(), "a child is not left behind"


def test_a_repeated_hangup_does_not_end_it_but_another_signal_does() -> None:
    ended = Ended()
    stop = Stop(60, ended)
    stop.request_once(signal.SIGHUP)
    stop.request_once(signal.SIGHUP)
    assert stop.begun.is_set()
    assert not ended.happened.is_set()
    stop.cut(signal.SIGQUIT)
    assert ended.code == 0


def test_told_before_there_is_a_loop() -> None:
    stop = Stop(60, Ended())
    stop.request(signal.SIGTERM)

    async def scenario() -> None:
        assert stop.attach().is_set()

    asyncio.run(scenario())


def test_nothing_outlives_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    ended = Ended()
    stop = Stop(0.05, ended)
    stop.stage = "closing the ssd tier"
    stop.hanging = lambda: "ssd: write for 12 s"
    start_s = time.monotonic()
    assert stop.begin()
    assert not stop.begin()
    assert ended.happened.wait(30)
    assert ended.code == 0
    assert time.monotonic() - start_s >= 0.05
    # Other tests' stops, of which none ends this process, may still log their last line.
    hanging = [
        record.kvtier_fields["hanging"]  # type: ignore[attr-defined]  # how the log passes them on
        for record in caplog.records
        if "exited before" in record.getMessage()
    ]
    assert hanging.count("closing the ssd tier; ssd: write for 12 s") == 1


def test_last_words_that_nobody_reads_hold_nothing_up() -> None:
    ended = Ended()
    stop = Stop(60, ended)
    never = threading.Event()
    stop.hanging = lambda: str(never.wait(30))
    stop.request(signal.SIGTERM)
    start_s = time.monotonic()
    stop.request(signal.SIGTERM)
    assert ended.happened.is_set()
    assert time.monotonic() - start_s < 10
    never.set()


def test_a_step_that_fails_or_hangs_keeps_no_other_from_its_turn() -> None:
    stop, taken = Stop(60, Ended()), list[str]()

    async def hang() -> None:
        taken.append("hang")
        await asyncio.Event().wait()

    def fail() -> None:
        taken.append("fail")
        raise TierError("no disk")

    async def scenario() -> None:
        async with ClosingStack(stop) as closing:
            closing.add("the first", lambda: taken.append("first"))
            closing.add("one that fails", fail)
            closing.add("one that hangs", hang, most_s=0.01)

    asyncio.run(scenario())
    assert taken == ["hang", "fail", "first"]
    assert stop.stage == "the first"


def test_where_the_time_is_over_what_does_not_hang_is_let_go_all_the_same() -> None:
    ended = Ended()
    stop, taken = Stop(0.001, ended), list[str]()

    async def quick() -> None:
        await asyncio.sleep(0)
        taken.append("quick")

    async def scenario() -> None:
        async with ClosingStack(stop) as closing:
            for _ in range(3):
                closing.add("a quick one", quick)
            stop.begin()
            await_true(lambda: stop.left_s == 0, "the time is over")

    asyncio.run(scenario())
    assert taken == ["quick"] * 3
    assert ended.happened.wait(30)


def test_a_signal_whose_reaction_breaks_is_not_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[int] = []

    def react(number: signal.Signals) -> None:
        heard.append(number)
        if len(heard) == 1:
            raise RuntimeError("a bug")

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with handle_signals({signal.SIGUSR1: react}):
            for count in (1, 2):
                os.kill(os.getpid(), signal.SIGUSR1)
                await_true(lambda count=count: len(heard) == count, "it was heard")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [r.getMessage() for r in caplog.records].count("signal handler failed") == 1


def test_the_process_ends_though_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    ended = Ended()
    stop = Stop(60, ended)
    stop.request(signal.SIGTERM)
    assert stop.has_begun
    assert not ended.happened.is_set()
    stop.request(signal.SIGTERM)
    assert ended.code == 0
