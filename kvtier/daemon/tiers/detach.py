"""Detaches a tier: the node forgets its blocks, and the tier is closed as soon as possible.

A device that does not answer blocks nothing else: its tier stays open until it answers, and
``hangs`` names the stuck call.
"""

import asyncio

from kvtier.core.limits import ROWS_TOLD_AT_ONCE
from kvtier.core.residency import Residency
from kvtier.errors import KvtierError, TierTimeout
from kvtier.node.messages import events as ev
from kvtier.observe.log import Log
from kvtier.runtime.driver import Driver
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.tiers.base import Tier

__all__ = ["TierDetach", "close"]

_log = Log("kvtier.daemon")

_PAUSE_S = 0.5
"""Time between attempts to close a tier with a stuck call."""

_HELD = (Residency.READY, Residency.UNVERIFIED)

_STOP_S = 1.0
"""Time limit for closing the tier when the daemon stops meanwhile."""


class TierDetach:
    """Closes ``tier``, which the node no longer uses; calls of ``executor`` may still be in flight.

    Its ``place`` must not be used again before ``is_closed``.
    """

    def __init__(
        self, driver: Driver, tier: Tier, executor: TierExecutor | None, place: str
    ) -> None:
        self.name = tier.properties.name
        self.place = place
        self._driver = driver
        self._tier = tier
        self._executor = executor
        self._forgetting = asyncio.create_task(self._forget())
        self._closing = asyncio.create_task(self._close())

    @property
    def is_closed(self) -> bool:
        """Return whether the device is free."""
        return self._closing.done()

    @property
    def hangs(self) -> str:
        """Return the stuck call, if there is one."""
        late = self._executor.late_calls() if self._executor else []
        return f"no answer to a {late[0].name} for {late[0].seconds:.0f} s" if late else ""

    async def forgotten(self) -> None:
        """Wait until the node has forgotten all blocks of the tier."""
        await asyncio.wait({self._forgetting})

    async def closed(self, wait_s: float) -> bool:
        """Wait until the tier is closed and forgotten; False after ``wait_s``."""
        await asyncio.wait({self._forgetting, self._closing}, timeout=wait_s)
        return self.is_closed

    async def stop(self) -> None:
        """Wait a moment for the close, then abandon it: its locks end with the process."""
        await self.closed(_STOP_S)
        tasks = {self._forgetting, self._closing}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _forget(self) -> None:
        """Make the node forget the blocks, in small batches."""
        index, first = self._driver.node.cache.index, 0
        while any(index.num_in(self.name, state) for state in _HELD):
            self._driver.post(ev.ForgetRows(self.name, first, first + ROWS_TOLD_AT_ONCE))
            first += ROWS_TOLD_AT_ONCE
            await asyncio.sleep(0)

    async def _close(self) -> None:
        while not await close(self._tier):
            await asyncio.sleep(_PAUSE_S)
        # Reads in flight still have its files open.
        while self._executor is not None and not self._executor.is_at_rest:
            await asyncio.sleep(_PAUSE_S)
        _log.info("detached tier closed", tier=self.name)


async def close(tier: Tier) -> bool:
    """Close a tier, however long it takes.

    False if it must be retried: a call is stuck in it, or no thread can be started.
    """
    name = tier.properties.name
    try:
        closed = run_in_thread(tier.close, f"kvtier-{name}-close")
    except RuntimeError:
        return False
    try:
        await closed
    except TierTimeout:
        return False
    except (KvtierError, OSError) as error:
        _log.error("error while closing tier", tier=name, error=error)
    return True
