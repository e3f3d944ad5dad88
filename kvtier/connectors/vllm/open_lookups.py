"""The lookups of all requests: when they start, and what is reported to vLLM.

Rules
-----
* A request waits for its turn only briefly; then vLLM may compute it.
* If held blocks are lost before vLLM had room for them, the request is looked up again.
* A daemon that reported an empty key space is not asked until something may have been stored.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvtier.client import Client
from kvtier.connectors.kit.guard import note_fault
from kvtier.connectors.vllm.engine_state import Backlog
from kvtier.connectors.vllm.request import PrefixLookup, TrackedRequest
from kvtier.connectors.vllm.stats import LOOKUP_SECONDS, LOOKUPS, StatCounters
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["OpenLookups"]

_log = Log("kvtier.vllm")

_LOOKUPS_MAX = 2
"""Lookups per request and preemption: a second one if the first, or its load, failed."""

_LOST_MAX = 8
"""Lookups per request not counted because their blocks were lost before vLLM had room for them."""

_OPEN_MAX = 64
"""Lookups running or holding blocks; further requests wait until some of these have ended."""

_TURN_S = 1.0
"""How long a request waits for its lookup to start; then vLLM may compute it."""

_NUM_ASKERS = 16
"""Threads for lookups: most wait for a slow tier, and those of a fast one must not queue behind."""

_LEASE_LEFT_S = 0.25
"""A hit is reported only if its lease lasts this much longer: the copy starts within a step."""


class OpenLookups:
    """At most one lookup per request; it holds its blocks until it is taken or dropped."""

    def __init__(
        self, clients: Sequence[Client], block_tokens: int, backlog: Backlog, counters: StatCounters
    ) -> None:
        self._clients = clients
        self._block_tokens = block_tokens
        self._backlog = backlog
        self._tally = counters
        self._deadlines = clients[0].deadlines
        self._open: dict[str, PrefixLookup] = {}
        self._empty_until_s = 0.0
        """Time on the monotonic clock until which the daemon is known to have nothing."""
        self._stored_s = 0.0
        """When workers last ended stores, on the monotonic clock."""
        self._faults = RateLimitedLog(_log)
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-lookup")

    def __len__(self) -> int:
        return len(self._open)

    def find(self, tracked: TrackedRequest, num_computed: int) -> PrefixLookup | None:
        """Return a request's lookup; an obsolete one is dropped."""
        lookup = self._open.get(tracked.request_id)
        if lookup is not None and self._is_void(tracked, lookup, num_computed):
            self.drop(tracked.request_id)
            return None
        return lookup

    def answer(
        self, tracked: TrackedRequest, lookup: PrefixLookup, num_computed: int
    ) -> int | None:
        """Return how many tokens beyond ``num_computed`` a lookup holds; None: it is running."""
        if not lookup.is_over:
            return None
        tracked.advised_tokens = lookup.max_offload_tokens
        if not lookup.num_blocks:
            if lookup.began_s > self._stored_s:
                self._empty_until_s = lookup.empty_until_s
            return 0
        end = (lookup.first + lookup.num_blocks) * self._block_tokens
        return max(0, min(end, self._load_end(tracked, num_computed)) - num_computed)

    def begin(self, tracked: TrackedRequest, num_computed: int, *, is_quiet: bool) -> int | None:
        """Start a lookup and return None; return 0 if vLLM should compute instead.

        ``is_quiet``: no store is running that could give the daemon something.
        """
        tracked.note_preemptions()
        first = num_computed // self._block_tokens
        end = self._load_end(tracked, num_computed) // self._block_tokens
        if first >= end or tracked.num_lookups >= _LOOKUPS_MAX:
            return 0
        if is_quiet and time.monotonic() < self._empty_until_s:
            self._tally.add(LOOKUPS, not tracked.was_empty, "empty")  # once per request
            tracked.was_empty = True
            return 0
        if len(self._open) >= _OPEN_MAX:
            now_s = time.monotonic()
            tracked.waits_since_s = tracked.waits_since_s or now_s
            return None if now_s < tracked.waits_since_s + _TURN_S else 0
        tracked.waits_since_s = None
        tracked.num_lookups += 1
        lookup = PrefixLookup(
            self._clients,
            tracked.tenant,
            tracked.chains.first(end),
            first,
            tracked.traits,
            self._backlog.load(tracked),
            tracked.traceparent,
        )
        self._open[tracked.request_id] = lookup
        self.submit(self._ask, lookup)
        return None

    def submit(self, call: Callable[..., None], *of: object) -> None:
        """Run ``call(*of)`` on a lookup thread; its exceptions are logged."""
        self._askers.submit(call, *of).add_done_callback(partial(note_fault, self._faults))

    def take(self, request_id: str) -> PrefixLookup | None:
        """Take a request's lookup with the blocks that it holds."""
        return self._open.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Drop a request's lookup and release its blocks."""
        lookup = self.take(request_id)
        if lookup is not None:
            lookup.release()

    def drop_all(self) -> None:
        """Drop all lookups."""
        for request_id in list(self._open):
            self.drop(request_id)

    def note_stored(self, now_s: float) -> None:
        """Record that workers ended stores, so that the daemon may have something."""
        self._stored_s, self._empty_until_s = now_s, 0.0

    def close(self) -> None:
        """Drop all lookups and start no more. Never waits: the threads end with their clients."""
        self.drop_all()
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _ask(self, lookup: PrefixLookup) -> None:
        lookup.run()
        outcome = "failed" if lookup.has_failed else "hit" if lookup.num_blocks else "miss"
        self._tally.add(LOOKUPS, label=outcome)
        self._tally.add(LOOKUP_SECONDS, lookup.took_s)

    def _load_end(self, tracked: TrackedRequest, num_computed: int) -> int:
        """Return the end of what may be loaded, in tokens; the last token is always computed."""
        most = tracked.traits.max_load_tokens
        end = int(tracked.request.num_tokens) - 1
        end = end if most is None else min(end, num_computed + most)
        return end // self._block_tokens * self._block_tokens

    def _is_void(self, tracked: TrackedRequest, lookup: PrefixLookup, num_computed: int) -> bool:
        """Return whether a lookup is obsolete, so that a new one may start."""
        now_s = time.monotonic()
        if not lookup.is_over:
            return now_s > lookup.began_s + self._deadlines.lookup_s + self._deadlines.load_s
        # vLLM has lost blocks of its own that precede the held ones.
        is_behind = num_computed // self._block_tokens < lookup.first
        is_lost = lookup.num_blocks > 0 and now_s > lookup.good_until_s - _LEASE_LEFT_S
        if lookup.num_blocks and (is_behind or is_lost) and tracked.num_lost < _LOST_MAX:
            tracked.num_lost += 1
            tracked.num_lookups -= 1  # it succeeded, but waited for room too long
        return is_behind or is_lost
