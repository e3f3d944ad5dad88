"""Queues of a client's announcements and measurements, which its threads send to the daemon.

Rules
-----
* Adding never waits and never fails: the queues are bounded, and the oldest entries are dropped.
* An announcement is withdrawn if its request is looked up first, which announces it as well.
* Entries valid for one daemon only (requests and decisions) are dropped with the session.
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
"""Limit of queued announcements, in calls; more accumulate only while the daemon is slow."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A new request; the engine itself has its ``first`` leading blocks."""

    traits: RequestTraits
    tenant: bytes
    hashes: Sequence[BlockHash]
    first: int


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """New requests and the ids of finished ones, as many as fit into one call."""

    requests: list[Announcement] = field(default_factory=list)
    over: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """Measurements since the last report."""

    steps: list[StepSample]
    outcomes: list[PlanOutcome]
    load: EngineLoad | None

    def __bool__(self) -> bool:
        return bool(self.steps or self.outcomes or self.load)


class Outbox:
    """Bounded queues of announcements and measurements. Thread-safe."""

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
        """Queue new requests and the ids of finished ones."""
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

    def withdraw(self, request_id: str) -> None:
        """Drop the announcement of a request if it is still queued."""
        with self._changed:
            number = self._by_id.pop(request_id, 0)
            self._requests.pop(number, None)

    def wait(self) -> bool:
        """Wait until something is announced; False once the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._over or self._is_closed)
            return not self._is_closed

    def take_announced(self) -> AnnouncedBatch:
        """Take as much as fits into one call, oldest first."""
        batch, num_bytes = AnnouncedBatch(), 0
        with self._changed:
            while self._requests and len(batch.requests) < ANNOUNCED_MAX:
                first = next(iter(self._requests.values()))
                num_bytes += len(first.hashes) * HASH_BYTES
                if batch.requests and num_bytes > ANNOUNCED_BYTES_MAX:
                    break
                batch.requests.append(self._take_first())
            # A finished request was announced before: its end must not be sent first.
            while not self._requests and self._over and len(batch.over) < ENDED_REQUESTS_MAX:
                batch.over.append(self._over.popleft())
        return batch

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Queue step durations and the current load."""
        with self._changed:
            self._steps.extend(steps)
            self._load = load

    def note_outcome(self, outcome: PlanOutcome) -> None:
        """Queue the outcome of a plan."""
        with self._changed:
            self._outcomes.append(outcome)

    def take_measured(self) -> MeasuredBatch:
        """Take the measurements for the next report."""
        with self._changed:
            taken = MeasuredBatch(list(self._steps), list(self._outcomes), self._load)
            self._steps.clear()
            self._outcomes.clear()
            self._load = None
        return taken

    def begin_session(self) -> None:
        """Drop entries that are valid for the previous daemon only."""
        with self._changed:
            self._requests.clear()
            self._by_id.clear()
            self._over.clear()
            self._outcomes.clear()

    def close(self) -> None:
        """Wake all waiting threads for good."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _take_first(self) -> Announcement:
        number, first = self._requests.popitem(last=False)
        request_id = first.traits.request_id
        if self._by_id.get(request_id) == number:
            del self._by_id[request_id]
        return first
