"""What vLLM's steps took, which the daemon's idea of the cost of computing is made of.

A step begins when it is scheduled and ends when its output is there. With several under way, as
vLLM has it on GPUs, one takes from the end of the one before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.client import OwnTier
from kvtier.connectors.vllm.request import TrackedRequest
from kvtier.core.layout import KVLayout
from kvtier.core.plan import EngineLoad, StepSample

__all__ = ["Backlog", "StepChunk", "StepClock", "VllmStep", "own_tier"]

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


class Backlog:
    """Of the requests that are ``tracked``, by name; counted once for a step."""

    def __init__(self, tracked: Mapping[str, TrackedRequest]) -> None:
        self._tracked = tracked
        self._total: EngineLoad | None = None

    def load(self, but: TrackedRequest | None = None) -> EngineLoad:
        """Return what vLLM has to do, besides one request; what it had when the step began."""
        if self._total is None:
            lefts = [tracked.num_left for tracked in self._tracked.values()]
            self._total = EngineLoad(sum(lefts), lefts.count(0))
        if but is None:
            return self._total
        return EngineLoad(
            max(0, self._total.waiting_tokens - but.num_left), self._total.num_running
        )

    def end_step(self) -> None:
        """Have it counted anew."""
        self._total = None


def own_tier(pool: Any, layout: KVLayout, ratio: int, hit_tokens: int | None) -> OwnTier:
    """Tell of vLLM's block pool, of whose blocks ``ratio`` make one of ours. From any thread.

    Each rank has its share of the bytes; tokens are told once, without ``hit_tokens`` not at all.
    A block is used where a request has it, and where it can be found again. Which are both, nobody
    counts, so the larger number is told: short by the few that requests are still filling.
    """
    num_blocks = len(pool.blocks) - 1  # the first one stands for none, and holds nothing
    num_taken = num_blocks - pool.get_num_free_blocks()
    num_used = min(num_blocks, max(num_taken, len(pool.cached_block_hash_to_block)))
    is_first = hit_tokens is not None
    return OwnTier(
        capacity_bytes=num_blocks * layout.block_bytes // ratio,
        used_bytes=num_used * layout.block_bytes // ratio,
        used_tokens=num_used * layout.block_tokens // ratio if is_first else 0,
        hit_tokens=hit_tokens or 0,
    )
