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
    """What one server takes from its clients."""

    body_bytes: int = 16 << 20
    """A million token ids in JSON are about 7 MB; anything far beyond is a mistake."""
    body_seconds: float = 30.0
    """A client that trickles its body would hold a place for ever."""
    send_seconds: float = 60.0
    """A client that reads nothing for this long is treated as gone."""
    silence_seconds: float = 10.0
    """After this long without an output, ask whether the engine is stuck."""
    open_prompts: int = 256
    """Prompts read, queued or running; beyond it clients are told to come back."""
    prompts_per_call: int = 64
    """One call must not take every place."""


class LimiterSlots:
    """What one call takes up: one prompt until its body is read, then as many as it has."""

    def __init__(self, gate: "PromptLimiter") -> None:
        self._gate = gate
        self.num_prompts = 1

    def widen(self, num_prompts: int) -> None:
        """Take room for all prompts of the call, or raise ``ApiError`` and change nothing."""
        self._gate.take(num_prompts - self.num_prompts)
        self.num_prompts = num_prompts


class PromptLimiter:
    """Counts prompts in and out; belongs to the server's loop."""

    def __init__(self, capacity: int, prompts_per_call: int) -> None:
        self.capacity = capacity
        self.prompts_per_call = min(capacity, prompts_per_call)
        self.num_inside = 0

    def check(self, num_prompts: int) -> None:
        """Refuse a call of too many prompts; from any thread, and before they cost anything."""
        if num_prompts > self.prompts_per_call:
            raise ApiError(
                f"prompt: at most {self.prompts_per_call} prompts in one call", param="prompt"
            )

    @contextmanager
    def enter(self) -> Iterator[LimiterSlots]:
        """Hold a place for one call; raises ``ApiError`` when there is none."""
        self.take(1)
        place = LimiterSlots(self)
        try:
            yield place
        finally:
            self.num_inside -= place.num_prompts

    def take(self, num_prompts: int) -> None:
        """Count prompts in, or raise ``ApiError`` and change nothing."""
        if self.num_inside + num_prompts > self.capacity:
            raise overloaded()
        self.num_inside += num_prompts
