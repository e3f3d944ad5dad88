"""Work that nobody waits for, done again and again, whatever goes wrong in it.

An exception in a step is counted and logged, and the next step comes at its time: a task that dies
unseen is how caches stop evicting and health stops telling the truth.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvtier.errors import KvtierError
from kvtier.observe.daemon_metrics import BACKGROUND_FAULTS
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.observe.metrics import Metrics

__all__ = ["Background", "Step"]

_log = Log("kvtier.daemon")

Step = Callable[[], Awaitable[None]]
"""Something to do once."""


class Background:
    """Tasks on the running loop, supervised."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._warnings = RateLimitedLog(_log)

    def every(self, period_s: float, task: str, step: Step) -> None:
        """Do ``step`` now and again a period after it has ended, until ``stop``.

        ``task`` is its name among the labels of ``BACKGROUND_FAULTS``.
        """
        assert task in dict(BACKGROUND_FAULTS.labels)["task"], f"faults of {task} have a series"
        self._tasks.append(asyncio.create_task(self._repeat(period_s, task, step)))

    async def stop(self) -> None:
        """End every task; a step under way is cancelled."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _repeat(self, period_s: float, task: str, step: Step) -> None:
        while not self._is_stopping:  # a step may have kept the cancellation to itself
            try:
                await step()
            except Exception as error:
                self._metrics.add(BACKGROUND_FAULTS, task=task)
                self._warnings.warning(f"a step of {task} failed", error=_told(error))
            if not self._is_stopping:
                await asyncio.sleep(period_s)


def _told(error: Exception) -> str:
    """Return a fault's own words, or of a bug also what it is and where."""
    if isinstance(error, KvtierError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" in {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    return f"{error!r}{where}"
