"""A wall between an engine and us: what goes wrong behind it is logged, and the engine goes on."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any, TypeVar, cast

from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["guarded", "note_fault"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def guarded(log: Log, otherwise: Callable[[], object]) -> Callable[[_Hook], _Hook]:
    """Have a hook return ``otherwise()`` where it would raise into the engine."""

    def decorate(hook: _Hook) -> _Hook:
        faults = RateLimitedLog(log)  # a hook is called at every step

        @wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                faults.exception("a hook of the connector failed", hook=hook.__name__)
                return otherwise()

        return cast("_Hook", call)

    return decorate


def note_fault(faults: RateLimitedLog, done: Future[Any]) -> None:
    """Log what a thread's work ended with, which nobody else would ever see."""
    if done.cancelled():
        return
    try:
        done.result()
    except Exception:
        faults.exception("a thread of the connector failed")
