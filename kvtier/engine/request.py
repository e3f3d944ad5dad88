"""What goes into the engine and what comes out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.errors import KvtierError

__all__ = [
    "Decision",
    "DecisionReason",
    "Deliver",
    "FinishReason",
    "Output",
    "QueueFull",
    "Request",
    "RequestRefused",
    "Sampling",
    "TierTokens",
    "Usage",
    "format_decision",
]


class RequestRefused(KvtierError):
    """A request that can never be served here: the message says why and what to change."""


class QueueFull(KvtierError):
    """Too many requests wait already: the client may try again later."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    cache_salt: str | None = None
    max_offload_tokens: int | None = None
    """Offer at most the first N tokens to the tiers below, rounded down to blocks; 0: none."""
    max_load_tokens: int | None = None
    """Load at most N tokens from the tiers below, rounded down to blocks; 0: none."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Prompt tokens by the tier that served them."""

    gpu: int = 0
    cpu: int = 0
    ssd: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """Return the prompt tokens that were not computed."""
        return self.gpu + self.cpu + self.ssd + self.remote


class Decision(StrEnum):
    """What was done about the part of a prompt below the GPU; with a reason in ``Usage``."""

    GPU_HIT = "gpu_hit"
    """Nothing was asked of the tiers below: the GPU held every full block."""
    LOADED = "loaded"
    """Every full block that the GPU lacked was loaded."""
    LOADED_PART = "loaded_part"
    """Leading blocks were loaded; the reason says why not the rest."""
    COMPUTED = "computed"
    """Nothing was loaded; the reason says why."""


class DecisionReason(StrEnum):
    """Why a decision was made; the KV port's reasons are among them, others become ``other``."""

    COMPLETE = "complete"
    ABSENT = "absent"
    TOO_SHORT = "too_short"
    """No full block was missing, so there was nothing to ask for."""
    MAX_LOAD_TOKENS = "max_load_tokens"
    POOL_FULL = "pool_full"
    """The pool had no room for the blocks to load into."""
    LATE = "late"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DAEMON_AWAY = "daemon_away"
    OFF = "off"
    OTHER = "other"


def format_decision(decision: Decision, reason: str) -> str:
    """Return ``decision:reason`` out of the closed sets; the two complete ones stand alone."""
    if decision in {Decision.GPU_HIT, Decision.LOADED}:
        return decision.value
    known = DecisionReason(reason) if reason in set(DecisionReason) else DecisionReason.OTHER
    return f"{decision.value}:{known.value}"


@dataclass(frozen=True, slots=True)
class Usage:
    """The account of one request; ``prompt_tokens == tier_tokens.total + computed_tokens``.

    A request that ends before its first token counts the prompt tokens it got to.
    """

    prompt_tokens: int
    completion_tokens: int
    tier_tokens: TierTokens
    computed_tokens: int
    decision: str
    """What was done about the prefix below the GPU, and why: see ``format_decision``."""


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request; the last one has a finish reason and the usage."""

    request_id: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""


Deliver = Callable[[Output], None]
"""Called on the engine's thread, in order, for each output of a request."""
