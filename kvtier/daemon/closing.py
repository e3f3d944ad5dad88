"""What is to be closed at the end: last opened, first closed, each within the time that is left."""

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
"""What a step gets when the time is over: enough to let go of what does not hang."""

Step = Callable[[], Awaitable[object] | None]
"""Closes something."""


class ClosingStack:
    """Steps to take on leaving the context; one that fails or hangs does not keep the others."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._steps: list[tuple[str, Step, float]] = []

    def add(self, stage: str, step: Step, *, most_s: float = float("inf")) -> None:
        """Take ``step``, which may be awaited, for ``most_s`` at most; ``stage`` says what it is.

        What it waits for beyond that is cancelled, or left to itself.
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
                    await _ended(awaited, max(_LEAST_S, min(most_s, self._stop.left_s)))
            except TimeoutError:
                seconds = f"{time.monotonic() - started_s:.1f}"
                _log.warning("a part did not end in time", stage=stage, seconds=seconds)
            except (KvtierError, OSError) as error:
                _log.error("a part did not end well", stage=stage, error=error)
            except Exception:  # a bug in one is no reason to leave the others open
                _log.exception("a part broke as it was to end", stage=stage)


async def _ended(awaited: Awaitable[object], left_s: float) -> None:
    """Wait for what a step waits for. Raises TimeoutError, even where it will not be cancelled."""
    task = asyncio.ensure_future(awaited)
    await asyncio.wait([task], timeout=left_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_LEAST_S)
        raise TimeoutError
    if task.cancelled():
        raise KvtierError("what it waited for was cancelled")
    task.result()
