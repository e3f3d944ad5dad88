"""Health of the node, readable from any thread.

The HTTP server runs on a thread of its own, so that it answers even if the loop is stuck. It
reports what the loop recorded last, and how long ago that was.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, TierName
from kvtier.observe.daemon_metrics import BREAKER_STATE, LOOP_SILENT_SECONDS, TIER_STATE, TIER_UP
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import Health, HealthState

__all__ = ["NodeHealth", "describe_health"]

_BEAT_MAX_S = 10.0
"""Without progress for this time, the loop is stuck: its longest step takes a tenth of a second."""

_STALL_MAX_S = 30.0
"""The node is also stuck if a tier is up and has work queued, but has finished nothing for this
time: longer than any transfer may take before its tier is out."""

_NOT_ANSWERING = frozenset({HealthState.OUT, HealthState.DETACHED, "off"})


class NodeHealth:
    """Collects the health of the CPU tier from ``cpu``, and of slow tiers from ``slow``."""

    def __init__(
        self,
        driver: Driver,
        cpu: Callable[[], Health],
        slow: Callable[[TierName], Health | None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._cpu = cpu
        self._slow = slow
        self._clock_s = clock_s
        self._beat_s = clock_s()
        self._stalled: tuple[TierName, ...] = ()
        self._tiers: Mapping[TierName, Health] = {}
        self.unreachable = ""
        """Why clients cannot connect; empty if they can. Set on the loop, read from any thread."""
        driver.node.metrics.follow(LOOP_SILENT_SECONDS, self._silent_s)

    def of(self, name: TierName) -> Health | None:
        """Return the health of a tier; None if it is off.

        On the loop's thread.
        """
        if name is TierName.CPU:
            return self._cpu()
        return self._slow(name)

    def refresh(self) -> None:
        """Record the health of all tiers, and set the gauges. On the loop's thread.

        Each call also shows that the loop is alive.
        """
        self._beat_s = self._clock_s()
        self._stalled = tuple(self._driver.stalled(_STALL_MAX_S))
        found = {name: self.of(name) for name in LOWER_TIERS}
        self._tiers = {name: health for name, health in found.items() if health is not None}
        metrics = self._driver.node.metrics
        for name in LOWER_TIERS:
            state = self._tiers[name].state if name in self._tiers else "off"
            metrics.set_one(TIER_STATE, "state", state, tier=name)
            metrics.set(TIER_UP, state not in _NOT_ANSWERING, tier=name)
        for name in SLOW_TIERS:
            tier = self._driver.tiers.get(name)
            metrics.set_one(BREAKER_STATE, "state", tier.state if tier else None, tier=name)

    def complaint(self) -> str:
        """Return why the process counts as stuck, or an empty text. From any thread."""
        if (silent_s := self._silent_s()) > _BEAT_MAX_S:
            return f"the event loop has been stuck for {silent_s:.0f} s"
        if self._stalled:
            names = ", ".join(self._stalled)
            return f"{names}: no queued work has finished for {_STALL_MAX_S:.0f} s"
        return ""

    def document(self) -> dict[str, Any]:
        """Return the last recorded state and reason of each tier. From any thread."""
        return {name: describe_health(health) for name, health in self._tiers.items()}

    def report(self) -> dict[str, Any]:
        """Return the fields of ``/readyz`` besides ``ready``. From any thread."""
        reason = {"reason": self.unreachable} if self.unreachable else {}
        return reason | {"tiers": self.document()}

    def _silent_s(self) -> float:
        return self._clock_s() - self._beat_s


def describe_health(health: Health) -> dict[str, str]:
    """Return a tier's health as JSON values."""
    return {"state": health.state.value, "reason": health.reason}
