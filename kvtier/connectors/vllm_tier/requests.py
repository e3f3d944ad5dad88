"""What vLLM's requests are made of, and what the daemon has of them.

Belongs to vLLM's scheduling thread. A name that was not asked of the daemon yet is answered
``LATER``; at the end of the step the daemon is asked, on a thread, about everything from the first
such block on. Its answer holds for as long as the request does: what is gone by the time it is
loaded is a load that fails, and is then a miss.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from kvtier.client import Announcement, Client
from kvtier.connectors.kit.guard import note_fault
from kvtier.connectors.vllm_tier.chain import ChunkChain
from kvtier.connectors.vllm_tier.transfers import ChunkJob
from kvtier.core.identity import NO_TENANT, BlockHash, chain_root
from kvtier.core.request import RequestTraits
from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["ChunkAnswer", "Names", "PendingChunkLookup", "Requests"]

_log = Log("kvtier.vllm")

_WAIT_SHARE = 1.2
_WAIT_MARGIN_S = 0.05
"""The daemon ends a load by its plan, and we do so a fifth and this much later."""

_QUEUE_S = 0.75
"""A lookup has a deadline of the client's; this much more may pass until its turn has come."""


@dataclass(slots=True)
class PendingChunkLookup:
    """``ask`` runs on a thread; all else may be read once ``is_over``."""

    client: Client
    hashes: Sequence[BlockHash]
    first: int
    traits: RequestTraits
    num_found: int = 0
    """Blocks from ``first`` on that the daemon has and advises to load."""
    decision: int = 0
    wait_s: float = 0.0
    asked_s: float = field(default_factory=time.monotonic)
    _is_answered: bool = False

    def ask(self) -> None:
        """Ask; ends by the client's deadline, and without an answer nothing is found."""
        try:
            if not self.is_over:
                self._ask()
        except DaemonUnavailable:
            pass  # the client has said so, and vLLM computes
        finally:
            self._is_answered = True

    @property
    def is_over(self) -> bool:
        """Tell whether there is an answer, or its time is up."""
        ends_s = self.asked_s + self.client.deadlines.lookup_s + _QUEUE_S
        return self._is_answered or time.monotonic() > ends_s

    def _ask(self) -> None:
        found = self.client.lookup(NO_TENANT, self.hashes, self.first, self.traits)
        num_found, wait_s = len(found.tiers), self.client.deadlines.load_s
        if found.plan is not None:
            num_found = min(num_found, found.plan.num_blocks)
            self.decision = found.plan.decision
            if found.plan.wait_ns:
                wait_s = min(wait_s, _WAIT_SHARE * found.plan.wait_ns / 1e9 + _WAIT_MARGIN_S)
        self.wait_s = wait_s
        self.num_found = num_found


_NUM_ASKERS = 4

_QUESTIONS_MAX = 2
"""Of one request: one more for what it lacks after vLLM has preempted it."""

_OPEN_QUESTIONS_MAX = 256
"""At once; a request that finds so many before it is computed."""

Names = Callable[[int], Sequence[bytes]]
"""Returns a request's names from a place on, as many as are known, where vLLM has them in order."""


class ChunkAnswer(Enum):
    """Whether a chunk should be loaded."""

    HIT = auto()
    MISS = auto()
    LATER = auto()


@dataclass(slots=True)
class _Tracked:
    traits: RequestTraits
    chain: ChunkChain
    names: Names
    wanted: set[bytes] = field(default_factory=set)
    question: PendingChunkLookup | None = None
    num_questions: int = 0
    answered: range = range(0)
    """The places that an answer was for."""
    found_end: int = 0
    """Of these, where what is there ends."""
    decision: int = 0
    wait_s: float = 0.0
    is_known: bool = False
    """The daemon has heard of the request."""

    def hear(self) -> None:
        self.chain.extend(self.names(len(self.chain)))

    def take_answer(self) -> None:
        question = self.question
        if question is None or not question.is_over:
            return
        self.question = None
        self.answered = range(question.first, len(question.hashes))
        self.found_end = question.first + question.num_found
        self.decision, self.wait_s = question.decision, question.wait_s

    def answer(self, name: bytes) -> ChunkAnswer | None:
        place = self.chain.place(name)
        if place is None or place not in self.answered:
            return None
        return ChunkAnswer.HIT if place < self.found_end else ChunkAnswer.MISS


