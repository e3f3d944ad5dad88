"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence

__all__ = ["StopFinder"]


class StopFinder:
    """Cut a text before the first stop string that it completes, however it is split.

    The stop that ends first wins, and of those the longest: what a reader of single characters
    would see. Text that could still become a stop is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Take more text and return what cannot be part of a stop any more."""
        assert not self.is_found, "no text counts after a stop"
        text = self._held + text
        start = self._first_stop(text)
        if start is not None:
            self.is_found = True
            self._held = ""
            return text[:start]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back: no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_stop(self, text: str) -> int | None:
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Return how many last characters of ``text`` are the first ones of ``stop``, at most."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
