"""Single flight, order, preemption, refusals, faults of a step."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from kvtier.core.residency import TierName
from kvtier.engine.engine import create_pool
from kvtier.engine.model import LoadedModel
from kvtier.engine.request import (
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    RequestRefused,
    Sampling,
)
from kvtier.engine.settings import EngineSettings
from kvtier.errors import StartError
from kvtier.testing.memory_port import MemoryPort
from tests.engine.drive import Drive, prompt
from tests.engine.models import Reference

SECOND = 1_000_000_000


def test_single_flight_while_computing(tiny: LoadedModel, reference: Reference) -> None:
    drive = Drive(tiny, max_batch_tokens=64)
    answers = [drive.submit(prompt(300), 8) for _ in range(4)]
    drive.run()
    assert [answer.usage.computed_tokens for answer in answers] == [300, 12, 12, 12]
    assert [answer.usage.tier_tokens[TierName.GPU] for answer in answers] == [0, 288, 288, 288]
    assert all(answer.tokens == reference.generate(prompt(300), 8) for answer in answers)


def test_single_flight_while_loading(tiny: LoadedModel, reference: Reference) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    drive.ask(prompt(300), 1)
    drive.engine.drop_cache()
    port.is_manual = True
    port.num_lookups = 0
    first, second = drive.submit(prompt(300), 8), drive.submit(prompt(300), 8)
    drive.settle()
    assert list(port.open_lookups) == ["request-2"]
    port.finish_lookup("request-2")
    drive.settle()
    assert list(port.open_loads) == ["request-2"]
    port.finish_load("request-2")
    port.is_manual = False
    drive.run()
    assert port.num_lookups == 1
    assert first.usage.tier_tokens[TierName.CPU] == 256
    assert second.usage.tier_tokens[TierName.GPU] == 288
    assert first.tokens == second.tokens == reference.generate(prompt(300), 8)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_who_waited_goes_on_when_the_first_is_aborted(
    tiny: LoadedModel, reference: Reference, num_steps: int
) -> None:
    drive = Drive(tiny, MemoryPort(), max_batch_tokens=64)
    drive.submit(prompt(300), 8)
    second = drive.submit(prompt(300), 8)
    for _ in range(num_steps):
        drive.step()
    drive.engine.abort("request-1")
    drive.run()
    assert second.tokens == reference.generate(prompt(300), 8)


def test_longest_cached_prefix_goes_first_until_age_counts(tiny: LoadedModel) -> None:
    drive = Drive(tiny, max_num_sequences=1, age_cap_ns=5 * SECOND)
    drive.ask(prompt(100, seed=1), 1)
    order: list[str] = []

    def submit(name: str, seed: int) -> None:
        request = EngineRequest(name, prompt(100, seed=seed), 1)
        drive.engine.submit(request, lambda _: order.append(name), drive.now_ns)

    submit("cold", 2)
    submit("cached", 1)
    drive.run()
    submit("cold, early", 3)
    drive.now_ns += 6 * SECOND
    submit("cached, late", 1)
    drive.run()
    assert order == ["cached", "cold", "cold, early", "cached, late"]


def test_a_long_prompt_is_not_overtaken_for_ever(tiny: LoadedModel) -> None:
    drive = Drive(tiny, pool_tokens=640)
    order: list[str] = []

    def submit(name: str, tokens: tuple[int, ...], max_tokens: int) -> None:
        request = EngineRequest(name, tokens, max_tokens, Sampling(ignore_eos=True))
        drive.engine.submit(request, lambda output: order.append(output.request_id), 0)

    submit("holder", prompt(200), 100)
    drive.step()
    submit("long", prompt(600, seed=1), 1)
    for seed in range(2, 6):
        submit(f"short-{seed}", prompt(60, seed=seed), 1)
    drive.run()
    assert order == ["holder"] * 100 + ["long", "short-2", "short-3", "short-4", "short-5"]


def test_the_latest_arrival_is_preempted(tiny: LoadedModel) -> None:
    drive = Drive(tiny, pool_tokens=160)
    sampling = Sampling(ignore_eos=True)
    first = drive.submit(prompt(64), 60, sampling=sampling)
    second = drive.submit(prompt(60, seed=1), 60, sampling=sampling)
    while not first.is_done:
        drive.step()
    assert drive.engine.snapshot().num_preemptions >= 1
    assert not second.is_done
    drive.run()
    assert len(second.tokens) == 60


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "problem"),
    [
        ((), 1, "empty"),
        (prompt(2000), 1, "limit is 1024"),
        (prompt(300), 300, "the pool holds 512"),
        ((5, 256), 1, "token ids must be from 0 to 255"),
        ((5, -1), 1, "token ids must be from 0 to 255"),
        ((5,), 0, "max_tokens must be at least 1, not 0"),
    ],
)
def test_what_can_never_be_served_is_refused(
    tiny: LoadedModel, tokens: tuple[int, ...], max_tokens: int, problem: str
) -> None:
    drive = Drive(tiny, pool_tokens=512)
    with pytest.raises(RequestRefused, match=problem):
        drive.submit(tokens, max_tokens)
    assert drive.engine.is_idle


def test_a_full_queue_and_a_name_in_use_are_refused(tiny: LoadedModel) -> None:
    drive = Drive(tiny, max_num_waiting=1)
    request = EngineRequest("only", prompt(10), 1)
    drive.submit_request(request)
    with pytest.raises(RequestRefused, match="in use"):
        drive.submit_request(request)
    with pytest.raises(QueueFull):
        drive.submit(prompt(10))
    drive.run()
    assert drive.submit_request(request)


def test_abort_frees_the_blocks_at_once(tiny: LoadedModel) -> None:
    drive = Drive(tiny)
    answer = drive.submit(prompt(100), 50, max_offload_tokens=0)
    drive.step()
    drive.step()
    assert drive.engine.snapshot().pool_blocks.used == 7
    assert drive.engine.abort("request-1")
    assert not drive.engine.abort("request-1")
    assert drive.engine.snapshot().pool_blocks.used == 0
    assert answer.finish is FinishReason.ABORT
    assert drive.engine.is_idle


def test_a_step_that_fails_ends_its_batch_and_nothing_else(
    tiny: LoadedModel, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking:
        device = tiny.model.device
        dtype = tiny.model.dtype
        is_broken = True

        def named_parameters(self, **_: Any) -> list[Any]:
            return []

        def named_buffers(self) -> list[Any]:
            return []

        def __call__(self, **inputs: Any) -> Any:
            if self.is_broken:
                raise RuntimeError("no memory left")
            return tiny.model(**inputs)

    breaking = Breaking()
    drive = Drive(replace(tiny, model=breaking))
    answers = [drive.submit(prompt(20, seed=seed)) for seed in range(3)]
    with caplog.at_level(logging.CRITICAL, logger="kvtier"):
        drive.run()
    assert [answer.finish for answer in answers] == [FinishReason.ERROR] * 3
    assert "no memory left" in answers[0].outputs[-1].error
    breaking.is_broken = False
    assert drive.ask(prompt(20)).tokens == reference.generate(prompt(20), 8)


def test_a_receiver_that_fails_ends_its_own_request_only(
    tiny: LoadedModel, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Output) -> None:
        raise ConnectionError("gone")

    drive = Drive(tiny)
    drive.engine.submit(EngineRequest("gone", prompt(20), 8), fail, 0)
    other = drive.submit(prompt(20, seed=1))
    with caplog.at_level(logging.CRITICAL, logger="kvtier"):
        drive.run()
    assert other.tokens == reference.generate(prompt(20, seed=1), 8)


def test_snapshot_and_reports_add_up(tiny: LoadedModel) -> None:
    drive = Drive(tiny)
    first, second = drive.ask(prompt(100), 5), drive.ask(prompt(100), 5)
    snapshot = drive.engine.snapshot()
    reports = drive.engine.take_reports()
    assert (
        sum(snapshot.prompt_tokens_by_tier.values()) == second.usage.tier_tokens[TierName.GPU] == 96
    )
    assert snapshot.computed_prompt_tokens == first.usage.computed_tokens + 4
    assert sum(report.num_prefill_tokens for report in reports) == 104
    assert sum(report.num_decode_tokens for report in reports) == snapshot.num_decode_tokens == 8
    assert snapshot.num_generated_tokens == 10
    assert snapshot.num_steps == len(reports) == 10
    assert drive.engine.take_reports() == []


def test_requests_may_come_while_another_thread_counts(tiny: LoadedModel) -> None:
    drive = Drive(tiny)
    drive.submit(prompt(20), 1)
    drive.submit(prompt(20, seed=1), 1)

    class Arriving:
        """A phase that is asked about: the moment in which the engine's thread gets its turn."""

        def __eq__(self, _phase: object) -> bool:
            drive.submit(prompt(20, seed=2), 1)
            return False

        __hash__ = object.__hash__

    arriving: Any = Arriving()
    assert drive.engine._scheduler.count(arriving) == 0
    assert drive.engine.snapshot().num_waiting == 4


def test_a_pool_that_no_memory_can_hold_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(StartError) as caught:
        create_pool(tiny, EngineSettings(pool_bytes=1 << 60))
    assert caught.value.field == "engine.pool"
    assert "\n" not in str(caught.value)


def test_drop_says_what_it_removed(tiny: LoadedModel) -> None:
    drive = Drive(tiny)
    drive.ask(prompt(100), 1)
    running = drive.submit(prompt(40, seed=1), 30)
    drive.step()
    drive.step()
    dropped = drive.engine.drop_cache()
    drive.engine.check()
    assert dropped.num_blocks == 6
    assert dropped.num_bytes == 6 * drive.engine.pool.shape.block_bytes
    assert dropped.num_kept == 2
    drive.run()
    assert running.is_done
    assert drive.ask(prompt(100), 1).usage.tier_tokens[TierName.GPU] == 0
