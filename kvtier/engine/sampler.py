"""Samples the next token from a model's logits."""

from collections.abc import Sequence

import torch

from kvtier.engine.request import Sampling

__all__ = ["make_generator", "sample"]

_TEMPERATURE_MIN = 1e-5
"""Below this only the best token has a chance, and scaled logits would exceed float32."""


def make_generator(sampling: Sampling) -> torch.Generator | None:
    """Return a request's own random generator, or None if it samples greedily."""
    if sampling.temperature < _TEMPERATURE_MIN:
        return None
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed & 0x7FFF_FFFF_FFFF_FFFF)
    return generator


def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    generators: Sequence[torch.Generator | None],
) -> list[int]:
    """Choose a token for each row of ``logits``; each request uses its own generator."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
        if generator is not None:
            tokens[row] = _draw(logits[row].float().cpu(), sampling, generator)
    return tokens


def _draw(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from the ``top_k`` candidates, reduced to those within ``top_p``."""
    candidates: torch.Tensor | None = None
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores, candidates = scores.topk(sampling.top_k)
    elif sampling.top_p < 1.0:
        scores, candidates = scores.sort(descending=True)
    chances = scores.softmax(dim=-1)
    if sampling.top_p < 1.0:
        # Keep tokens up to the one that reaches top_p; the first one always stays.
        chances[1:][chances.cumsum(dim=-1)[:-1] >= sampling.top_p] = 0.0
    drawn = int(torch.multinomial(chances, 1, generator=generator))
    return drawn if candidates is None else int(candidates[drawn])
