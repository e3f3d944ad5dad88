"""vLLM's state as reported to the daemon: step durations, backlog, and usage of its own cache.

A step starts when it is scheduled and ends when its output is available. If several are running, as
in vLLM on GPUs, a step counts from the end of the previous one.
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
"""Open steps: vLLM has two, or one for each pipeline stage."""


@dataclass(frozen=True, slots=True)
class StepChunk:
    """The tokens of one request that a step computes."""

    request_id: str
    num_new: int
    num_past: int
    num_prompt: int

    @property
    def is_decode(self) -> bool:
        """Return whether the whole prompt was already computed."""
        return self.num_past >= self.num_prompt


@dataclass(frozen=True, slots=True)
class VllmStep:
    """One step; ``seconds`` is set once it has ended."""

    chunks: Sequence[StepChunk]
    began_s: float
    seconds: float = 0.0

    def share_s(self, chunk: StepChunk) -> float:
        """Return the chunk's share of the step's duration, in seconds."""
        return self.seconds * chunk.num_new / sum(each.num_new for each in self.chunks)

    def sample(self) -> StepSample:
        """Return the step as a sample for the daemon."""
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
    """Measures steps by number, since vLLM does not report the end of empty steps."""

    def __init__(self) -> None:
        self._open: dict[int, VllmStep] = {}
        self._num_begun = 0
        self._ended_s = 0.0
        self.computing_s = -math.inf
        """When a computing step last started or ended, on the monotonic clock."""

    def begin(self, chunks: Sequence[StepChunk], now_s: float) -> int:
        """Record that a step was scheduled; returns its number.

        The content of a step without chunks is unknown.
        """
        self.computing_s = now_s
        self._num_begun += 1
        self._open[self._num_begun] = VllmStep(chunks, now_s)
        if len(self._open) > _STEPS_MAX:
            del self._open[next(iter(self._open))]
        return self._num_begun

    def end(self, number: int, now_s: float) -> VllmStep | None:
        """Return an ended step with its duration; None if the step or its content is unknown."""
        if number:
            self.computing_s = now_s
        step = self._open.pop(number, None)
        if step is None:
            return None
        began_s, self._ended_s = max(step.began_s, self._ended_s), now_s
        return VllmStep(step.chunks, began_s, now_s - began_s) if step.chunks else None


class Backlog:
    """The load of all ``tracked`` requests, counted once per step."""

    def __init__(self, tracked: Mapping[str, TrackedRequest]) -> None:
        self._tracked = tracked
        self._total: EngineLoad | None = None

    def load(self, but: TrackedRequest | None = None) -> EngineLoad:
        """Return vLLM's load at the start of the step, without the request ``but``."""
        if self._total is None:
            lefts = [tracked.num_left for tracked in self._tracked.values()]
            self._total = EngineLoad(sum(lefts), lefts.count(0))
        if but is None:
            return self._total
        return EngineLoad(
            max(0, self._total.waiting_tokens - but.num_left), self._total.num_running
        )

    def end_step(self) -> None:
        """Discard the count, so that the next step counts again."""
        self._total = None


def own_tier(pool: Any, layout: KVLayout, ratio: int, hit_tokens: int | None) -> OwnTier:
    """Return the usage of vLLM's block pool; ``ratio`` of its blocks make one kvtier block.

    May be called from any thread. Each rank has its share of the bytes; tokens are reported for one
    rank only, the one with ``hit_tokens``. A block is used if a request has it, or if it is cached.
    vLLM does not count blocks that are both, so the larger of the two numbers is returned; it lacks
    the few blocks that requests are still filling.
    """
    num_blocks = len(pool.blocks) - 1  # the first one is a placeholder
    num_taken = num_blocks - pool.get_num_free_blocks()
    num_used = min(num_blocks, max(num_taken, len(pool.cached_block_hash_to_block)))
    is_first = hit_tokens is not None
    return OwnTier(
        capacity_bytes=num_blocks * layout.block_bytes // ratio,
        used_bytes=num_used * layout.block_bytes // ratio,
        used_tokens=num_used * layout.block_tokens // ratio if is_first else 0,
        hit_tokens=hit_tokens or 0,
    )
