"""Closes resources on shutdown in reverse order of opening, each within the remaining time."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from kvtier.daemon.stop import Stop
from kvtier.errors import KvtierError
from kvtier.observe.log import Log

__all__ = ["ClosingStack", "Step"]

_log = Log("kvtier.daemon")

_LEAST_S = 0.05
"""Time for a step when none is left: enough to release resources that are not stuck."""

Step = Callable[[], Awaitable[object] | None]
"""Closes one resource."""


class ClosingStack:
    """Steps to run on leaving the context; a failing or stuck step does not block the others."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._steps: list[tuple[str, Step, float]] = []

    def add(self, stage: str, step: Step, *, most_s: float = float("inf")) -> None:
        """Add a step, which may be a coroutine; after ``most_s`` it is cancelled, or abandoned.

        ``stage`` describes it in logs.
        """
        self._steps.append((stage, step, most_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        while self._steps:
            stage, step, most_s = self._steps.pop()
            self._stop.stage = stage
            started_s = time.monotonic()
            try:
                awaited = step()
                if inspect.isawaitable(awaited):
                    await _wait_for(awaited, max(_LEAST_S, min(most_s, self._stop.left_s)))
            except TimeoutError:
                seconds = f"{time.monotonic() - started_s:.1f}"
                _log.warning("component did not close in time", stage=stage, seconds=seconds)
            except (KvtierError, OSError) as error:
                _log.error("component failed to close", stage=stage, error=error)
            except Exception:  # the others are closed all the same
                _log.exception("component failed during shutdown", stage=stage)


async def _wait_for(awaited: Awaitable[object], left_s: float) -> None:
    """Wait for a step. Raises TimeoutError in time even if the step ignores the cancellation."""
    task = asyncio.ensure_future(awaited)
    await asyncio.wait([task], timeout=left_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_LEAST_S)
        raise TimeoutError
    if task.cancelled():
        raise KvtierError("it was cancelled")
    task.result()
