"""Runs periodic tasks that survive their errors.

An exception in a step is counted and logged, and the next step runs on schedule: a task that dies
unnoticed makes caches stop evicting and health checks report stale values.
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
"""One run of a periodic task."""


class Background:
    """Supervised periodic tasks on the running loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._warnings = RateLimitedLog(_log)

    def every(self, period_s: float, task: str, step: Step) -> None:
        """Run ``step`` now, and again a period after each end, until ``stop``.

        ``task`` is its label value in ``BACKGROUND_FAULTS``.
        """
        assert task in dict(BACKGROUND_FAULTS.labels)["task"], f"faults of {task} have a series"
        self._tasks.append(asyncio.create_task(self._repeat(period_s, task, step)))

    async def stop(self) -> None:
        """Stop all tasks; running steps are cancelled."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _repeat(self, period_s: float, task: str, step: Step) -> None:
        while not self._is_stopping:  # a step may have swallowed the cancellation
            try:
                await step()
            except Exception as error:
                self._metrics.add(BACKGROUND_FAULTS, task=task)
                self._warnings.warning(f"background task {task} failed", error=_describe(error))
            if not self._is_stopping:
                await asyncio.sleep(period_s)


def _describe(error: Exception) -> str:
    """Return the message of an error; if it is a bug, with its type and place."""
    if isinstance(error, KvtierError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" in {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    return f"{error!r}{where}"
