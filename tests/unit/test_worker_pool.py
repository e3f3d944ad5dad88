"""Threads for blocking calls, and the health that a tier executor reports."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.core.limits import EXISTENCE_CHECKS_MAX
from kvtier.errors import TierError, TierTimeout
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.runtime.worker_pool import WorkerPool, run_in_thread
from kvtier.testing.child import await_true
from kvtier.testing.faulty_tier import Fault, FaultyTier, scripted_faults
from kvtier.tiers.base import Health, HealthState
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.memory import MemoryTier
from kvtier.tiers.wrapper import Operation

LATER_NS = 10**12
"""In a time in which every call that can be late is."""


def nothing() -> None:
    """Do nothing."""


def test_a_call_hangs_when_it_takes_longer_than_its_limit() -> None:
    workers = WorkerPool("test", 2, 4)
    release = threading.Event()
    began = threading.Event()

    def wait() -> None:
        began.set()
        assert release.wait(30)

    assert workers.submit(wait, "read", 10**9)
    assert began.wait(30)
    now_ns = time.monotonic_ns()
    assert workers.late(now_ns) == []
    (late,) = workers.late(now_ns + LATER_NS)
    assert late.name == "read"
    assert late.seconds >= LATER_NS / 1e9
    release.set()
    await_true(lambda: not workers.late(now_ns + LATER_NS), "the call came back")
    workers.stop()


def test_hung_calls_cost_no_more_threads_than_there_are() -> None:
    workers = WorkerPool("bounded", 2, 3)
    release = threading.Event()
    taken = [workers.submit(lambda: release.wait(30) and None, "write", 1) for _ in range(2)]
    await_true(lambda: len(workers.late(time.monotonic_ns() + LATER_NS)) == 2, "both hang")
    taken += [workers.submit(nothing, "write", 1) for _ in range(4)]
    assert taken == [True] * 5 + [False], "the queue is bounded too"
    threads = [t for t in threading.enumerate() if t.name == "bounded"]
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads), "no exit waits for them"
    release.set()
    workers.stop()
    assert not workers.submit(nothing, "write", 1)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_threads_are_used_again() -> None:
    workers = WorkerPool("again", 4, 8)
    for _ in range(50):
        done = threading.Event()
        workers.submit(done.set, "read", 1)
        assert done.wait(30)
    assert len([t for t in threading.enumerate() if t.name == "again"]) <= 4
    workers.stop()


@pytest.mark.slow
def test_a_call_counts_from_when_it_is_taken_until_it_has_ended() -> None:
    workers = WorkerPool("counted", 1, 4)
    for _ in range(50):
        began, release = threading.Event(), threading.Event()

        def wait(began: threading.Event = began, release: threading.Event = release) -> None:
            began.set()
            assert release.wait(30)

        assert workers.submit(wait, "read", 1)
        while not began.is_set():
            assert workers.num_calls == 1, "also between the queue and its thread"
        assert workers.submit(nothing, "read", 1)
        assert workers.num_calls == 2
        release.set()
        await_true(lambda: workers.num_calls == 0, "both have ended")
    workers.stop()


def test_an_answer_that_nobody_waits_for_any_more() -> None:
    release = threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_in_thread(partial(release.wait, 30), "test"), 0.01)
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 / 0, "test")
        assert await run_in_thread(lambda: 7, "test") == 7

    asyncio.run(give_up())
    release.set()


class Deaf(MemoryTier):
    """A medium that answers, whatever the deadline, once ``answer`` is set."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.answer = threading.Event()

    def health_check(self, deadline_ns: int) -> None:
        assert self.answer.wait(30)


async def until(look: Callable[[], Any], what: str) -> None:
    """Let the loop go on until ``look`` finds something."""
    deadline_s = time.monotonic() + 30
    while not look():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0)


def crew_of(tier: BreakerTier) -> tuple[TierExecutor, Metrics]:
    metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
    return TierExecutor(tier, metrics), metrics


@pytest.mark.slow
def test_a_medium_that_does_not_answer_is_out_until_it_does() -> None:
    async def scenario() -> None:
        medium = Deaf()
        tier = BreakerTier(medium)
        executor, _ = crew_of(tier)
        changes: list[tuple[HealthState, HealthState]] = []

        def note(before: HealthState, now: HealthState) -> None:
            changes.append((before, now))

        with pytest.raises(TierTimeout, match="no answer to a scrub"):
            await executor.run_in_background(
                "scrub", lambda t, _: t.health_check(time.monotonic_ns() + LATER_NS), 1
            )
        await until(executor.late_calls, "the call is late")
        health = executor.health()
        assert health.state is HealthState.OUT
        assert health.reason.startswith("no answer to a scrub for ")
        executor.check(note)
        executor.check(note)
        assert changes == [(HealthState.UP, HealthState.OUT)]
        medium.answer.set()
        await until(lambda: not executor.late_calls(), "the call came back")
        executor.check(note)
        assert changes[-1] == (HealthState.OUT, HealthState.UP)
        assert executor.health() == Health()
        executor.stop()

    asyncio.run(scenario())


