"""BreakerTier: a circuit breaker that stops calling a device that keeps failing.

While closed, all calls pass. After ``faults_max`` faults in a row it opens: every call raises
TierError at once, so that no caller spends its deadline on a dead server. After ``cool_down_ns``
one health check passes, and no other call. It closes the breaker, or opens it for as long again.

Rules
-----
* A failed device is never tested with a caller's request: only ``health_check`` reaches it.
* Health checks are counted separately. A device from which a few reads still succeed, from open
  files or a cache, is not healthy as long as it cannot be written.
* Operators' commands and scrubs do not count, since they may ask too much. Nor does a call made
  after its own deadline, since it never reached the device.
"""

import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from kvtier.errors import TierError, TierTimeout
from kvtier.tiers.base import Health, HealthState, Tier
from kvtier.tiers.wrapper import Operation, TierCall, TierWrapper

__all__ = ["BreakerState", "BreakerTier"]

T = TypeVar("T")

_COUNTED = frozenset({Operation.READ, Operation.WRITE, Operation.CONTAINS, Operation.REMOVE})
"""Calls whose results count, in addition to health checks."""

_COOL_DOWN_NS = 1_000_000_000
"""Time without calls to a failing tier; short, so that a recovered tier is used within seconds."""


class BreakerState(StrEnum):
    """State of a breaker, which determines the calls that pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """A health check is under way."""


class BreakerTier(TierWrapper):
    """Stops calling ``inner`` for ``cool_down_ns`` after ``faults_max`` faults in a row."""

    def __init__(
        self,
        inner: Tier,
        *,
        faults_max: int = 3,
        cool_down_ns: int = _COOL_DOWN_NS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(inner)
        self._faults_max = faults_max
        self._cool_down_ns = cool_down_ns
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_faults = 0
        self._num_check_faults = 0
        self._opened_ns = 0
        self._checked_ns = clock_ns()
        self._last_fault = ""

    @property
    def state(self) -> BreakerState:
        """Return the current state."""
        return self._state

    def health(self) -> Health:
        """Return OUT with the last fault while the breaker is open, else the inner health."""
        if self._state is BreakerState.CLOSED:
            return self.inner.health()
        return Health(HealthState.OUT, self._last_fault)

    def needs_health_check(self, period_ns: int) -> bool:
        """Return whether a health check is due: at once after a fault, else once per period.

        While the breaker is open, one is due after the cool-down.
        """
        with self._lock:
            now_ns = self._clock_ns()
            match self._state:
                case BreakerState.OPEN:
                    return now_ns - self._opened_ns >= self._cool_down_ns
                case BreakerState.HALF_OPEN:
                    return False
            is_in_doubt = self._num_faults + self._num_check_faults > 0
            return is_in_doubt or now_ns - self._checked_ns >= period_ns

    def intercept(self, call: TierCall, step: Callable[[], T]) -> T:
        """Make the call unless the breaker is open."""
        if self._clock_ns() >= call.deadline_ns:
            raise TierTimeout(f"{self.properties.name}: the deadline passed before the call")
        self._enter(call.operation)
        try:
            result = step()
        except TierError as error:
            self._count_fault(call.operation, str(error))
            raise
        except BaseException as error:
            # A bug proves nothing about the device, but a check that raised did not pass.
            if call.operation is Operation.HEALTH_CHECK:
                self._count_fault(call.operation, repr(error))
            raise
        self._count_success(call.operation)
        return result

    def _enter(self, operation: Operation) -> None:
        """Let a call pass, or raise."""
        with self._lock:
            now_ns = self._clock_ns()
            if operation is Operation.HEALTH_CHECK:
                self._checked_ns = now_ns
            if self._state is BreakerState.CLOSED:
                return
            is_cool = now_ns - self._opened_ns >= self._cool_down_ns
            if self._state is BreakerState.OPEN and is_cool and operation is Operation.HEALTH_CHECK:
                self._state = BreakerState.HALF_OPEN
                return
            fault = self._last_fault
        raise TierError(f"{self.properties.name}: circuit breaker open, last fault: {fault}")

    def _count_fault(self, operation: Operation, fault: str) -> None:
        with self._lock:
            if operation is Operation.HEALTH_CHECK:
                self._num_check_faults += 1
            elif operation in _COUNTED:
                self._num_faults += 1
            else:
                return
            self._last_fault = fault
            is_over = max(self._num_faults, self._num_check_faults) >= self._faults_max
            is_probed = (
                operation is Operation.HEALTH_CHECK and self._state is BreakerState.HALF_OPEN
            )
            if is_probed or (self._state is BreakerState.CLOSED and is_over):
                self._state = BreakerState.OPEN
                self._opened_ns = self._clock_ns()

    def _count_success(self, operation: Operation) -> None:
        with self._lock:
            if operation is Operation.HEALTH_CHECK:
                self._state = BreakerState.CLOSED
                self._num_faults = self._num_check_faults = 0
            elif operation in _COUNTED and self._state is BreakerState.CLOSED:
                self._num_faults = 0
