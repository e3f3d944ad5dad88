"""What breaks, hangs or stays away beside vLLM costs vLLM nothing, and its log a line."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.client import LoadedBlock
from kvtier.connectors.kit.guard import note_fault
from kvtier.connectors.vllm.jobs import LoadJob, StepJobs
from kvtier.connectors.vllm.reset import CacheReset
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.connectors.vllm.stats import ATTACHED
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.core.identity import NO_TENANT
from kvtier.core.residency import TierName
from kvtier.observe.log import Log, RateLimitedLog
from tests.vllm.recording_client import RecordedDaemon, RecordingClient

SPACE = bytes(16)

ADAPTER = """
import json, sys
from kvtier.connectors.kit.adapters import Adapter, AdapterFingerprints
from kvtier.connectors.kit.weights import FileDigests

adapters = AdapterFingerprints(FileDigests(), 1 << 62)
adapter = Adapter(1, "a", sys.argv[1], {})
for number in range(300):
    adapters.ask(str(number), adapter)
adapters.close()
print(json.dumps([adapters.is_pending("0"), adapters.is_pending("299")]))
"""


class ClearingClient(RecordingClient):
    """Counts how often it was to forget."""

    num_cleared = 0

    def clear(self, timeout_s: float) -> str:
        assert timeout_s >= 0
        self._reach()
        self.num_cleared += 1
        return ""


def half(client: Any) -> SchedulerHalf:
    return SchedulerHalf([Rank(client, SPACE)], 8, 2)


def at_once(call: Callable[..., object], *of: object) -> None:
    call(*of)


# What vLLM shows of a session


def test_it_is_told_whether_there_is_a_session_whenever_vllm_asks() -> None:
    daemon = RecordedDaemon(is_away=True)
    made = half(RecordingClient(daemon))
    told: list[object] = []
    for is_away in (True, True, False, False, True):
        daemon.is_away = is_away
        told.append(made.take_counts().get(ATTACHED.name))
    assert told == [{"": [0]}, None, {"": [1]}, None, {"": [0]}], "without any result of a worker"
    made.close()


def test_an_idle_vllm_goes_on_until_it_has_told_of_a_session_and_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("kvtier.connectors.vllm.scheduler.time", clock)
    daemon = RecordedDaemon(is_away=True)
    made, other = half(RecordingClient(daemon)), half(RecordingClient(daemon))
    made.take_counts()
    assert made.is_joining
    daemon.is_away = False
    assert made.is_joining, "its metrics say 0 still"
    made.take_counts()
    assert not made.is_joining
    assert other.is_joining
    now_s[0] += 10
    assert not other.is_joining
    made.close()
    other.close()


# Resets


def test_a_reset_that_breaks_is_promised_all_the_same() -> None:
    client = ClearingClient(RecordedDaemon())
    made: Any = half(client)

    def release() -> None:
        raise RuntimeError("a bug")

    made._tracked["a"] = tracked = SimpleNamespace(is_stale=False)
    made._lookups._open["a"] = SimpleNamespace(release=release)
    with pytest.raises(RuntimeError, match="a bug"):
        made.reset()
    assert made._cache_reset.is_due, "nothing is found or offered"
    assert tracked.is_stale
    assert not client.num_cleared
    made._cache_reset.step(at_once, is_quiet=True)
    assert client.num_cleared == 1
    assert not made._cache_reset.is_due
    made._tracked.clear()
    made.close()


def test_a_promise_that_is_long_due_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    daemon = RecordedDaemon(is_away=True)
    client: Any = ClearingClient(daemon)
    cache_reset = CacheReset([client])
    with caplog.at_level(logging.INFO, "kvtier.vllm"):
        for _ in range(2):
            daemon.is_away = True
            cache_reset.schedule()
            cache_reset.begin(is_quiet=True)
            for _ in range(50):
                cache_reset._next_s = 0.0
                cache_reset.step(at_once, is_quiet=True)
            daemon.is_away = False
            cache_reset._next_s = 0.0
            cache_reset.step(at_once, is_quiet=True)
            assert not cache_reset.is_due
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2


# Threads


def test_faults_of_threads_are_folded(caplog: pytest.LogCaptureFixture) -> None:
    note = partial(note_fault, RateLimitedLog(Log("kvtier.test")))
    with caplog.at_level(logging.ERROR, "kvtier.test"), ThreadPoolExecutor(1) as threads:
        for _ in range(100):
            threads.submit(divmod, 1, 0).add_done_callback(note)
        threads.submit(divmod, 1, 1).add_done_callback(note)
    cancelled: Future[None] = Future()
    cancelled.cancel()
    note(cancelled)
    assert [record.message for record in caplog.records] == ["a thread of the connector failed"]
    assert "ZeroDivisionError" in caplog.text, "with its trace"


class HangingCopies:
    """A device whose copies do not end."""

    num_readers = 1
    arena = None

    def __init__(self) -> None:
        self.has_begun, self.gate = threading.Event(), threading.Event()
        self.is_closed = False

    def fence(self) -> Any:
        return SimpleNamespace(is_over=lambda: True, wait=lambda: None)

    def is_staged(self, slot: memoryview) -> bool:
        return False

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        self.has_begun.set()
        self.gate.wait(30)

    def close(self) -> None:
        self.is_closed = True


class LoadingClient(RecordingClient):
    def load(self, *_: Any, **__: Any) -> Iterator[LoadedBlock | str]:
        yield LoadedBlock(0, TierName.CPU, memoryview(b"block"))
        yield "complete"


def test_no_end_of_vllm_waits_for_a_device_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm.worker._CLOSE_S", 0.01)
    copies: Any = HangingCopies()
    client: Any = LoadingClient(RecordedDaemon())
    worker = WorkerHalf(client, copies)
    worker.load(StepJobs(loads=[LoadJob("a", NO_TENANT, ((SPACE,),), 0, ((7,),), (1,), 1e12)]))
    assert copies.has_begun.wait(10)
    with caplog.at_level(logging.WARNING, "kvtier.vllm"):
        worker.close()
    assert client.is_closed
    assert not copies.is_closed, "its buffers are in use"
    assert "a copy does not end; its buffers are not freed" in caplog.text
    copies.gate.set()
    assert worker._readers.close(10)


def test_no_end_of_vllm_waits_for_a_file_system_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    pipe = tmp_path / "adapter_model.safetensors"
    os.mkfifo(pipe)  # whoever opens it waits for a writer
    words = [sys.executable, "-c", ADAPTER, str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, timeout=60, check=True)
    assert json.loads(done.stdout) == [True, False], "asked, and too many before it"
