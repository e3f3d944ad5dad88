"""Look-ahead: what is known to be wanted is kept in the CPU tier, or brought there beforehand.

Requests are announced while they wait, operators pin chains and warm them, and requests may say
what they are to be kept for. ``Retention`` keeps, ``Prefetcher`` brings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.core.identity import split_hashes
from kvtier.core.index import Scope
from kvtier.core.limits import CLAIMS_MAX
from kvtier.core.reuse.history import History, Use
from kvtier.core.table import as_keys
from kvtier.node.flow.decision import Decisions
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.messages.actions import PinResult, WarmResult
from kvtier.node.messages.events import PinBlocks, Warm
from kvtier.node.operations.prefetcher import Prefetcher
from kvtier.node.operations.retention import Retention
from kvtier.node.state.block_run import BlockRun, PromptChain
from kvtier.node.state.cache import Cache
from kvtier.node.state.session import Session
from kvtier.node.state.transfer import TierTransfers

__all__ = ["Lookahead"]

_Find = Callable[[PromptChain, int, int], BlockRun]
"""Returns what could be loaded of a chain, from a block on, at a time."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """Blocks that an announced request will ask for."""

    session: Session
    use: Use
    chain: PromptChain
    first: int
    end: int


class Lookahead:
    """Answers pins and warms, and acts on what requests say of themselves."""

    def __init__(
        self,
        cache: Cache,
        transfers: TierTransfers,
        writes: TierWrites,
        find: _Find,
        decisions: Decisions,
        *,
        pin_share: float = 0.0,
        history: History | None = None,
    ) -> None:
        self.retention = Retention(cache, pin_share)
        self.prefetcher = Prefetcher(cache, transfers, history)
        self._cache = cache
        self._writes = writes
        self._find = find
        self._decisions = decisions
        self._waiting: dict[tuple[str, str], _Wish] = {}
        """Announced requests of which not all could be brought yet."""
        cache.is_kept = self.retention.is_kept
        cache.give_way = self.retention.give_way

    def pin(self, event: PinBlocks, now_ns: int) -> PinResult:
        """Keep a chain for as long as an operator says, or no longer."""
        payload_bytes = self._payload_bytes(event.key_space, event.hashes)
        if not payload_bytes:
            return PinResult(0, "unknown")
        keys = split_hashes(event.hashes)
        return self.retention.pin(keys, payload_bytes, event.ttl_ns, now_ns)

    def warm(self, event: Warm, now_ns: int) -> WarmResult:
        """Bring a chain into the CPU tier, as far as slower tiers have it."""
        payload_bytes = self._payload_bytes(event.key_space, event.hashes)
        if not payload_bytes:
            return WarmResult(0, 0, "unknown")
        scope = Scope(event.key_space, event.tenant)
        run = self._find(PromptChain.of(scope, event.hashes, payload_bytes), 0, now_ns)
        warmed = self.prefetcher.start(run, "warm", now_ns)
        if warmed.reason or run.reason == "complete":
            return warmed
        return WarmResult(warmed.num_ready, warmed.num_coming, run.reason)

    def announced(
        self, session: Session, use: Use, chain: PromptChain, first: int, now_ns: int
    ) -> None:
        """Keep what a request that waits will ask for, and bring what the CPU tier lacks of it."""
        token, traits = session.token, use.traits
        num_kept = self.retention.announce(token, use.keys, use.payload_bytes, traits, now_ns)
        wish = _Wish(session, use, chain, first, num_kept)
        if num_kept > first and not self._bring(wish, now_ns):
            self._waiting[token, traits.request_id] = wish
            if len(self._waiting) > CLAIMS_MAX:
                del self._waiting[next(iter(self._waiting))]

    def over(self, session: str, request_id: str) -> None:
        """Note that an announced request had its turn, or that it will not come."""
        self.retention.over(session, request_id)
        self._waiting.pop((session, request_id), None)

    def session_ended(self, session: str) -> None:
        """Wait for no request of an engine that has gone."""
        self.retention.session_ended(session)
        for name in [each for each in self._waiting if each[0] == session]:
            del self._waiting[name]

    def advance(self, now_ns: int) -> None:
        """End what is past its time, and bring more of what is announced as room comes free."""
        self.retention.expire(now_ns)
        while self._waiting and self.prefetcher.has_room:
            name = next(iter(self._waiting))
            if not self._bring(self._waiting[name], now_ns):
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

    def _bring(self, wish: _Wish, now_ns: int) -> bool:
        """Bring what pays of a wish into the CPU tier; False where some has to wait for that."""
        run = self._find(wish.chain, wish.first, now_ns).head(wish.end - wish.first)
        num_paying = self._decisions.num_paying(
            wish.session, wish.use, run, wish.first, now_ns=now_ns
        )
        run = run.head(num_paying)
        return not len(run) or self.prefetcher.start(run, "announced", now_ns).reason != "busy"

    def _payload_bytes(self, key_space: bytes, hashes: bytes) -> int:
        """Return the size of a key space's blocks, 0 where no engine and no block tells it."""
        known = self._writes.payload_bytes_of(key_space)
        if known:
            return known
        index = self._cache.index
        rows = index.find(as_keys(hashes))
        rows = rows[rows >= 0]
        return int(index.payload_bytes[rows[0]]) if len(rows) else 0
