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

__all__ = ["Clearing"]

_log = Log("kvtier.vllm")

_WAIT_S = 1.0
"""In vLLM's scheduler, which does nothing else meanwhile. CPU tier and Redis take milliseconds."""

_RETRY_S = 30.0
"""On a thread: an SSD overwrites what it forgets, a gigabyte or so a second."""

_PAUSE_S = 1.0
"""Between two tries."""


class Clearing:
    """Of the key spaces of some clients. ``is_due`` may be read by any thread."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self._num_asked = 0
        self._num_done = 0
        self._is_trying = False
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        """Tell whether there may still be something to be forgotten."""
        return self._num_done < self._num_asked

    def begin(self, *, is_quiet: bool) -> None:
        """Clear now, within a second; what that leaves is promised.

        ``is_quiet``: no store is under way that began before.
        """
        self._num_asked += 1
        self._try(self._num_asked if is_quiet else 0, _WAIT_S)
        if self.is_due:
            _log.warning("nothing is loaded from the daemon, or offered, until it has forgotten")

    def step(self, submit: Callable[..., object], *, is_quiet: bool) -> None:
        """Have the next try made on a thread, if one is due and can end it."""
        if self.is_due and is_quiet and not self._is_trying and time.monotonic() >= self._next_s:
            self._is_trying = True
            submit(self._retry, self._num_asked)

    def _retry(self, number: int) -> None:
        try:
            self._try(number, _RETRY_S)
        finally:
            self._next_s = time.monotonic() + _PAUSE_S
            self._is_trying = False

    def _try(self, number: int, timeout_s: float) -> None:
        """Clear, and note it as the end of reset ``number`` and all before it."""
        ends_s = time.monotonic() + timeout_s
        left = ""
        for client in self._clients:
            try:
                left = client.clear(max(0.0, ends_s - time.monotonic())) or left
            except DaemonUnavailable as error:
                left = str(error)
        if left:
            _log.warning("the daemon has not forgotten all of vLLM's blocks", left=left)
        elif number:
            self._num_done = max(self._num_done, number)
            _log.info("the daemon has forgotten all of vLLM's blocks")
