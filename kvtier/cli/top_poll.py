"""What ``kvtier top`` shows: the daemon's last document, and what changed in the time before it.

A thread of its own asks, so that a key is heard and a window redrawn whatever the daemon does.
"""

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvtier.errors import KvtierError, StartError

__all__ = ["Change", "History", "Poller", "View"]

_WINDOW_S = 60.0
"""What is told of the last while: long enough to say something, and short enough to be now."""

_RATE_WINDOW_S = 10.0
"""What rates are taken over, so that they can be read before they jump."""

_KEPT_EVERY_S = 1.0
"""Documents closer together are not kept: a window is then 61 of them, some 10 MB."""

_LATE_S = 2.0
"""A document this much behind its time is called old: that long a call may take, and no longer."""

_STOP_TIMEOUT_S = 0.2
"""A call under way ends by its own deadline, and nothing waits for it."""

_Document = Mapping[str, Any]
"""The status document, or a part of it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A daemon then and now."""

    before: _Document
    after: _Document

    @property
    def seconds(self) -> float:
        """Return the time between the two, by the daemon's clock; 0: they are one and the same."""
        return float(self.after["uptime_s"] - self.before["uptime_s"])

    def of(self, *path: str) -> float:
        """Return by how much a counter grew; one that was not there before was 0.

        A sum over engines may fall when one of them leaves: then it did not grow.
        """
        return max(0.0, _number(self.after, path) - _number(self.before, path))

    def per_second(self, *path: str) -> float:
        """Return how fast a counter grows; 0 as long as nothing can be said."""
        return self.of(*path) / self.seconds if self.seconds > 0 else 0.0

    def counts(self, *path: str) -> dict[str, float]:
        """Return the counters of a group that grow, per second, the fastest first."""
        part: Any = self.after
        for name in path:
            part = part[name]
        rates = {name: self.per_second(*path, name) for name in part}
        return dict(sorted(((n, r) for n, r in rates.items() if r > 0), key=lambda each: -each[1]))


def _number(document: _Document, path: tuple[str, ...]) -> float:
    part: Any = document
    for name in path:
        part = part.get(name) if isinstance(part, Mapping) else None
    return float(part or 0)


class History:
    """The documents of the last minute of one run of the daemon, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[_Document] = deque()
        self._last: _Document | None = None

    def note(self, document: _Document) -> None:
        """Take a document in; those of a daemon that was started anew begin a new history."""
        last = self._last
        if last is not None and (
            last["boot"] != document["boot"] or last["uptime_s"] > document["uptime_s"]
        ):
            self._kept.clear()
        kept_s = self._kept[-1]["uptime_s"] if self._kept else float("-inf")
        if document["uptime_s"] - kept_s >= _KEPT_EVERY_S:
            self._kept.append(document)
        while len(self._kept) > 1 and self._kept[1]["uptime_s"] <= document["uptime_s"] - _WINDOW_S:
            self._kept.popleft()
        self._last = document

    def over(self, seconds: float) -> Change | None:
        """Return what changed in so many seconds, or more where none came just then, or fewer."""
        if self._last is None:
            return None
        since_s = self._last["uptime_s"] - seconds
        older = [each for each in self._kept if each["uptime_s"] <= since_s]
        return Change(older[-1] if older else self._kept[0], self._last)


def _understood(document: _Document) -> _Document:
    """Return it; raises StartError where it is an older daemon's."""
    if "requests" in document:
        return document
    problem = f"the daemon is kvtier {document['version']}, and tells less than this needs"
    raise StartError("kvtier top", problem, "use the kvtier that it came with")


@dataclass(frozen=True, slots=True)
class View:
    """What there is to be shown."""

    minute: Change | None = None
    """None: no document has come yet."""
    lately: Change | None = None
    age_s: float = 0.0
    """Of the document."""
    is_old: bool = False
    """Another one should have come by now."""
    problem: str = ""
    """Why the daemon gave no newer one."""


class Poller:
    """Asks with ``ask`` each ``interval_s`` while it is open; ``wake`` is written to at news."""

    def __init__(
        self,
        ask: Callable[[], str],
        interval_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self.interval_s = interval_s
        self._clock_s = clock_s
        self._history = History()
        self._told_s = clock_s()
        self._problem = ""
        self._fault: Exception | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-top", daemon=True)
        self.news, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def view(self) -> View:
        """Return what is known now; raises what a bug of ours raised on the thread."""
        with self._lock:
            if self._fault is not None:
                raise self._fault
            minute = self._history.over(_WINDOW_S)
            lately = self._history.over(_RATE_WINDOW_S)
            age_s = self._clock_s() - self._told_s
            is_old = age_s > self.interval_s + _LATE_S
            return View(minute, lately, age_s, is_old, self._problem)

    def step(self) -> None:
        """Ask once."""
        asked_s = self._clock_s()
        try:
            document = _understood(json.loads(self._ask()))
        except KvtierError as error:
            with self._lock:
                self._problem = str(error)
        else:
            with self._lock:
                self._history.note(document)
                self._told_s, self._problem = asked_s, ""
        self.wake()

    def wake(self) -> None:
        """Have whoever reads ``news`` look."""
        with contextlib.suppress(OSError):  # it is full, so there is something to be read; or over
            os.write(self._wake, b"!")

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                start_s = self._clock_s()
                self.step()
                self._is_over.wait(max(0.0, start_s + self.interval_s - self._clock_s()))
        except Exception as fault:
            self._fault = fault
            self.wake()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self.news)
            os.close(self._wake)
