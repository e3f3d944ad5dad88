"""Passing on what comes to the tiers and leaves them, over one link after the other."""

import threading
from collections.abc import Callable, Iterable, Sequence

from kvtier.core.residency_change import RESYNC, ResidencyChange

__all__ = ["ChangeForwarder", "OnChanges"]

OnChanges = Callable[[Sequence[ResidencyChange]], None]
"""Takes changes in their order; each link begins, and ends, with ``RESYNC``."""


class ChangeForwarder:
    """Lets ``hear`` know, from one thread at a time; what an old link still says is left out."""

    def __init__(self, hear: OnChanges) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._source: object = None

    def begin(self, source: object) -> None:
        """Listen to one source, and no longer to the one before."""
        with self._lock:
            self._source = source

    def follow(self, source: object, batches: Iterable[Sequence[ResidencyChange]]) -> None:
        """Pass on what a source says until it ends, or is no longer the one listened to."""
        for changes in batches:
            with self._lock:
                if self._source is not source:
                    return
                self._hear(changes)

    def end(self, source: object) -> None:
        """Void all that a source has told, if it is the one listened to: it tells nothing more."""
        with self._lock:
            if self._source is source:
                self._source = None
                self._hear([RESYNC])
