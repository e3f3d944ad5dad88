"""ThrottleTier: slows a tier down, for tests and experiments.

Theory
------
Each call is delayed as a slower device would: by ``latency_s``, and by its turn on one wire of
``bytes_per_s``. Latencies of overlapping calls overlap; the wire serves calls one after another.
The time of the tier itself is added, so it should be fast.

Rules
-----
* Both numbers may be changed at any time, also for waiting calls.
* A call that waits until its deadline raises TierTimeout, never reaches the tier, and frees the
  wire.
* Reads, writes and lookups are slowed down; health checks, scrubs, purges and removals are not.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from kvtier.errors import TierTimeout
from kvtier.tiers.base import Tier
from kvtier.tiers.wrapper import Operation, TierCall, TierWrapper

__all__ = ["ThrottleTier"]

T = TypeVar("T")

_SLOWED = frozenset({Operation.READ, Operation.WRITE, Operation.CONTAINS})


@dataclass(slots=True, eq=False)
class _Turn:
    """What is left to transfer of one call."""

    began_s: float
    left_bytes: float


class ThrottleTier(TierWrapper):
    """``inner`` at ``bytes_per_s`` (0: no limit) for all calls, and ``latency_s`` for each."""

    def __init__(self, inner: Tier, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._turns: deque[_Turn] = deque()
        self._moved_s = time.monotonic()
        self._bytes_per_s = self._latency_s = 0.0
        self.set(bytes_per_s, latency_s)

    def set(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        """Change both from now on. Thread-safe."""
        if not (0 <= bytes_per_s < math.inf and 0 <= latency_s < math.inf):
            raise ValueError(f"no speed of a tier: {bytes_per_s} bytes/s, {latency_s} s")
        with self._changed:
            self._advance()
            self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
            self._changed.notify_all()

    def intercept(self, call: TierCall, step: Callable[[], T]) -> T:
        """Delay the call, then make it."""
        if call.operation in _SLOWED:
            with self._changed:
                self._advance()
                turn = _Turn(time.monotonic(), float(call.num_bytes))
                self._turns.append(turn)
                try:
                    self._wait(turn, call.deadline_ns / 1e9)
                finally:
                    if turn in self._turns:
                        self._turns.remove(turn)
                        self._changed.notify_all()
        return step()

    def _wait(self, turn: _Turn, deadline_s: float) -> None:
        while True:
            self._advance()
            now_s = time.monotonic()
            left_s = max(turn.began_s + self._latency_s - now_s, self._wire_s(turn))
            if left_s <= 0:
                return
            if now_s >= deadline_s:
                raise TierTimeout(f"{self.properties.name}: slowed down past the deadline")
            self._changed.wait(min(left_s, deadline_s - now_s))

    def _wire_s(self, turn: _Turn) -> float:
        """Return how long the wire needs until the end of a turn."""
        if not turn.left_bytes:
            return 0.0
        before = takewhile(lambda each: each is not turn, self._turns)
        left_bytes = turn.left_bytes + sum(each.left_bytes for each in before)
        return left_bytes / self._bytes_per_s if self._bytes_per_s else 0.0

    def _advance(self) -> None:
        """Account for what the wire has carried since the last time."""
        now_s = time.monotonic()
        carried = (now_s - self._moved_s) * self._bytes_per_s
        self._moved_s = now_s
        for turn in self._turns:
            part = min(carried, turn.left_bytes)
            turn.left_bytes -= part
            carried -= part
