"""Sampling: within its limits, by its seed, and the same whatever happens around it."""

import torch

from kvtier.engine.model import LoadedModel
from kvtier.engine.request import Sampling
from kvtier.engine.sampler import make_generator, sample
from tests.engine.drive import Drive, prompt


def _draw(logits: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    generator = make_generator(sampling)
    return [sample(logits, [sampling], [generator])[0] for _ in range(count)]


def test_temperature_zero_is_greedy() -> None:
    assert _draw(torch.tensor([[0.1, 3.0, 2.9]]), Sampling(), 20) == [1] * 20


def test_a_temperature_next_to_zero_is_greedy() -> None:
    for temperature in (1e-320, 1e-38, 1e-6, 1e-5):
        sampling = Sampling(temperature=temperature, top_p=0.9, seed=1)
        assert _draw(torch.tensor([[0.1, 90.0, 2.9]]), sampling, 20) == [1] * 20


def test_frequencies_follow_the_scores() -> None:
    chances = torch.tensor([[0.5, 0.3, 0.2]])
    drawn = _draw(chances.log(), Sampling(temperature=1.0, seed=7), 4000)
    for token, chance in enumerate(chances[0].tolist()):
        assert abs(drawn.count(token) / 4000 - chance) < 0.03


def test_top_k_and_top_p_bound_the_choice() -> None:
    logits = torch.tensor([[0.2, 0.4, 0.1, 0.3]]).log()
    assert set(_draw(logits, Sampling(temperature=1.0, top_k=2, seed=1), 300)) == {1, 3}
    assert set(_draw(logits, Sampling(temperature=1.0, top_p=0.65, seed=1), 300)) == {1, 3}
    assert set(_draw(logits, Sampling(temperature=1.0, top_p=0.75, seed=1), 300)) == {0, 1, 3}
    assert set(_draw(logits, Sampling(temperature=1.0, top_p=0.0, seed=1), 300)) == {1}
    both = Sampling(temperature=1.0, top_k=3, top_p=0.4, seed=1)
    assert set(_draw(logits, both, 300)) == {1}


def test_rows_do_not_mix() -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, 0.0], [9.0, 0.0]])
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling()]
    generators = [make_generator(sampling) for sampling in samplings]
    drawn = [sample(logits, samplings, generators) for _ in range(50)]
    assert {row[0] for row in drawn} == {1}
    assert {row[1] for row in drawn} == {0, 1}
    assert {row[2] for row in drawn} == {0}


def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_preempted(tiny: LoadedModel) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    alone = Drive(tiny).ask(prompt(40), 40, sampling=sampling)
    crowded = Drive(tiny, pool_tokens=128)
    first = crowded.submit(prompt(30, seed=3), 60)
    again = crowded.submit(prompt(40), 40, sampling=sampling)
    crowded.run()
    assert first.is_done
    assert again.tokens == alone.tokens
    assert crowded.engine.snapshot().num_preemptions > 0
    other = Drive(tiny).ask(prompt(40), 40, sampling=Sampling(temperature=1.0, seed=12))
    assert other.tokens != alone.tokens
