"""The engine on its own thread: requests from other threads, orders, faults, the end."""

import logging
import queue
import threading
from collections.abc import Iterator

import pytest

from kvtier.engine.engine import Engine
from kvtier.engine.model import LoadedModel
from kvtier.engine.request import (
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    RequestRefused,
    Sampling,
)
from kvtier.engine.runner import EngineRunner
from kvtier.engine.settings import EngineSettings
from kvtier.testing.memory_port import MemoryPort
from tests.engine.drive import Drive, prompt
from tests.engine.models import Reference

DEADLINE_S = 30.0


@pytest.fixture
def runner(tiny: LoadedModel) -> Iterator[EngineRunner]:
    running = EngineRunner(Drive(tiny, MemoryPort()).engine)
    running.start()
    yield running
    assert running.stop(DEADLINE_S)


def _collect(outputs: "queue.Queue[Output]") -> list[Output]:
    collected = [outputs.get(timeout=DEADLINE_S)]
    while collected[-1].finish is None:
        collected.append(outputs.get(timeout=DEADLINE_S))
    return collected


def _ask(runner: EngineRunner, request: EngineRequest) -> list[Output]:
    outputs: queue.Queue[Output] = queue.Queue()
    runner.submit(request, outputs.put)
    return _collect(outputs)


def test_requests_from_many_threads(runner: EngineRunner, reference: Reference) -> None:
    answers: dict[int, list[int]] = {}

    def client(seed: int) -> None:
        outputs = _ask(runner, EngineRequest(f"client-{seed}", prompt(70, seed=seed), 10))
        answers[seed] = [token for output in outputs for token in output.token_ids]

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    expected = {seed: reference.generate(prompt(70, seed=seed), 10) for seed in range(8)}
    assert answers == expected
    assert runner.is_ready
    assert not runner.is_stuck


def test_an_event_of_the_port_wakes_the_engine(tiny: LoadedModel, reference: Reference) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    drive.ask(prompt(100), 1)
    drive.engine.drop_cache()
    port.is_manual = True
    runner = EngineRunner(drive.engine)
    runner.start()
    outputs: queue.Queue[Output] = queue.Queue()
    runner.submit(EngineRequest("slow", prompt(100), 8), outputs.put)
    while not runner.call(lambda _: bool(port.open_lookups)):
        pass
    runner.call(lambda _: port.finish_lookup("slow"))
    while not runner.call(lambda _: bool(port.open_loads)):
        pass
    runner.call(lambda _: port.finish_load("slow"))
    collected = _collect(outputs)
    tokens = [token for output in collected for token in output.token_ids]
    assert tokens == reference.generate(prompt(100), 8)
    runner.call(lambda _: port.finish_all())
    assert runner.stop(DEADLINE_S)
    assert port.is_closed


def test_abort(runner: EngineRunner) -> None:
    outputs: queue.Queue[Output] = queue.Queue()
    request = EngineRequest("long", prompt(20), 900, Sampling(ignore_eos=True))
    runner.submit(request, outputs.put)
    assert outputs.get(timeout=DEADLINE_S).finish is None
    runner.abort("long")
    runner.abort("unknown")
    assert _collect(outputs)[-1].finish is FinishReason.ABORT
    assert runner.call(lambda engine: engine.snapshot().num_running) == 0


def test_refusals_come_back_to_the_caller(runner: EngineRunner) -> None:
    with pytest.raises(RequestRefused, match="empty"):
        runner.submit(EngineRequest("empty", (), 1), lambda _: None)


def test_call_returns_results_faults_and_deadlines(runner: EngineRunner) -> None:
    assert runner.call(lambda engine: engine.drop_cache().num_blocks) == 0

    def fail(_: Engine) -> None:
        raise LookupError("the caller's own")

    with pytest.raises(LookupError, match="the caller's own"):
        runner.call(fail)
    release = threading.Event()
    with pytest.raises(TimeoutError):
        runner.call(lambda _: release.wait(DEADLINE_S), deadline_s=0.01)
    release.set()
    assert runner.call(lambda engine: engine.is_idle)


def test_a_drain_takes_no_more_and_waits_for_the_rest(runner: EngineRunner) -> None:
    assert runner.await_idle(0)
    outputs: queue.Queue[Output] = queue.Queue()
    runner.submit(EngineRequest("long", prompt(20), 900, Sampling(ignore_eos=True)), outputs.put)
    runner.drain()
    assert not runner.is_ready
    with pytest.raises(QueueFull):
        runner.submit(EngineRequest("late", prompt(20), 1), outputs.put)
    assert not runner.await_idle(0)
    runner.abort("long")
    assert _collect(outputs)[-1].finish is FinishReason.ABORT
    assert runner.await_idle(DEADLINE_S)


