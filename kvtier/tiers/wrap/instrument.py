"""InstrumentTier: tells an observer of every call. It changes nothing else."""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, TypeVar

from kvtier.errors import TierTimeout
from kvtier.tiers.base import Tier
from kvtier.tiers.wrap.around import AroundTier, Call

__all__ = ["CallOutcome", "InstrumentTier", "TierObserver"]

T = TypeVar("T")


class CallOutcome(StrEnum):
    """How a call ended; a closed set, each one a metric label."""

    DONE = "done"
    TIMEOUT = "timeout"
    FAULT = "fault"


class TierObserver(Protocol):
    """Whoever counts. It never raises and never blocks."""

    def observe(self, call: Call, seconds: float, outcome: CallOutcome) -> None:
        """Note a call that has ended."""


class InstrumentTier(AroundTier):
    """Reports the calls of ``inner`` to ``observer``."""

    def __init__(
        self,
        inner: Tier,
        observer: TierObserver,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(inner)
        self._observer = observer
        self._clock_ns = clock_ns

    def around(self, call: Call, step: Callable[[], T]) -> T:
        """Make the call, then report it."""
        started_ns = self._clock_ns()
        outcome = CallOutcome.FAULT
        try:
            result = step()
            outcome = CallOutcome.DONE
        except TierTimeout:
            outcome = CallOutcome.TIMEOUT
            raise
        finally:
            self._observer.observe(call, (self._clock_ns() - started_ns) / 1e9, outcome)
        return result
