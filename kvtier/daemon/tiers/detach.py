"""A tier that leaves: the node forgets what it held, and it is closed as soon as that can be.

A disk that hangs holds up nobody: until it answers, its tier is closed no further, and this says
what hangs.
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
"""Between two looks at a store in which something hangs."""

_HELD = (Residency.READY, Residency.UNVERIFIED)

_STOP_S = 1.0
"""For a store to be closed in order when the daemon stops just then."""


class TierDetach:
    """Of ``tier``, which the node uses no more; ``executor`` may still be at it.

    ``place`` is where its medium is, which is not ours to use again before ``is_closed``.
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
        """Tell whether somebody else may have the medium."""
        return self._closing.done()

    @property
    def hangs(self) -> str:
        """Return which call it is that does not end, if one does not."""
        late = self._executor.late_calls() if self._executor else []
        return f"no answer to a {late[0].name} for {late[0].seconds:.0f} s" if late else ""

    async def forgotten(self) -> None:
        """Wait until the node knows of no block that it held: a moment."""
        await asyncio.wait({self._forgetting})

    async def closed(self, wait_s: float) -> bool:
        """Wait at most so long until it is closed, and forgotten."""
        await asyncio.wait({self._forgetting, self._closing}, timeout=wait_s)
        return self.is_closed

    async def stop(self) -> None:
        """Give it a moment, and leave it as it is: every lock ends with the process."""
        await self.closed(_STOP_S)
        tasks = {self._forgetting, self._closing}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _forget(self) -> None:
        """Have the node forget its blocks, a little at a time."""
        index, first = self._driver.node.cache.index, 0
        while any(index.num_in(self.name, state) for state in _HELD):
            self._driver.post(ev.ForgetRows(self.name, first, first + ROWS_TOLD_AT_ONCE))
            first += ROWS_TOLD_AT_ONCE
            await asyncio.sleep(0)

    async def _close(self) -> None:
        while not await close(self._tier):
            await asyncio.sleep(_PAUSE_S)
        # What still reads from it holds its files open.
        while self._executor is not None and not self._executor.is_at_rest:
            await asyncio.sleep(_PAUSE_S)
        _log.info("a detached tier was closed", tier=self.name)


async def close(tier: Tier) -> bool:
    """Close a tier, however long it takes; False where it has to be tried again.

    Something hangs in it that has to end, or there is no thread to be had.
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
        _log.error("a tier was not closed in order", tier=name, error=error)
    return True
