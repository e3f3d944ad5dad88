"""What a client has yet to tell its daemon, kept until a thread of its own sends it.

Rules
-----
* Putting something in never waits, and never fails: it is bounded, and what is oldest goes first.
* An announcement is taken back where the lookup of its request comes first: that says the same.
* What only one daemon would understand, requests and decisions, goes with the session.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.identity import HASH_BYTES, BlockHash
from kvtier.core.limits import (
    ANNOUNCED_BYTES_MAX,
    ANNOUNCED_MAX,
    ENDED_REQUESTS_MAX,
    OUTCOMES_MAX,
    STEPS_MAX,
)
from kvtier.core.plan import EngineLoad, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits

__all__ = ["AnnouncedBatch", "Announcement", "MeasuredBatch", "Outbox"]

_CALLS_MAX = 64
"""Calls' worth of announcements that may wait: more come only while the daemon is slow."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A request that has come: ``first`` of its leading blocks the engine has itself."""

    traits: RequestTraits
    tenant: bytes
    hashes: Sequence[BlockHash]
    first: int


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """What one call can announce."""

    requests: list[Announcement] = field(default_factory=list)
    over: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """What was measured since the last report."""

    steps: list[StepSample]
    outcomes: list[PlanOutcome]
    load: EngineLoad | None

    def __bool__(self) -> bool:
        return bool(self.steps or self.outcomes or self.load)


class Outbox:
    """See the module. Any thread may put in and take out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: OrderedDict[int, Announcement] = OrderedDict()
        self._by_id: dict[str, int] = {}
        self._num_announced = 0
        self._over: deque[str] = deque(maxlen=_CALLS_MAX * ENDED_REQUESTS_MAX)
        self._steps: deque[StepSample] = deque(maxlen=STEPS_MAX)
        self._outcomes: deque[PlanOutcome] = deque(maxlen=OUTCOMES_MAX)
        self._load: EngineLoad | None = None
        self._is_closed = False

    def announce(self, requests: Sequence[Announcement], over: Sequence[str]) -> None:
        """Keep what is announced until it is taken."""
        with self._changed:
            for each in requests:
                self._num_announced += 1
                self._requests[self._num_announced] = each
                if each.traits.request_id:
                    self._by_id[each.traits.request_id] = self._num_announced
                if len(self._requests) > _CALLS_MAX * ANNOUNCED_MAX:
                    self._take_first()
            self._over.extend(over)
            self._changed.notify_all()

    def take_back(self, request_id: str) -> None:
        """Forget the announcement of a request, if it still waits."""
        with self._changed:
            number = self._by_id.pop(request_id, 0)
            self._requests.pop(number, None)

    def wait(self) -> bool:
        """Wait until something is announced; False once the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._over or self._is_closed)
            return not self._is_closed

    def take_announced(self) -> AnnouncedBatch:
        """Take as much as one call may announce, the oldest first."""
        said, num_bytes = AnnouncedBatch(), 0
        with self._changed:
            while self._requests and len(said.requests) < ANNOUNCED_MAX:
                first = next(iter(self._requests.values()))
                num_bytes += len(first.hashes) * HASH_BYTES
                if said.requests and num_bytes > ANNOUNCED_BYTES_MAX:
                    break
                said.requests.append(self._take_first())
            # What is over was announced before: it must not be told of first.
            while not self._requests and self._over and len(said.over) < ENDED_REQUESTS_MAX:
                said.over.append(self._over.popleft())
        return said

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Keep what steps took until the next report."""
        with self._changed:
            self._steps.extend(steps)
            self._load = load

    def note_outcome(self, outcome: PlanOutcome) -> None:
        """Keep what came of a plan until the next report."""
        with self._changed:
            self._outcomes.append(outcome)

    def take_measured(self) -> MeasuredBatch:
        """Take everything for a report."""
        with self._changed:
            taken = MeasuredBatch(list(self._steps), list(self._outcomes), self._load)
            self._steps.clear()
            self._outcomes.clear()
            self._load = None
        return taken

    def renew(self) -> None:
        """Forget what only the last daemon would understand."""
        with self._changed:
            self._requests.clear()
            self._by_id.clear()
            self._over.clear()
            self._outcomes.clear()

    def close(self) -> None:
        """Wake who waits, for good."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _take_first(self) -> Announcement:
        number, first = self._requests.popitem(last=False)
        request_id = first.traits.request_id
        if self._by_id.get(request_id) == number:
            del self._by_id[request_id]
        return first