def test_a_stop_ends_requests_of_an_engine_that_hangs(runner: EngineRunner) -> None:
    has_begun, release = threading.Event(), threading.Event()
    outputs: queue.Queue[Output] = queue.Queue()
    runner.submit(EngineRequest("long", prompt(20), 900, Sampling(ignore_eos=True)), outputs.put)
    assert outputs.get(timeout=DEADLINE_S).finish is None

    def hang(_: Engine) -> None:
        has_begun.set()
        release.wait(DEADLINE_S)

    calling = threading.Thread(target=runner.call, args=(hang, DEADLINE_S))
    calling.start()
    assert has_begun.wait(DEADLINE_S)
    try:
        assert not runner.stop(0)
        assert _collect(outputs)[-1].finish is FinishReason.ERROR
    finally:
        release.set()
        calling.join(DEADLINE_S)
    assert runner.stop(DEADLINE_S)
    assert outputs.empty(), "no request gets two last outputs"


def test_stop_ends_every_request(tiny: LoadedModel) -> None:
    runner = EngineRunner(Drive(tiny, MemoryPort()).engine)
    runner.start()
    outputs: queue.Queue[Output] = queue.Queue()
    request = EngineRequest("long", prompt(20), 900, Sampling(ignore_eos=True))
    runner.submit(request, outputs.put)
    outputs.get(timeout=DEADLINE_S)
    assert runner.stop(DEADLINE_S)
    assert _collect(outputs)[-1].finish is FinishReason.ERROR
    assert not runner.is_ready
    with pytest.raises(QueueFull, match="stopping"):
        runner.submit(EngineRequest("late", prompt(20), 1), outputs.put)
    with pytest.raises(TimeoutError):
        runner.call(lambda _: None, deadline_s=0.01)


def test_a_fault_between_steps_ends_the_requests_and_the_engine_goes_on(
    tiny: LoadedModel, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    class FaultyPort(MemoryPort):
        is_broken = True

        def poll(self) -> list[object]:  # type: ignore[override]  # it returns nothing
            if self.is_broken and self.num_lookups:
                type(self).is_broken = False
                raise ZeroDivisionError("a bug")
            return super().poll()  # type: ignore[return-value]  # the same list

    runner = EngineRunner(Drive(tiny, FaultyPort()).engine)
    runner.start()
    with caplog.at_level(logging.CRITICAL, logger="kvtier"):
        outputs = _ask(runner, EngineRequest("first", prompt(100), 8))
    assert outputs[-1].finish is FinishReason.ERROR
    assert "a bug" in outputs[-1].error
    outputs = _ask(runner, EngineRequest("second", prompt(100), 8))
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == reference.generate(prompt(100), 8)
    assert runner.stop(DEADLINE_S)


def test_stuck_means_work_and_no_progress(tiny: LoadedModel) -> None:
    now_ns = 0
    port = MemoryPort(is_manual=True)
    runner = EngineRunner(Drive(tiny, port).engine, clock_ns=lambda: now_ns)
    runner.start()
    outputs: queue.Queue[Output] = queue.Queue()
    runner.submit(EngineRequest("waits", prompt(100), 8), outputs.put)
    while not runner.call(lambda _: bool(port.open_lookups)):
        pass
    assert not runner.is_stuck
    now_ns = 61_000_000_000
    assert runner.is_stuck
    runner.call(lambda _: port.finish_all())
    while not runner.call(lambda _: bool(port.open_stores)):
        pass
    runner.call(lambda _: port.finish_all())
    assert _collect(outputs)[-1].finish is not None
    assert not runner.is_stuck
    assert runner.stop(DEADLINE_S)


def test_settings_bound_the_queue(tiny: LoadedModel) -> None:
    engine = Engine(tiny, EngineSettings(pool_tokens=512, max_num_waiting=2), MemoryPort())
    engine.port.pool = engine.pool  # type: ignore[attr-defined]  # a MemoryPort's
    runner = EngineRunner(engine)
    runner.start()
    release = threading.Event()
    began = threading.Event()

    def hold(_: Engine) -> None:
        began.set()
        release.wait(DEADLINE_S)

    holder = threading.Thread(target=lambda: runner.call(hold, DEADLINE_S))
    holder.start()
    began.wait(DEADLINE_S)
    outputs: queue.Queue[Output] = queue.Queue()
    for index in range(2):
        runner.submit(EngineRequest(f"fits-{index}", prompt(20), 1), outputs.put)
    with pytest.raises(QueueFull):
        runner.submit(EngineRequest("too many", prompt(20), 1), outputs.put)
    release.set()
    holder.join(DEADLINE_S)
    assert {outputs.get(timeout=DEADLINE_S).finish for _ in range(2)} == {FinishReason.LENGTH}
    assert runner.stop(DEADLINE_S)
