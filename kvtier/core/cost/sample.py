"""What the cost models are fitted to: transfers and steps, as they were measured."""

from dataclasses import dataclass

__all__ = ["EngineLoad", "Estimate", "ModelFlops", "StepSample", "TransferSample"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted seconds: about half the time it takes longer than ``mean_s``, seldom ``p95_s``."""

    mean_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One transfer of a tier, from the moment a worker began with it."""

    num_blocks: int
    num_bytes: int
    depth: int
    """Transfers of that route under way when it began, itself included."""
    seconds: float
    """Without the time it waited in the queue."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of an engine: a batch of chunks of prompts and of single tokens."""

    num_prefill_tokens: int
    num_decode_tokens: int
    attended: float
    """Sum over the chunks of prompts of new * (past + new / 2), in tokens squared."""
    decode_past_tokens: int
    """Tokens before the new ones, over the sequences that decode."""
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do before a request that comes now."""

    waiting_tokens: int = 0
    """Prompt tokens still to compute, of requests that run or wait."""
    num_running: int = 0
    """Sequences that decode."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What a model takes, for as long as no step was measured."""

    per_token: float = 0.0
    """Floating-point operations of the layers for one token."""
    per_attended: float = 0.0
    """And for each token it attends to."""
    per_s: float = 0.0
    """What the engine's device does in a second, as it measured; 0: unknown."""