def test_a_probe_finds_a_medium_that_nobody_uses_and_finds_it_again() -> None:
    async def scenario() -> None:
        probe = (Operation.HEALTH_CHECK, Fault.FAIL_BEFORE)
        medium = FaultyTier(MemoryTier(1 << 20), scripted_faults(probe, probe))
        clock = [0]
        tier = BreakerTier(medium, faults_max=1, cool_down_ns=100, clock_ns=lambda: clock[0])
        executor, _ = crew_of(tier)
        states: list[HealthState] = []

        async def probed() -> None:
            before = len(medium.log)
            executor.check(lambda _before, now: states.append(now))
            await until(lambda: len(medium.log) > before, "the medium was touched")
            await until(lambda: not executor.is_checking, "the check is over")
            executor.check(lambda _before, now: states.append(now))

        for now_ns in (10**10, 2 * 10**10, 3 * 10**10):
            clock[0] = now_ns
            await probed()
        assert states == [HealthState.OUT, HealthState.UP]
        executor.stop()

    asyncio.run(scenario())


class Broken(MemoryTier):
    """A tier with a bug."""

    def health_check(self, deadline_ns: int) -> None:
        raise RuntimeError("a bug")


def test_a_bug_in_a_probe_is_counted_and_the_next_probe_comes() -> None:
    async def scenario() -> None:
        clock = [0]
        tier = BreakerTier(Broken(1 << 20), faults_max=1, clock_ns=lambda: clock[0])
        executor, metrics = crew_of(tier)

        def num_faults() -> float:
            name = "kvtier_background_faults_total"
            return metrics.registry.get_sample_value(name, {"task": "health"}) or 0.0

        clock[0] = 10**10
        executor.check(lambda _before, _now: None)
        await until(num_faults, "the bug was counted")
        assert executor.health().state is HealthState.OUT
        assert "a bug" in executor.health().reason
        executor.stop()

    asyncio.run(scenario())


def test_more_than_may_wait_is_refused() -> None:
    async def scenario() -> None:
        tier = BreakerTier(MemoryTier(1 << 20))
        executor, _ = crew_of(tier)
        release = threading.Event()
        most = 2 * (tier.properties.num_workers + EXISTENCE_CHECKS_MAX)
        taken = [
            executor.submit(lambda: release.wait(30) and None, "contains", 0)
            for _ in range(2 * most)
        ]
        assert False in taken
        assert sum(taken) < most
        release.set()
        executor.stop()

    asyncio.run(scenario())


def test_an_error_of_the_call_is_the_callers() -> None:
    async def scenario() -> None:
        executor, _ = crew_of(BreakerTier(MemoryTier(1 << 20)))

        def fail(_tier: BreakerTier, _deadline_ns: int) -> None:
            raise TierError("no disk")

        with pytest.raises(TierError, match="no disk"):
            await executor.run_in_background("scrub", fail, 10**9)
        executor.stop()

    asyncio.run(scenario())


def test_a_call_that_breaks_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    workers = WorkerPool("unbroken", 1, 4)

    def fail() -> None:
        raise RuntimeError("a bug")

    for _ in range(3):
        assert workers.submit(fail, "read", 1)
    done = threading.Event()
    assert workers.submit(done.set, "read", 1)
    assert done.wait(30)
    assert (
        len([r for r in caplog.records if r.getMessage() == "unexpected error in a worker thread"])
        == 3
    )
    await_true(lambda: workers.num_calls == 0, "all have ended")
    workers.stop()


def test_where_no_thread_is_to_be_had_nobody_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = WorkerPool("few", 2, 4)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert not workers.submit(nothing, "read", 1), "nobody would come for it"
    assert workers.num_calls == 0
    began, release, done = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert release.wait(30)

    assert workers.submit(wait, "read", 1)
    assert began.wait(30)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert workers.submit(done.set, "read", 1), "the one there is does it"
    release.set()
    assert done.wait(30)
    workers.stop()


def test_a_call_does_not_wait_for_one_that_was_just_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has its call, and has not begun it yet, must not count as free."""
    taken, gate, done = threading.Event(), threading.Event(), threading.Event()

    class Slow(queue.Queue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            call = super().get(block, timeout)
            if not taken.is_set():
                taken.set()
                assert gate.wait(30)
            return call

    monkeypatch.setattr(queue, "Queue", Slow)
    workers = WorkerPool("taken", 2, 4)
    assert workers.submit(nothing, "read", 1)
    assert taken.wait(30)
    assert workers.submit(done.set, "read", 1)
    try:
        assert done.wait(30), "the other thread does it"
    finally:
        gate.set()
        workers.stop()
