"""The chunks of vLLM's requests, and which of them the daemon has.

Used by vLLM's scheduler thread. A name that was not looked up yet is answered ``LATER``; at the end
of the step everything from the first such block on is looked up, on a thread. The answer is valid
as long as the request: if a block is gone by the time it is loaded, the load fails, and the block
is then a miss.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from kvtier.client import Announcement, Client, FoundBlocks
from kvtier.connectors.kit.guard import note_fault
from kvtier.connectors.vllm_tier.chain import ChunkChain
from kvtier.connectors.vllm_tier.transfers import ChunkJob
from kvtier.core.identity import NO_TENANT, BlockHash, chain_root
from kvtier.core.request import RequestTraits
from kvtier.errors import DaemonUnavailable
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["ChunkAnswer", "Names", "PendingChunkLookup", "Requests"]

_log = Log("kvtier.vllm")

_NOTHING_FOUND = FoundBlocks((), "")

_QUEUE_S = 0.75
"""How long a lookup may wait for a thread, in addition to the client's deadline."""


@dataclass(slots=True)
class PendingChunkLookup:
    """A lookup of one request; ``ask`` runs on a thread, ``found`` may be read once ``is_over``."""

    client: Client
    hashes: Sequence[BlockHash]
    first: int
    traits: RequestTraits
    found: FoundBlocks = _NOTHING_FOUND
    asked_s: float = field(default_factory=time.monotonic)
    _is_answered: bool = False

    def ask(self) -> None:
        """Look up. Ends by the client's deadline; without an answer nothing is found."""
        try:
            if not self.is_over:
                self.found = self.client.lookup(NO_TENANT, self.hashes, self.first, self.traits)
        except DaemonUnavailable:
            pass  # already logged; vLLM computes
        finally:
            self._is_answered = True

    @property
    def is_over(self) -> bool:
        """Return whether there is an answer, or the time for it is over."""
        ends_s = self.asked_s + self.client.deadlines.lookup_s + _QUEUE_S
        return self._is_answered or time.monotonic() > ends_s


_NUM_ASKERS = 4

_LOOKUPS_MAX = 2
"""Lookups per request: a second one for what it lacks after vLLM has preempted it."""

_OPEN_LOOKUPS_MAX = 256
"""Lookups running at once; further requests are computed."""

Names = Callable[[int], Sequence[bytes]]
"""Returns a request's known names from a position on, if vLLM has them in order."""


class ChunkAnswer(Enum):
    """Whether to load a chunk."""

    HIT = auto()
    MISS = auto()
    LATER = auto()


@dataclass(slots=True)
class _Tracked:
    traits: RequestTraits
    chain: ChunkChain
    names: Names
    wanted: set[bytes] = field(default_factory=set)
    lookup: PendingChunkLookup | None = None
    num_lookups: int = 0
    answered: range = range(0)
    """The positions that the last answer covers."""
    found_end: int = 0
    """The end of the found blocks to load; the rest of ``answered`` is a miss."""
    found: FoundBlocks = _NOTHING_FOUND
    is_known: bool = False
    """Whether the daemon knows the request."""

    def learn(self) -> None:
        self.chain.extend(self.names(len(self.chain)))

    def take_answer(self) -> None:
        lookup = self.lookup
        if lookup is None or not lookup.is_over:
            return
        self.lookup = None
        self.answered = range(lookup.first, len(lookup.hashes))
        self.found_end = lookup.first + lookup.found.num_planned
        self.found = lookup.found

    def answer(self, name: bytes) -> ChunkAnswer | None:
        place = self.chain.place(name)
        if place is None or place not in self.answered:
            return None
        return ChunkAnswer.HIT if place < self.found_end else ChunkAnswer.MISS


