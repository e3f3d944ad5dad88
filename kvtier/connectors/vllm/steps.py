"""What vLLM's steps took, which the daemon's idea of the cost of computing is made of.

A step begins when it is scheduled and ends when its output is there. With several under way, as
vLLM has it on GPUs, one takes from the end of the one before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.cost.sample import StepSample

__all__ = ["Chunk", "StepClock"]

_STEPS_MAX = 8
"""Under way: vLLM has two, or one for each stage of a pipeline."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of one request."""

    num_new: int
    num_past: int
    num_prompt: int

    @property
    def is_decode(self) -> bool:
        """Tell whether the prompt was computed before."""
        return self.num_past >= self.num_prompt


class StepClock:
    """Told of each step twice, in order."""

    def __init__(self) -> None:
        self._open: deque[tuple[Sequence[Chunk], float]] = deque(maxlen=_STEPS_MAX)
        self._ended_s = 0.0

    def begin(self, chunks: Sequence[Chunk], now_s: float) -> None:
        """Note that a step was scheduled; one without chunks computes nothing that is known."""
        self._open.append((chunks, now_s))

    def end(self, now_s: float) -> StepSample | None:
        """Return what the oldest step under way took, if it computed something."""
        if not self._open:
            return None
        chunks, began_s = self._open.popleft()
        began_s, self._ended_s = max(began_s, self._ended_s), now_s
        if not chunks:
            return None
        prefill = [chunk for chunk in chunks if not chunk.is_decode]
        decode = [chunk for chunk in chunks if chunk.is_decode]
        return StepSample(
            num_prefill_tokens=sum(chunk.num_new for chunk in prefill),
            num_decode_tokens=sum(chunk.num_new for chunk in decode),
            attended=sum(c.num_new * (c.num_past + c.num_new / 2) for c in prefill),
            decode_past_tokens=sum(chunk.num_past for chunk in decode),
            seconds=now_s - began_s,
        )
