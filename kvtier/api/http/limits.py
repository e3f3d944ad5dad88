"""Limits of the HTTP server: deadlines, body size, and the number of open prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.api.http.errors import ApiError, overloaded

__all__ = [
    "LimiterSlots",
    "PromptLimiter",
    "ServerLimits",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on requests and their clients."""

    body_bytes: int = 16 << 20
    """Largest request body; a million token ids in JSON are about 7 MB."""
    body_seconds: float = 30.0
    """Time to receive a body, so that slow clients do not hold a slot forever."""
    send_seconds: float = 60.0
    """A client that reads nothing for this long counts as disconnected."""
    silence_seconds: float = 10.0
    """Time without output after which to check whether the engine is stuck."""
    open_prompts: int = 256
    """Maximum number of prompts that are read, queued or running; further clients must retry."""
    prompts_per_call: int = 64
    """Maximum number of prompts per call, so that one call cannot take all slots."""


class LimiterSlots:
    """The slots of one call: one until its body is read, then one per prompt."""

    def __init__(self, limiter: "PromptLimiter") -> None:
        self._limiter = limiter
        self.num_prompts = 1

    def widen(self, num_prompts: int) -> None:
        """Take a slot for each prompt of the call, or raise ApiError and change nothing."""
        self._limiter.take(num_prompts - self.num_prompts)
        self.num_prompts = num_prompts


class PromptLimiter:
    """Limits the number of open prompts; for use on the server's loop."""

    def __init__(self, capacity: int, prompts_per_call: int) -> None:
        self.capacity = capacity
        self.prompts_per_call = min(capacity, prompts_per_call)
        self.num_open = 0

    def check(self, num_prompts: int) -> None:
        """Raise ApiError for a call with too many prompts. Thread-safe."""
        if num_prompts > self.prompts_per_call:
            raise ApiError(
                f"prompt: at most {self.prompts_per_call} prompts per call", param="prompt"
            )

    @contextmanager
    def hold(self) -> Iterator[LimiterSlots]:
        """Hold a slot for one call; raises ApiError if none is free."""
        self.take(1)
        slots = LimiterSlots(self)
        try:
            yield slots
        finally:
            self.num_open -= slots.num_prompts

    def take(self, num_prompts: int) -> None:
        """Take slots, or raise ApiError and change nothing."""
        if self.num_open + num_prompts > self.capacity:
            raise overloaded()
        self.num_open += num_prompts
