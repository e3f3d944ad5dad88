"""Resets the cache: blocks stored before a reset are dropped before anything is loaded again.

vLLM resets a connector's cache when an operator requests it, and before it sleeps or takes other
weights. It continues with or without a daemon, so a reset that the daemon cannot complete at once
stays due. Until it is complete nothing is looked up or stored. A due reset ends with this process,
as does every request that could be served old blocks.
"""

import time
from collections.abc import Callable, Sequence

from kvtier.client import Client
from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log

__all__ = ["CacheReset"]

_log = Log("kvtier.vllm")

_WAIT_S = 1.0
"""Timeout on vLLM's scheduler thread, which it blocks. CPU tier and Redis take milliseconds."""

_RETRY_S = 30.0
"""Timeout on a thread: an SSD overwrites dropped blocks at about 1 GB/s."""

_PAUSE_S = 1.0
"""Pause between two attempts."""


class CacheReset:
    """Resets the key spaces of ``clients``. ``is_due`` may be read by any thread."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self._num_asked = 0
        self._num_done = 0
        self._is_trying = False
        self._next_s = 0.0
        self._is_logged = False

    @property
    def is_due(self) -> bool:
        """Return whether old blocks may be left."""
        return self._num_done < self._num_asked

    def schedule(self) -> None:
        """Make a reset due."""
        self._num_asked += 1

    def begin(self, *, is_quiet: bool) -> None:
        """Try to complete the reset within a second.

        ``is_quiet``: no store that started earlier is running.
        """
        self._try(self._num_asked if is_quiet else 0, _WAIT_S)

    def step(self, submit: Callable[..., object], *, is_quiet: bool) -> None:
        """Start the next attempt on a thread, if it is time and it can complete the reset."""
        if self.is_due and is_quiet and not self._is_trying and time.monotonic() >= self._next_s:
            self._is_trying = True
            try:
                submit(self._retry, self._num_asked)
            except BaseException:  # no thread can be started: the next step tries
                self._is_trying = False
                raise

    def _retry(self, number: int) -> None:
        try:
            self._try(number, _RETRY_S)
        finally:
            self._next_s = time.monotonic() + _PAUSE_S
            self._is_trying = False

    def _try(self, number: int, timeout_s: float) -> None:
        """Clear; success completes resets up to ``number``, 0: none."""
        ends_s = time.monotonic() + timeout_s
        left = "" if number else "a store is running"
        for client in self._clients:
            try:
                left = client.clear(max(0.0, ends_s - time.monotonic())) or left
            except DaemonUnavailable as error:
                left = str(error)
        if not left:
            self._num_done, self._is_logged = max(self._num_done, number), False
            _log.info("the daemon has dropped all of vLLM's blocks")
        elif not self._is_logged:  # log once: a daemon may be away for days
            self._is_logged = True
            event = "no blocks are loaded or stored until the daemon has dropped the rest"
            _log.warning(event, left=left)
