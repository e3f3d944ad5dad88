"""BreakerTier: a medium that keeps failing is left alone for a while.

Closed, every call goes through. After ``faults_max`` faults in a row it opens: every call is a
TierError at once, so that nobody spends a deadline on a dead server. After ``cool_down_ns`` one
call goes through as a probe; it closes the breaker, or opens it for as long again.
"""

import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from kvtier.errors import TierError
from kvtier.tiers.base import Health, HealthState, Tier
from kvtier.tiers.wrap.around import AroundTier, Call

__all__ = ["BreakerState", "BreakerTier"]

T = TypeVar("T")


class BreakerState(StrEnum):
    """Which calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """A probe is under way."""


class BreakerTier(AroundTier):
    """Gives up on ``inner`` after ``faults_max`` faults in a row, for ``cool_down_ns``."""

    def __init__(
        self,
        inner: Tier,
        *,
        faults_max: int = 3,
        cool_down_ns: int = 5_000_000_000,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(inner)
        self._faults_max = faults_max
        self._cool_down_ns = cool_down_ns
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_faults = 0
        self._opened_ns = 0
        self._last_fault = ""

    @property
    def state(self) -> BreakerState:
        """Return which calls go through now."""
        return self._state

    def health(self) -> Health:
        """Return out with the last fault while the breaker is open, else the inner tier's."""
        if self._state is BreakerState.CLOSED:
            return self.inner.health()
        return Health(HealthState.OUT, self._last_fault)

    def around(self, call: Call, step: Callable[[], T]) -> T:
        """Make the call unless the breaker is open."""
        is_probe = self._enter()
        try:
            result = step()
        except TierError as error:
            self._last_fault = str(error)
            self._count_fault(is_probe)
            raise
        except BaseException:
            if is_probe:  # a bug, not an answer: let the next call be the probe
                self._reopen(self._opened_ns)
            raise
        with self._lock:
            if is_probe or self._state is BreakerState.CLOSED:
                self._state = BreakerState.CLOSED
                self._num_faults = 0
        return result

    def _enter(self) -> bool:
        """Let a call in, or raise; True makes it the probe."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return False
            is_cool = self._clock_ns() - self._opened_ns >= self._cool_down_ns
            if self._state is BreakerState.OPEN and is_cool:
                self._state = BreakerState.HALF_OPEN
                return True
        raise TierError(f"{self.properties.name}: left alone after {self._faults_max} faults")

    def _count_fault(self, is_probe: bool) -> None:
        with self._lock:
            self._num_faults += 1
            is_over = self._state is BreakerState.CLOSED and self._num_faults >= self._faults_max
        if is_probe or is_over:
            self._reopen(self._clock_ns())

    def _reopen(self, since_ns: int) -> None:
        with self._lock:
            self._state = BreakerState.OPEN
            self._opened_ns = since_ns
