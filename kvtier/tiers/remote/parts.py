"""The parts of one call, one for each server, done at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from kvtier.errors import TierError

__all__ = ["CallParts"]

T = TypeVar("T")


class CallParts:
    """Does them on up to ``num_threads`` threads; from any thread."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "remote-part")

    def run(self, steps: Sequence[Callable[[], T]]) -> list[T | TierError]:
        """Return what the steps return, or the TierErrors they raise; one alone needs no thread.

        None is under way any more, nor will be, when this returns or raises: they touch the memory
        of their caller. Each has to end by itself. Raises TierError where one could not begin.
        """
        if len(steps) < 2:
            return [_attempt(step) for step in steps]
        parts: list[Future[T | TierError]] = [Future() for _ in steps]
        try:
            for part, step in zip(parts, steps, strict=True):
                self._threads.submit(_do, part, step)
        except RuntimeError as error:  # no thread is to be had, or this is closed
            # The pool may have taken in what it found no thread for, and come to it later.
            wait([part for part in parts if not part.cancel()])
            raise TierError(f"remote: not every server can be asked: {error}") from None
        wait(parts)
        return [part.result() for part in parts]

    def close(self) -> None:
        """Begin nothing more; waits for nobody."""
        self._threads.shutdown(wait=False)


def _do(part: "Future[T | TierError]", step: Callable[[], T]) -> None:
    if not part.set_running_or_notify_cancel():
        return  # its call is over
    try:
        part.set_result(_attempt(step))
    except BaseException as error:  # the caller's, whatever it is
        part.set_exception(error)


def _attempt(step: Callable[[], T]) -> T | TierError:
    try:
        return step()
    except TierError as error:
        return error
