"""Clearing: what vLLM wants forgotten is gone before anything is found again.

vLLM resets a connector's cache when an operator asks for it, and before it sleeps or takes other
weights. It has to go on whether the daemon is there or not, so a reset that the daemon cannot do at
once is promised: until it is done nothing is looked up and nothing offered. The promise is this
process's; with it ends whoever could be served something old.
"""

import time
from collections.abc import Callable, Sequence

from kvtier.client import Client
from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log

__all__ = ["CacheReset"]

_log = Log("kvtier.vllm")

_WAIT_S = 1.0
"""In vLLM's scheduler, which does nothing else meanwhile. CPU tier and Redis take milliseconds."""

_RETRY_S = 30.0
"""On a thread: an SSD overwrites what it forgets, a gigabyte or so a second."""

_PAUSE_S = 1.0
"""Between two tries."""


class CacheReset:
    """Of the key spaces of some clients. ``is_due`` may be read by any thread."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self._num_asked = 0
        self._num_done = 0
        self._is_trying = False
        self._next_s = 0.0
        self._is_told = False

    @property
    def is_due(self) -> bool:
        """Tell whether there may still be something to be forgotten."""
        return self._num_done < self._num_asked

    def promise(self) -> None:
        """Have it that there is something to be forgotten, whatever comes of it now."""
        self._num_asked += 1

    def begin(self, *, is_quiet: bool) -> None:
        """Keep the promise now, if that takes no more than a second.

        ``is_quiet``: no store is under way that began before.
        """
        self._try(self._num_asked if is_quiet else 0, _WAIT_S)

    def step(self, submit: Callable[..., object], *, is_quiet: bool) -> None:
        """Have the next try made on a thread, if one is due and can end it."""
        if self.is_due and is_quiet and not self._is_trying and time.monotonic() >= self._next_s:
            self._is_trying = True
            try:
                submit(self._retry, self._num_asked)
            except BaseException:  # no thread is to be had: the next step tries
                self._is_trying = False
                raise

    def _retry(self, number: int) -> None:
        try:
            self._try(number, _RETRY_S)
        finally:
            self._next_s = time.monotonic() + _PAUSE_S
            self._is_trying = False

    def _try(self, number: int, timeout_s: float) -> None:
        """Clear, and note it as the end of reset ``number`` and all before it; 0: of none."""
        ends_s = time.monotonic() + timeout_s
        left = "" if number else "a store is under way"
        for client in self._clients:
            try:
                left = client.clear(max(0.0, ends_s - time.monotonic())) or left
            except DaemonUnavailable as error:
                left = str(error)
        if not left:
            self._num_done, self._is_told = max(self._num_done, number), False
            _log.info("the daemon has forgotten all of vLLM's blocks")
        elif not self._is_told:  # once: a daemon may be away for days
            self._is_told = True
            event = "nothing is loaded from the daemon, or offered, until it has forgotten the rest"
            _log.warning(event, left=left)