class Requests:
    """Uses a client, which it does not close."""

    def __init__(self, client: Client, key_space: bytes) -> None:
        self._client = client
        self._root = chain_root(key_space, NO_TENANT)
        self._tracked: dict[str, _Tracked] = {}
        self._asking: set[str] = set()
        self._unknown: set[str] = set()
        self._questions: list[PendingChunkLookup] = []
        self._faults = RateLimitedLog(_log)
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-ask")

    def add(self, request_id: str, traits: RequestTraits, names: Names) -> None:
        """Hear of a request. In ``traits`` its id may be missing, where no message can carry it."""
        self._tracked[request_id] = _Tracked(traits, ChunkChain(self._root), names)
        self._unknown.add(request_id)

    def hear(self, request_id: str, names: Collection[bytes]) -> None:
        """Take all names of a request, where vLLM tells them."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.chain.hear(names)

    def ask(self, request_id: str, name: bytes) -> ChunkAnswer:
        """Tell what is known of a chunk. Waits for nothing."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not self._client.is_attached:
            return ChunkAnswer.MISS
        tracked.take_answer()
        answer = tracked.answer(name)
        if answer is not None:
            return answer
        if tracked.question is None and tracked.num_questions >= _QUESTIONS_MAX:
            return ChunkAnswer.MISS
        tracked.wanted.add(name)
        self._asking.add(request_id)
        return ChunkAnswer.LATER

    def end_step(self) -> None:
        """Ask the daemon what this step wanted to know, and tell it of the other new requests."""
        self._questions = [each for each in self._questions if not each.is_over]
        asking, self._asking = self._asking, set()
        for request_id in asking:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.question is None:
                self._begin(tracked)
        self._announce()

    def order(self, job: int, request_id: str, chunks: Iterable[tuple[bytes, int]]) -> ChunkJob:
        """Return what a job of a request is about; it is empty where the names are unknown."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return ChunkJob(job, request_id)
        tracked.hear()
        runs = tracked.chain.runs(chunks)
        end = runs[-1].first + len(runs[-1].names) if runs else 0
        hashes = tuple(tracked.chain.hashes[:end])
        return ChunkJob(
            job, request_id, tracked.traits, hashes, runs, tracked.decision, tracked.wait_s
        )

    def forget(self, request_id: str, names: Iterable[bytes]) -> None:
        """Note that chunks did not come: from the first of them on the request has none."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            places = [tracked.chain.place(name) for name in names]
            found = [place for place in places if place is not None]
            tracked.found_end = min([*found, tracked.found_end])

    def finish(self, request_id: str) -> None:
        """Let go of a request."""
        tracked = self._tracked.pop(request_id, None)
        self._unknown.discard(request_id)
        self._asking.discard(request_id)
        if tracked is not None and tracked.is_known and tracked.traits.request_id:
            self._client.announce((), (tracked.traits.request_id,))

    def close(self) -> None:
        """Ask nothing any more."""
        self._tracked.clear()
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _begin(self, tracked: _Tracked) -> None:
        tracked.hear()
        places = [tracked.chain.place(name) for name in tracked.wanted]
        known = [place for place in places if place is not None]
        tracked.wanted.clear()
        tracked.num_questions += 1
        if not known or len(self._questions) >= _OPEN_QUESTIONS_MAX:
            tracked.num_questions = _QUESTIONS_MAX
            return
        question = PendingChunkLookup(
            self._client, tuple(tracked.chain.hashes), min(known), tracked.traits
        )
        tracked.question = question
        tracked.is_known = True
        self._questions.append(question)
        self._askers.submit(question.ask).add_done_callback(partial(note_fault, self._faults))

    def _announce(self) -> None:
        """Tell of requests that lack nothing, by which the daemon counts uses as well."""
        announced: list[Announcement] = []
        for request_id in list(self._unknown):
            tracked = self._tracked[request_id]
            if not tracked.is_known:
                tracked.hear()
                if not len(tracked.chain):
                    continue
                hashes = tuple(tracked.chain.hashes)
                announced.append(Announcement(tracked.traits, NO_TENANT, hashes, len(hashes)))
                tracked.is_known = True
            self._unknown.discard(request_id)
        if announced:
            self._client.announce(announced)
