"""Greedy tokens equal those of transformers' own ``generate``: cold, warm, chunked, mixed."""

from pathlib import Path

import pytest

from kvtier.core.residency import TierName
from kvtier.engine.model import LoadedModel
from kvtier.engine.request import FinishReason, Sampling
from kvtier.engine.support import ARCHITECTURES
from tests.engine.drive import Drive, prompt
from tests.engine.models import Reference, load_tiny

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_cold_then_warm(tiny: LoadedModel, reference: Reference, length: int) -> None:
    drive = Drive(tiny)
    expected = reference.generate(prompt(length), 12)
    cold = drive.ask(prompt(length), 12)
    warm = drive.ask(prompt(length), 12)
    assert cold.tokens == expected
    assert warm.tokens == expected
    assert cold.usage.tier_tokens.total() == 0
    assert warm.usage.tier_tokens[TierName.GPU] == (length - 1) // 16 * 16
    assert warm.usage.prompt_tokens == length


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_every_architecture(tmp_path: Path, model_type: str, num_kv_heads: int) -> None:
    loaded = load_tiny(tmp_path / "model", model_type, num_key_value_heads=num_kv_heads)
    reference = Reference(loaded)
    drive = Drive(loaded, max_batch_tokens=64)
    for length in (5, 64, 65, 129, 200):
        assert drive.ask(prompt(length), 8).tokens == reference.generate(prompt(length), 8)
        assert drive.ask(prompt(length), 8).tokens == reference.generate(prompt(length), 8)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_scaled_rope(tmp_path: Path, rope: str) -> None:
    parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 10000.0}
    parameters["original_max_position_embeddings"] = 256
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope == "linear":
        del parameters["original_max_position_embeddings"]
    loaded = load_tiny(tmp_path / "model", rope_parameters=parameters)
    drive = Drive(loaded, max_batch_tokens=96)
    for length in (40, 300):
        expected = Reference(loaded).generate(prompt(length), 8)
        assert drive.ask(prompt(length), 8).tokens == expected


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16, 17, 100])
def test_chunked(tiny: LoadedModel, reference: Reference, max_batch_tokens: int) -> None:
    drive = Drive(tiny, max_batch_tokens=max_batch_tokens, max_num_sequences=1)
    assert drive.ask(prompt(130), 8).tokens == reference.generate(prompt(130), 8)
    assert drive.ask(prompt(130), 8).tokens == reference.generate(prompt(130), 8)


@pytest.mark.parametrize("max_batch_tokens", [32, 512])
def test_mixed_batches(tiny: LoadedModel, reference: Reference, max_batch_tokens: int) -> None:
    drive = Drive(tiny, max_batch_tokens=max_batch_tokens, max_num_sequences=20)
    answers = []
    for index, length in enumerate(LENGTHS):
        answers.append((length, drive.submit(prompt(length, seed=length), 12)))
        for _ in range(index % 3):  # some start while others decode
            drive.step()
    drive.run()
    for length, answer in answers:
        assert answer.tokens == reference.generate(prompt(length, seed=length), 12)


@pytest.mark.parametrize("pool_tokens", [176, 240, 320])
def test_tiny_pool_with_preemption(
    tiny: LoadedModel, reference: Reference, pool_tokens: int
) -> None:
    drive = Drive(tiny, pool_tokens=pool_tokens)
    answers = [(seed, drive.submit(prompt(40, seed=seed), 40)) for seed in range(6)]
    drive.run()
    for seed, answer in answers:
        expected = reference.generate(prompt(40, seed=seed), 40)
        assert answer.tokens == expected
        assert answer.usage.prompt_tokens == 40
        assert answer.usage.completion_tokens == len(expected)
    if pool_tokens == 176:
        assert drive.engine.snapshot().num_preemptions > 0


def test_stops_at_an_eos_token_unless_told_not_to(tiny: LoadedModel, reference: Reference) -> None:
    drive = Drive(tiny)
    eos = next(iter(tiny.eos_ids))
    for seed in range(200):  # find a prompt whose answer ends by itself
        expected = reference.generate(prompt(20, seed=seed), 30)
        if expected[-1] == eos and len(expected) < 30:
            break
    answer = drive.ask(prompt(20, seed=seed), 30)
    assert answer.tokens == expected
    assert answer.finish is FinishReason.STOP
    going_on = drive.ask(prompt(20, seed=seed), 30, sampling=Sampling(ignore_eos=True))
    assert len(going_on.tokens) == 30
    assert going_on.finish is FinishReason.LENGTH


def test_stops_at_a_token_of_the_request(tiny: LoadedModel, reference: Reference) -> None:
    drive = Drive(tiny)
    expected = reference.generate(prompt(20), 12)
    stop = expected[5]
    answer = drive.ask(
        prompt(20), 12, sampling=Sampling(ignore_eos=True), stop_ids=frozenset({stop})
    )
    assert answer.tokens == expected[: expected.index(stop) + 1]
    assert answer.finish is FinishReason.STOP


def test_ends_at_the_context_limit(tiny: LoadedModel) -> None:
    drive = Drive(tiny, pool_tokens=tiny.context_limit)
    length = tiny.context_limit - 3
    answer = drive.ask(prompt(length), 100, sampling=Sampling(ignore_eos=True))
    assert len(answer.tokens) == 3
    assert answer.finish is FinishReason.LENGTH
