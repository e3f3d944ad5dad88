"""How the node does, in a form that any thread may read at any time.

The HTTP server has a thread of its own, so that it answers when the loop does not; what it tells
was noted by the loop a moment ago, and how long ago is part of the answer.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.core.residency import LOWER_TIERS, SLOW_TIERS, TierName
from kvtier.observe.daemon_metrics import BREAKER_STATE, LOOP_SILENT_SECONDS, TIER_STATE, TIER_UP
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import Health, HealthState

__all__ = ["NodeHealth", "told"]

_BEAT_MAX_S = 10.0
"""A loop that has not moved for this long is stuck: its longest step takes a tenth of a second."""

_STALL_MAX_S = 30.0
"""Nor does it do its work where a tier is up, has work queued, and ended nothing for this long:
longer than any transfer may take before its tier counts as out."""

_NOT_ANSWERING = frozenset({HealthState.OUT, HealthState.DETACHED, "off"})


class NodeHealth:
    """Asks ``cpu`` for the CPU tier, and ``slow`` for the others; None: there is no such tier."""

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
        """Why no client can connect; empty if they can. Set on the loop, read from any thread."""
        driver.node.metrics.follow(LOOP_SILENT_SECONDS, self._silent_s)

    def of(self, name: TierName) -> Health | None:
        """Return how a tier does, as the node was told; None where there is no such tier.

        On the loop's thread.
        """
        if name is TierName.CPU:
            return self._cpu()
        return self._slow(name)

    def refresh(self) -> None:
        """Note how everything does, and set the gauges. On the loop's thread, as often as may be.

        That this is called at all shows that the loop moves.
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
        """Return why the process is not alive, or nothing where it is. From any thread."""
        if (silent_s := self._silent_s()) > _BEAT_MAX_S:
            return f"the loop has not moved for {silent_s:.0f} s"
        if self._stalled:
            names = ", ".join(self._stalled)
            return f"{names}: work is queued, and none of it has ended for {_STALL_MAX_S:.0f} s"
        return ""

    def document(self) -> dict[str, Any]:
        """Return state and reason of each tier there is, as noted last. From any thread."""
        return {name: told(health) for name, health in self._tiers.items()}

    def report(self) -> dict[str, Any]:
        """Return the fields of ``/readyz`` besides ``ready``. From any thread."""
        reason = {"reason": self.unreachable} if self.unreachable else {}
        return reason | {"tiers": self.document()}

    def _silent_s(self) -> float:
        return self._clock_s() - self._beat_s


def told(health: Health) -> dict[str, str]:
    """Return a tier's health as part of a document."""
    return {"state": health.state.value, "reason": health.reason}
