"""The bound on how many prompts are inside at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.api.http.error import ApiError, overloaded

__all__ = ["Gate", "GateSlot"]


class GateSlot:
    """What one call takes up: one prompt until its body is read, then as many as it has."""

    def __init__(self, gate: "Gate") -> None:
        self._gate = gate
        self.num_prompts = 1

    def widen(self, num_prompts: int) -> None:
        """Take room for all prompts of the call, or raise ``ApiError`` and change nothing."""
        self._gate.take(num_prompts - self.num_prompts)
        self.num_prompts = num_prompts


class Gate:
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
    def enter(self) -> Iterator[GateSlot]:
        """Hold a place for one call; raises ``ApiError`` when there is none."""
        self.take(1)
        place = GateSlot(self)
        try:
            yield place
        finally:
            self.num_inside -= place.num_prompts

    def take(self, num_prompts: int) -> None:
        """Count prompts in, or raise ``ApiError`` and change nothing."""
        if self.num_inside + num_prompts > self.capacity:
            raise overloaded()
        self.num_inside += num_prompts