class Requests:
    """Tracks all requests; uses a client, which it does not close."""

    def __init__(self, client: Client, key_space: bytes) -> None:
        self._client = client
        self._root = chain_root(key_space, NO_TENANT)
        self._tracked: dict[str, _Tracked] = {}
        self._asking: set[str] = set()
        self._unknown: set[str] = set()
        self._lookups: list[PendingChunkLookup] = []
        self._faults = RateLimitedLog(_log)
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-ask")

    def add(self, request_id: str, traits: RequestTraits, names: Names) -> None:
        """Track a request. ``traits`` lacks its id if no message can carry it."""
        self._tracked[request_id] = _Tracked(traits, ChunkChain(self._root), names)
        self._unknown.add(request_id)

    def learn(self, request_id: str, names: Collection[bytes]) -> None:
        """Add all names of a request, for releases of vLLM that report them."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.chain.learn(names)

    def ask(self, request_id: str, name: bytes) -> ChunkAnswer:
        """Return whether to load a chunk. Never waits."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not self._client.is_attached:
            return ChunkAnswer.MISS
        tracked.take_answer()
        answer = tracked.answer(name)
        if answer is not None:
            return answer
        if tracked.lookup is None and tracked.num_lookups >= _LOOKUPS_MAX:
            return ChunkAnswer.MISS
        tracked.wanted.add(name)
        self._asking.add(request_id)
        return ChunkAnswer.LATER

    def end_step(self) -> None:
        """Start the lookups that this step needs, and announce the other new requests."""
        self._lookups = [each for each in self._lookups if not each.is_over]
        asking, self._asking = self._asking, set()
        for request_id in asking:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.lookup is None:
                self._begin(tracked)
        self._announce()

    def order(self, job: int, request_id: str, chunks: Iterable[tuple[bytes, int]]) -> ChunkJob:
        """Return the blocks of a request's job; empty if the names are unknown."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return ChunkJob(job, request_id)
        tracked.learn()
        runs = tracked.chain.runs(chunks)
        end = runs[-1].first + len(runs[-1].names) if runs else 0
        hashes = tuple(tracked.chain.hashes[:end])
        return ChunkJob(job, request_id, tracked.traits, hashes, runs, tracked.found)

    def forget(self, request_id: str, names: Iterable[bytes]) -> None:
        """Record that chunks were not loaded: from the first of them on all are misses."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            places = [tracked.chain.place(name) for name in names]
            found = [place for place in places if place is not None]
            tracked.found_end = min([*found, tracked.found_end])

    def finish(self, request_id: str) -> None:
        """Stop tracking a request."""
        tracked = self._tracked.pop(request_id, None)
        self._unknown.discard(request_id)
        self._asking.discard(request_id)
        if tracked is not None and tracked.is_known and tracked.traits.request_id:
            self._client.announce((), (tracked.traits.request_id,))

    def close(self) -> None:
        """Start no more lookups."""
        self._tracked.clear()
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _begin(self, tracked: _Tracked) -> None:
        tracked.learn()
        places = [tracked.chain.place(name) for name in tracked.wanted]
        known = [place for place in places if place is not None]
        tracked.wanted.clear()
        tracked.num_lookups += 1
        if not known or len(self._lookups) >= _OPEN_LOOKUPS_MAX:
            tracked.num_lookups = _LOOKUPS_MAX
            return
        lookup = PendingChunkLookup(
            self._client, tuple(tracked.chain.hashes), min(known), tracked.traits
        )
        tracked.lookup = lookup
        tracked.is_known = True
        self._lookups.append(lookup)
        self._askers.submit(lookup.ask).add_done_callback(partial(note_fault, self._faults))

    def _announce(self) -> None:
        """Announce requests that lack nothing, so that the daemon counts their uses."""
        announced: list[Announcement] = []
        for request_id in list(self._unknown):
            tracked = self._tracked[request_id]
            if not tracked.is_known:
                tracked.learn()
                if not len(tracked.chain):
                    continue
                hashes = tuple(tracked.chain.hashes)
                announced.append(Announcement(tracked.traits, NO_TENANT, hashes, len(hashes)))
                tracked.is_known = True
            self._unknown.discard(request_id)
        if announced:
            self._client.announce(announced)
