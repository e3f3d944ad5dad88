"""Look-ahead: what is known to be wanted is kept in the CPU tier, or brought there beforehand.

Requests are announced while they wait, operators pin chains and warm them, and requests may say
what they are to be kept for. ``Retention`` keeps, ``Warming`` brings.
"""

from collections.abc import Callable

from kvtier.core.identity import split_hashes
from kvtier.core.index import Scope
from kvtier.core.limits import CLAIMS_MAX
from kvtier.core.planner import Planner
from kvtier.core.reuse.history import History, Use
from kvtier.core.table import as_keys
from kvtier.node.action import Retained, Warmed
from kvtier.node.cache import Cache
from kvtier.node.event import Pin, Warm
from kvtier.node.retention import Retention
from kvtier.node.run import Chain, Run
from kvtier.node.transfer import Transfers
from kvtier.node.warming import Warming
from kvtier.node.writes import Writes

__all__ = ["Lookahead"]

_Find = Callable[[Chain, int, int], Run]
"""Returns what could be loaded of a chain, from a block on, at a time."""


class Lookahead:
    """Answers pins and warms, and acts on what requests say of themselves."""

    def __init__(
        self,
        cache: Cache,
        transfers: Transfers,
        writes: Writes,
        find: _Find,
        *,
        pin_share: float = 0.0,
        history: History | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.retention = Retention(cache, pin_share)
        self.warming = Warming(cache, transfers, history)
        self._cache = cache
        self._writes = writes
        self._find = find
        self._planner = planner
        self._waiting: dict[tuple[str, str], tuple[Chain, int, int]] = {}
        """Announced requests of which not all could be brought yet: from where to where."""
        cache.is_kept = self.retention.is_kept
        cache.give_way = self.retention.give_way

    def pin(self, event: Pin, now_ns: int) -> Retained:
        """Keep a chain for as long as an operator says, or no longer."""
        payload_bytes = self._payload_bytes(event.key_space, event.hashes)
        if not payload_bytes:
            return Retained(0, "unknown")
        keys = split_hashes(event.hashes)
        return self.retention.pin(keys, payload_bytes, event.ttl_ns, now_ns)

    def warm(self, event: Warm, now_ns: int) -> Warmed:
        """Bring a chain into the CPU tier, as far as slower tiers have it."""
        payload_bytes = self._payload_bytes(event.key_space, event.hashes)
        if not payload_bytes:
            return Warmed(0, 0, "unknown")
        scope = Scope(event.key_space, event.tenant)
        run = self._find(Chain.of(scope, event.hashes, payload_bytes), 0, now_ns)
        warmed = self.warming.start(run, "warm", now_ns)
        if warmed.reason or run.reason == "complete":
            return warmed
        return Warmed(warmed.num_ready, warmed.num_coming, run.reason)

    def announced(self, session: str, use: Use, chain: Chain, first: int, now_ns: int) -> None:
        """Keep what a request that waits will ask for, and bring what the CPU tier lacks of it."""
        num_kept = self.retention.announce(session, use.keys, use.payload_bytes, use.traits, now_ns)
        name = (session, use.traits.request_id)
        if num_kept > first and not self._bring(chain, first, num_kept, now_ns):
            self._waiting[name] = (chain, first, num_kept)
            if len(self._waiting) > CLAIMS_MAX:
                del self._waiting[next(iter(self._waiting))]

    def over(self, session: str, request_id: str) -> None:
        """Note that an announced request had its turn, or that it will not come."""
        self.retention.over(session, request_id)
        self._waiting.pop((session, request_id), None)

    def advance(self, now_ns: int) -> None:
        """End what is past its time, and bring more of what is announced as room comes free."""
        self.retention.expire(now_ns)
        while self._waiting and self.warming.has_room:
            name = next(iter(self._waiting))
            if not self._bring(*self._waiting[name], now_ns):
                break
            del self._waiting[name]

    def looked_up(self, session: str, use: Use, now_ns: int) -> None:
        """Note that a request has its turn."""
        if use.traits.request_id:
            self.over(session, use.traits.request_id)
        self.retention.wish(use.keys, use.payload_bytes, use.traits, now_ns)

    def stored(self, use: Use, now_ns: int) -> None:
        """Keep what a request offers, if it asks for that."""
        self.retention.wish(use.keys, use.payload_bytes, use.traits, now_ns)

    def _bring(self, chain: Chain, first: int, end: int, now_ns: int) -> bool:
        """Bring blocks of a chain into the CPU tier; False where some have to wait for that."""
        run = self._paying(self._find(chain, first, now_ns).head(end - first), now_ns)
        return not len(run) or self.warming.start(run, "announced", now_ns).reason != "busy"

    def _paying(self, run: Run, now_ns: int) -> Run:
        """Return a run up to the first block that only a tier has which does not pay lately."""
        guarded = self._planner.guarded(now_ns) if self._planner else frozenset()
        length = 0
        for tier, num_blocks in run.by_tier():
            if tier in guarded:
                break
            length += num_blocks
        return run.head(length)

    def _payload_bytes(self, key_space: bytes, hashes: bytes) -> int:
        """Return the size of a key space's blocks, 0 where no engine and no block tells it."""
        known = self._writes.payload_bytes_of(key_space)
        if known:
            return known
        index = self._cache.index
        rows = index.find(as_keys(hashes))
        rows = rows[rows >= 0]
        return int(index.payload_bytes[rows[0]]) if len(rows) else 0
