"""The searches under way: which requests are searched for, when, and what vLLM is told of each.

Rules
-----
* A request waits for its turn, but not for long: then vLLM may compute it.
* What was found and is lost again before vLLM had room for it is searched for anew.
* A daemon that said it has nothing is not asked before something may have been stored.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvtier.client import Client
from kvtier.connectors.kit.guard import note_fault
from kvtier.connectors.vllm.engine_state import Backlog
from kvtier.connectors.vllm.prefix_lookup import PrefixLookup
from kvtier.connectors.vllm.request import TrackedRequest
from kvtier.connectors.vllm.stats import LOOKUP_SECONDS, LOOKUPS, StatCounters
from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["OpenLookups"]

_log = Log("kvtier.vllm")

_SEARCHES_MAX = 2
"""Per request, and anew after a preemption: a second one where the first, or its load, failed."""

_LOST_MAX = 8
"""So often a search whose blocks were lost before vLLM had room for them does not count."""

_OPEN_MAX = 64
"""Under way or held; those of the others begin when some of these are copied, or are over."""

_TURN_S = 1.0
"""As long as a request waits for its turn to be searched for; then vLLM may compute it."""

_NUM_ASKERS = 16
"""They mostly wait for a slow tier, and what lies in a fast one must not stand behind that."""

_LEASE_LEFT_S = 0.25
"""A hit is named only where its lease lasts that much longer: the copy begins within a step."""


class OpenLookups:
    """At most one for a request; each keeps what it found until it is taken, or dropped."""

    def __init__(
        self, clients: Sequence[Client], block_tokens: int, backlog: Backlog, tally: StatCounters
    ) -> None:
        self._clients = clients
        self._block_tokens = block_tokens
        self._backlog = backlog
        self._tally = tally
        self._deadlines = clients[0].deadlines
        self._open: dict[str, PrefixLookup] = {}
        self._empty_until_s = 0.0
        """The daemon is known to have nothing, and need not be asked."""
        self._stored_s = 0.0
        """When workers last were done with stores."""
        self._faults = RateLimitedLog(_log)
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "kvtier-lookup")

    def __len__(self) -> int:
        return len(self._open)

    def find(self, tracked: TrackedRequest, num_computed: int) -> PrefixLookup | None:
        """Return a request's search; one that says nothing any more is dropped."""
        search = self._open.get(tracked.request_id)
        if search is not None and self._is_void(tracked, search, num_computed):
            self.drop(tracked.request_id)
            return None
        return search

    def answer(
        self, tracked: TrackedRequest, search: PrefixLookup, num_computed: int
    ) -> int | None:
        """Return how many tokens beyond ``num_computed`` a search holds; None: it is not over."""
        if not search.is_over:
            return None
        tracked.advised_tokens = search.max_offload_tokens
        if not search.num_blocks:
            if search.began_s > self._stored_s:
                self._empty_until_s = search.empty_until_s
            return 0
        end = (search.first + search.num_blocks) * self._block_tokens
        return max(0, min(end, self._load_end(tracked, num_computed)) - num_computed)

    def begin(self, tracked: TrackedRequest, num_computed: int, *, is_quiet: bool) -> int | None:
        """Begin a search where there is something to gain: None, or 0 where vLLM may compute.

        ``is_quiet``: no store is under way, after which the daemon has something.
        """
        tracked.note_preemptions()
        first = num_computed // self._block_tokens
        end = self._load_end(tracked, num_computed) // self._block_tokens
        if first >= end or tracked.num_searches >= _SEARCHES_MAX:
            return 0
        if is_quiet and time.monotonic() < self._empty_until_s:
            self._tally.add(LOOKUPS, not tracked.was_empty, "empty")  # once, however long it waits
            tracked.was_empty = True
            return 0
        if len(self._open) >= _OPEN_MAX:
            now_s = time.monotonic()
            tracked.waits_since_s = tracked.waits_since_s or now_s
            return None if now_s < tracked.waits_since_s + _TURN_S else 0
        tracked.waits_since_s = None
        tracked.num_searches += 1
        search = PrefixLookup(
            self._clients,
            tracked.tenant,
            tracked.chains.first(end),
            first,
            tracked.traits,
            self._backlog.load(tracked),
            tracked.traceparent,
        )
        self._open[tracked.request_id] = search
        self.submit(self._ask, search)
        return None

    def submit(self, call: Callable[..., None], *of: object) -> None:
        """Have one of the threads that ask the daemon call ``call(*of)``; its fault is logged."""
        self._askers.submit(call, *of).add_done_callback(partial(note_fault, self._faults))

    def take(self, request_id: str) -> PrefixLookup | None:
        """Take a request's search, with what it holds."""
        return self._open.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Let go of a request's search, and of what it holds."""
        search = self.take(request_id)
        if search is not None:
            search.release()

    def drop_all(self) -> None:
        """Let go of every search."""
        for request_id in list(self._open):
            self.drop(request_id)

    def note_stored(self, now_s: float) -> None:
        """Hear that workers are done with stores, so that the daemon may have something."""
        self._stored_s, self._empty_until_s = now_s, 0.0

    def close(self) -> None:
        """Let go of all, and begin nothing more. Never waits: threads end as their clients do."""
        self.drop_all()
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _ask(self, search: PrefixLookup) -> None:
        search.run()
        outcome = "failed" if search.has_failed else "hit" if search.num_blocks else "miss"
        self._tally.add(LOOKUPS, label=outcome)
        self._tally.add(LOOKUP_SECONDS, search.took_s)

    def _load_end(self, tracked: TrackedRequest, num_computed: int) -> int:
        """Return up to which token a request may be loaded: not the last one, that is computed."""
        most = tracked.traits.max_load_tokens
        end = int(tracked.request.num_tokens) - 1
        end = end if most is None else min(end, num_computed + most)
        return end // self._block_tokens * self._block_tokens

    def _is_void(self, tracked: TrackedRequest, search: PrefixLookup, num_computed: int) -> bool:
        """Tell whether a search says nothing any more, and a new one may begin."""
        now_s = time.monotonic()
        if not search.is_over:
            return now_s > search.began_s + self._deadlines.lookup_s + self._deadlines.load_s
        # vLLM has lost blocks of its own meanwhile, and those would lie before what is held.
        is_behind = num_computed // self._block_tokens < search.first
        is_lost = search.num_blocks > 0 and now_s > search.good_until_s - _LEASE_LEFT_S
        if search.num_blocks and (is_behind or is_lost) and tracked.num_lost < _LOST_MAX:
            tracked.num_lost += 1
            tracked.num_searches -= 1  # it found what it was to find, and waited for room too long
        return is_behind or is_lost
