"""The engine's requests and outputs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import KvtierError

__all__ = [
    "NO_HINTS",
    "DecisionReason",
    "Deliver",
    "EngineRequest",
    "FinishReason",
    "Hints",
    "Output",
    "QueueFull",
    "RequestRefused",
    "RestoreDecision",
    "Sampling",
    "Usage",
    "format_decision",
]


_TOKENS_MAX = 2**31 - 1
"""More than the context of any model."""


class RequestRefused(KvtierError):
    """A request that can never be served; the message says why and what to change."""


class QueueFull(KvtierError):
    """Too many requests are waiting; the client may try again later."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of candidates; 0: no limit."""
    seed: int | None = None
    ignore_eos: bool = False
    """Whether to continue after the model's end tokens."""


@dataclass(frozen=True, slots=True)
class Hints:
    """A client's hints about a request's future; all optional. See ``RequestTraits``."""

    kind: str = ""
    continues: float | None = None
    gap_s: float | None = None
    priority: int = 0
    ttl_s: float | None = None


NO_HINTS = Hints()
"""The hints of a request without any."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to complete."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer besides the model's end tokens, even with ``ignore_eos``."""
    cache_salt: str | None = None
    max_offload_tokens: int | None = None
    """Offer at most the first N tokens to the tiers below, rounded down to blocks; 0: none."""
    max_load_tokens: int | None = None
    """Load at most N tokens from the tiers below, rounded down to blocks; 0: none."""
    hints: Hints = NO_HINTS

    def traits(self) -> RequestTraits:
        """Return what the tiers below need to know about this request."""
        return RequestTraits(
            request_id=self.request_id,
            num_tokens=len(self.prompt),
            kind=self.hints.kind,
            continues=self.hints.continues,
            gap_s=self.hints.gap_s,
            priority=self.hints.priority,
            ttl_s=self.hints.ttl_s,
            max_offload_tokens=_bounded(self.max_offload_tokens),
            max_load_tokens=_bounded(self.max_load_tokens),
        )


def _bounded(num_tokens: int | None) -> int | None:
    """Return a limit that fits into a message: above any context, all limits are equal."""
    return None if num_tokens is None else min(num_tokens, _TOKENS_MAX)


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RestoreDecision(StrEnum):
    """The decision about the part of a prompt below the GPU; ``Usage`` adds a reason."""

    GPU_HIT = "gpu_hit"
    """Nothing was requested from the tiers below: the GPU held every full block."""
    LOADED = "loaded"
    """Every full block that the GPU lacked was loaded."""
    LOADED_PART = "loaded_part"
    """Some of them were loaded; the reason says why the others were not."""
    COMPUTED = "computed"
    """Nothing was loaded; the reason says why."""


class DecisionReason(StrEnum):
    """Why a decision was made.

    Includes the reasons of the KV port and of its plans; others become ``other``.
    """

    COMPLETE = "complete"
    ABSENT = "absent"
    TOO_SHORT = "too_short"
    """No full block was missing."""
    MAX_LOAD_TOKENS = "max_load_tokens"
    SPLIT = "split"
    """The front was computed while the back was loaded, until they met."""
    PART = "part"
    """Loading more would have taken longer than computing it."""
    COST = "cost"
    """Computing was predicted to be faster."""
    RISK = "risk"
    """Computing was predicted to be slower on average, but loading might have taken far longer."""
    GUARD = "guard"
    """The tier's recent restores did not pay off."""
    NEVER = "never"
    """Disabled by configuration."""
    POOL_FULL = "pool_full"
    """The pool had no room for the blocks to load into."""
    LATE = "late"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DAEMON_AWAY = "daemon_away"
    OFF = "off"
    OTHER = "other"


def format_decision(decision: RestoreDecision, reason: str) -> str:
    """Return ``decision:reason`` from the closed sets; complete decisions have no reason."""
    if decision in {RestoreDecision.GPU_HIT, RestoreDecision.LOADED}:
        return decision.value
    known = DecisionReason(reason) if reason in set(DecisionReason) else DecisionReason.OTHER
    return f"{decision.value}:{known.value}"


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a request; ``prompt_tokens == tier_tokens.total() + computed_tokens``.

    A request that ends before its first token counts the prompt tokens supplied so far.
    """

    prompt_tokens: int
    completion_tokens: int
    tier_tokens: Counter[TierName]
    computed_tokens: int
    decision: str
    """The decision about the prefix below the GPU, and why: see ``format_decision``."""


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request; the last output has a finish reason.

    The first one with tokens and the last one have the usage, as far as it is known.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""


Deliver = Callable[[Output], None]
"""Called on the engine's thread, in order, for each output of a request."""
