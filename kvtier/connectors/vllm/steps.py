"""What vLLM's steps took, which the daemon's idea of the cost of computing is made of.

A step begins when it is scheduled and ends when its output is there. With several under way, as
vLLM has it on GPUs, one takes from the end of the one before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.plan import StepSample

__all__ = ["StepChunk", "StepClock", "VllmStep"]

_STEPS_MAX = 64
"""Under way: vLLM has two, or one for each stage of a pipeline."""


@dataclass(frozen=True, slots=True)
class StepChunk:
    """What a step computes of one request."""

    request_id: str
    num_new: int
    num_past: int
    num_prompt: int

    @property
    def is_decode(self) -> bool:
        """Tell whether the prompt was computed before."""
        return self.num_past >= self.num_prompt


@dataclass(frozen=True, slots=True)
class VllmStep:
    """One step; with ``seconds`` once it has ended."""

    chunks: Sequence[StepChunk]
    began_s: float
    seconds: float = 0.0

    def share_s(self, chunk: StepChunk) -> float:
        """Return how much of it one chunk took."""
        return self.seconds * chunk.num_new / sum(each.num_new for each in self.chunks)

    def sample(self) -> StepSample:
        """Return it as the daemon wants to know it."""
        prefill = [chunk for chunk in self.chunks if not chunk.is_decode]
        decode = [chunk for chunk in self.chunks if chunk.is_decode]
        return StepSample(
            num_prefill_tokens=sum(chunk.num_new for chunk in prefill),
            num_decode_tokens=sum(chunk.num_new for chunk in decode),
            attended=sum(c.num_new * (c.num_past + c.num_new / 2) for c in prefill),
            decode_past_tokens=sum(chunk.num_past for chunk in decode),
            seconds=self.seconds,
        )


class StepClock:
    """Told of each step twice; by its number, since vLLM does not tell of the end of empty ones."""

    def __init__(self) -> None:
        self._open: dict[int, VllmStep] = {}
        self._num_begun = 0
        self._ended_s = 0.0
        self.computing_s = -math.inf
        """When a step that computes last began, or ended."""

    def begin(self, chunks: Sequence[StepChunk], now_s: float) -> int:
        """Note that a step was scheduled, and return its number.

        One without chunks computes something that is not known.
        """
        self.computing_s = now_s
        self._num_begun += 1
        self._open[self._num_begun] = VllmStep(chunks, now_s)
        if len(self._open) > _STEPS_MAX:
            del self._open[next(iter(self._open))]
        return self._num_begun

    def end(self, number: int, now_s: float) -> VllmStep | None:
        """Return what a step took, if it is one and what it computed is known."""
        if number:
            self.computing_s = now_s
        step = self._open.pop(number, None)
        if step is None:
            return None
        began_s, self._ended_s = max(step.began_s, self._ended_s), now_s
        return VllmStep(step.chunks, began_s, now_s - began_s) if step.chunks else None
