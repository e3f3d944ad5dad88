"""Every number of the engine's table: what is counted, under which label, and that it adds up."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from kvtier.api.http.service import PromptOutcome
from kvtier.core.residency import TierName
from kvtier.engine.metrics import EngineMetrics
from kvtier.engine.model import LoadedModel
from kvtier.engine.request import Sampling, Usage
from kvtier.observe.daemon_metrics import READY, TransferRoute
from kvtier.observe.engine_metrics import (
    ATTACHED,
    COPY_SECONDS,
    DECODE_TOKENS,
    GENERATED_TOKENS,
    INTER_TOKEN_SECONDS,
    POOL_BLOCKS,
    POOL_BYTES,
    PREEMPTIONS,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    REQUESTS_LOADING,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    RESTORE_STALL_SECONDS,
    SKIPPED_BLOCKS,
    STEP_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)
from kvtier.observe.metrics import BUILD, REFUSED_SAMPLES, Metric
from kvtier.testing.memory_port import MemoryPort
from tests.engine.drive import Drive, prompt

SECOND = 1_000_000_000


class Told:
    """A meter, and what a scrape of it would show."""

    def __init__(self, drive: Drive) -> None:
        self.metrics = EngineMetrics(CollectorRegistry())
        self._engine = drive.engine

    def update(self, *, is_ready: bool = True, is_attached: bool = True) -> None:
        engine = self._engine
        self.metrics.update(
            engine.snapshot(), engine.take_reports(), is_ready=is_ready, is_attached=is_attached
        )

    def value(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        value = self.metrics.metrics.registry.get_sample_value(metric.name + suffix, labels)
        assert value is not None, f"{metric.name}{suffix} {labels}"
        return value

    def by(self, metric: Metric, suffix: str = "") -> dict[str, float]:
        """Return what is not 0, by the value of the only label."""
        ((label, values),) = metric.labels
        counts = {each: self.value(metric, suffix, **{label: each}) for each in values}
        return {each: count for each, count in counts.items() if count}


@pytest.fixture
def drive(tiny: LoadedModel) -> Drive:
    return Drive(tiny, MemoryPort())


def test_tokens_are_counted_once_and_by_who_supplied_them(drive: Drive) -> None:
    told = Told(drive)
    answers = [drive.ask(prompt(300), 4), drive.ask(prompt(300), 4)]
    drive.engine.drop_cache()
    answers.append(drive.ask(prompt(300), 4))
    told.update()
    told.update()  # of the same state: nothing is counted twice
    assert told.by(PROMPT_TOKENS) == {"gpu": 288, "cpu": 256, "computed": 300 + 12 + 44}
    assert sum(told.by(PROMPT_TOKENS).values()) == sum(a.usage.prompt_tokens for a in answers)
    assert told.value(PREFILL_TOKENS) == 300 + 12 + 44
    assert told.value(GENERATED_TOKENS) == 12
    assert told.value(DECODE_TOKENS) == 9, "the first token of an answer comes with its prompt"
    assert told.value(STEP_SECONDS, "_count") == drive.engine.snapshot().num_steps
    assert told.value(REFUSED_SAMPLES) == 0


def test_the_pool_is_told_in_blocks_and_bytes(drive: Drive) -> None:
    told = Told(drive)
    drive.submit(prompt(300), 8)
    while not drive.engine.snapshot().num_running:
        drive.step()
    told.update(is_attached=False)
    pool = drive.engine.pool
    counts = pool.counts()
    blocks = {"used": counts.used, "cached": counts.cached, "free": counts.free}
    assert counts.used > 0
    assert sum(blocks.values()) == pool.num_blocks
    size = pool.shape.block_bytes
    assert told.by(POOL_BLOCKS) == {state: n for state, n in blocks.items() if n}
    assert told.by(POOL_BYTES) == {state: n * size for state, n in blocks.items() if n}
    assert told.value(REQUESTS_RUNNING) == 1
    assert (told.value(READY), told.value(ATTACHED)) == (1, 0)
    drive.run()
    told.update(is_ready=False)
    assert told.value(REQUESTS_RUNNING) == told.value(POOL_BLOCKS, state="used") == 0
    assert (told.value(READY), told.value(ATTACHED)) == (0, 1)


def test_preemptions_are_counted_and_what_they_cost(tiny: LoadedModel) -> None:
    drive = Drive(tiny, pool_tokens=160)
    told = Told(drive)
    for seed in (1, 2):
        drive.submit(prompt(62, seed), 60, sampling=Sampling(ignore_eos=True))
    drive.run()
    told.update()
    assert told.value(PREEMPTIONS) == drive.engine.snapshot().num_preemptions > 0
    assert told.by(PROMPT_TOKENS) == {"computed": 124}
    assert told.value(PREFILL_TOKENS) > 124, "what was computed again is in there"


def test_blocks_that_are_not_offered_are_counted(tiny: LoadedModel) -> None:
    port = MemoryPort(is_manual=True)
    drive = Drive(tiny, port, pool_tokens=512)
    told = Told(drive)
    for num_tokens in (300, 150):
        drive.submit(prompt(num_tokens, seed=num_tokens), 1, max_load_tokens=0)
        drive.settle()
    told.update()
    assert told.value(SKIPPED_BLOCKS) == 2
    port.finish_all()
    drive.run()


def test_a_stall_is_time_in_which_all_that_could_go_on_waits_for_a_tier(tiny: LoadedModel) -> None:
    port = MemoryPort()
    drive = Drive(tiny, port)
    told = Told(drive)
    drive.ask(prompt(300), 1)
    drive.engine.drop_cache()
    port.is_manual = True

    def pass_time(seconds: int) -> dict[str, float]:
        drive.now_ns += seconds * SECOND
        drive.settle()
        told.update()
        return told.by(RESTORE_STALL_SECONDS)

    assert pass_time(5) == {}, "without a request nothing waits"
    drive.submit(prompt(300), 1)
    assert pass_time(0) == {}
    assert told.value(REQUESTS_LOADING) == 1
    assert pass_time(1) == {"lookup": 1}
    port.finish_lookup("request-2")
    assert pass_time(2) == {"lookup": 3}, "until the answer was looked at"
    assert pass_time(4) == {"lookup": 3, "load": 4}
    other = drive.submit(prompt(20, seed=2), 3)
    while not other.is_done:
        drive.step()
        drive.now_ns += SECOND
        told.update()
        assert told.by(RESTORE_STALL_SECONDS) == {"lookup": 3, "load": 4}, "another one computes"
    assert told.value(REQUESTS_WAITING) == 0
    pass_time(0)
    assert pass_time(8) == {"lookup": 3, "load": 12}
    port.finish_load("request-2")
    drive.run()
    told.update()
    assert told.by(RESTORE_STALL_SECONDS) == {"lookup": 3, "load": 12}
    assert pass_time(5) == {"lookup": 3, "load": 12}, "it is over"


TIERS = {
    "computed": Counter(),
    "gpu": Counter({TierName.GPU: 48}),
    "cpu": Counter({TierName.GPU: 16, TierName.CPU: 64}),
    "ssd": Counter({TierName.CPU: 64, TierName.SSD: 64}),
    "remote": Counter({TierName.GPU: 16, TierName.SSD: 64, TierName.REMOTE: 64}),
}
"""By the slowest of what supplied a prompt, some prompts."""


@pytest.mark.parametrize("source", TIERS)
def test_latencies_count_under_the_slowest_source_of_the_prompt(drive: Drive, source: str) -> None:
    told = Told(drive)
    tokens = TIERS[source]
    usage = Usage(200, 1, tokens, 200 - tokens.total(), "computed")
    told.metrics.first_token(0.3, usage)
    for seconds in (0.02, 0.04):
        told.metrics.token_gap(seconds, usage)
    assert told.by(TIME_TO_FIRST_TOKEN_SECONDS, "_sum") == {source: 0.3}
    assert told.by(INTER_TOKEN_SECONDS, "_count") == {source: 2}
    assert told.by(INTER_TOKEN_SECONDS, "_sum") == {source: pytest.approx(0.06)}


def test_what_others_tell_the_meter(drive: Drive) -> None:
    told = Told(drive)
    for outcome in PromptOutcome:
        told.metrics.finished(outcome)
    assert told.by(REQUESTS) == dict.fromkeys(PromptOutcome, 1)
    told.metrics.copied(TransferRoute.CPU_TO_GPU, 0.004)
    told.metrics.copied(TransferRoute.GPU_TO_CPU, 0.002)
    assert told.by(COPY_SECONDS, "_sum") == {"cpu_to_gpu": 0.004, "gpu_to_cpu": 0.002}
    assert list(told.by(BUILD).values()) == [1]
    assert told.value(REFUSED_SAMPLES) == 0
