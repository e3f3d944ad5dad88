"""Retention: protects blocks from eviction for a limited time, on behalf of a caller.

An operator pins a chain, a request has a priority or a time to live, or an announced request will
soon be looked up. Each is a claim on the leading blocks of a chain, by hash, whether they are in
the CPU tier now or come later.

Rules
-----
* All claims together name no more bytes than the budget. Beyond it, the tail of the claim with the
  lowest priority is given up, of equal claims that of the oldest; or the new claim's, if it is the
  lowest.
* Kept blocks are skipped by eviction, not locked: if no other block can be evicted, they are, in
  that order. So a store that would find room without claims also finds it with them.
* Claims live in memory. They survive drops of tiers, but not the daemon.
* An expired claim ends with the next event, without a timer; it does no harm until then.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from kvtier.core.index import IS_KEPT
from kvtier.core.limits import (
    ANNOUNCED_KEPT_NS,
    CLAIMS_MAX,
    GAP_MAX_S,
    KEPT_BLOCKS_MAX,
    PRIORITY_KEPT_NS,
    PRIORITY_MAX,
)
from kvtier.core.request import RequestTraits
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.history import Use
from kvtier.core.slots import slot_bytes
from kvtier.core.table import Rows, as_keys
from kvtier.node.messages.actions import PinResult
from kvtier.node.state.cache import Cache

__all__ = ["Retention"]

_PIN_PRIORITY = PRIORITY_MAX + 1
"""An operator's pin outranks any request."""

_LOOKED_AT_ONCE = 64
"""Kept blocks that are checked together for whether they can be evicted. One by one, thousands that
are not in the CPU tier would block the node for most of a second."""

_ENDS_MAX = 4 * CLAIMS_MAX
"""Size of the heap of ends at which those of renewed claims are removed."""


@dataclass(slots=True)
class _Claim:
    priority: int
    until_ns: int
    keys: list[bytes]
    size: int
    """Size of the slot of each block."""


class Retention:
    """All claims, under a budget of ``share`` of the CPU tier."""

    def __init__(self, cache: Cache, share: float = 0.0) -> None:
        self._cache = cache
        self.share = share
        self._claims: dict[int, OrderedDict[Hashable, _Claim]] = {}
        """Claims by priority, in the order in which they were made or renewed."""
        self._priorities: dict[Hashable, int] = {}
        """Priority of each claim, by its name."""
        self._ends: list[tuple[int, int, Hashable]] = []
        """Heap of the times when claims end; some have been renewed or given up since."""
        self._num_made = 0
        self._wanted: Counter[bytes] = Counter()
        """Number of claims that name each block."""
        self._sizes: dict[bytes, int] = {}
        self._num_bytes = 0
        """Total size of all named blocks, each counted once."""
        self._given_up: dict[bytes, None] = {}
        """Blocks that lost their last claim and were not offered to eviction yet."""

    def pin(self, keys: Sequence[bytes], payload_bytes: int, ttl_ns: int, now_ns: int) -> PinResult:
        """Keep a chain's blocks for a time; 0 unpins them."""
        if not keys:
            return PinResult(0)
        name = ("pin", keys[-1])
        if ttl_ns <= 0:
            self._end(name)
            self._settle()
            return PinResult(0)
        claim = _Claim(_PIN_PRIORITY, now_ns + ttl_ns, [*keys], slot_bytes(payload_bytes))
        return self._make(name, claim)

    def keep_request(self, use: Use, now_ns: int) -> None:
        """Keep the blocks of a request that has a priority or a time to live."""
        traits = use.traits
        if not use.keys or (traits.priority <= 0 and not traits.ttl_s):
            return
        ttl_ns = (
            PRIORITY_KEPT_NS if traits.ttl_s is None else int(min(traits.ttl_s, GAP_MAX_S) * 1e9)
        )
        priority = min(max(traits.priority, 0), PRIORITY_MAX)
        claim = _Claim(priority, now_ns + ttl_ns, [*use.keys], slot_bytes(use.payload_bytes))
        self._make(("request", use.keys[-1]), claim)

    def announce(
        self,
        session: str,
        keys: Sequence[bytes],
        payload_bytes: int,
        traits: RequestTraits,
        now_ns: int,
    ) -> int:
        """Keep the blocks of a request until its turn; returns how many leading blocks."""
        if not keys or not traits.request_id:
            return 0
        claim = _Claim(
            min(max(traits.priority, 0), PRIORITY_MAX),
            now_ns + ANNOUNCED_KEPT_NS,
            [*keys],
            slot_bytes(payload_bytes),
        )
        return self._make(("announced", session, traits.request_id), claim).num_blocks

    def request_over(self, session: str, request_id: str) -> None:
        """Note that an announced request was looked up, or will not be."""
        self._end(("announced", session, request_id))
        self._settle()

    def session_ended(self, session: str) -> None:
        """End the claims of requests announced by an engine that is gone."""
        for name in [each for each in self._priorities if _is_announced(each, session)]:
            self._end(name)
        self._settle()

    def expire(self, now_ns: int) -> None:
        """End claims past their time."""
        while self._ends and self._ends[0][0] <= now_ns:
            _, _, name = heappop(self._ends)
            claim = self._find(name)
            if claim is not None and claim.until_ns <= now_ns:
                self._end(name)
        self._settle()

    def is_kept(self, key: bytes) -> bool:
        """Return whether some claim names a block."""
        return key in self._wanted

    def give_way(self, size: int) -> bool:
        """Give up kept blocks, lowest priority first, until one of ``size`` can be evicted.

        Returns False if none can.
        """
        num_given_up, is_found = self._num_until_free(size)
        for _ in range(num_given_up):
            self._trim(*self._least())
        self._settle()
        return is_found

    def retained_bytes(self) -> int:
        """Return the bytes of the CPU tier that are kept."""
        rows = self._rows(list(self._wanted))
        is_here = self._cache.index.residency(rows, TierName.CPU) != Residency.ABSENT
        payload_bytes = self._cache.index.payload_bytes[rows[is_here]]
        # Few sizes, perhaps many blocks, and called every second.
        sizes = zip(*np.unique(payload_bytes, return_counts=True), strict=True)
        return sum(slot_bytes(int(size)) * int(count) for size, count in sizes)

    def _budget_bytes(self) -> int:
        return int(self._cache.slots.reserved_bytes * self.share)

    def _make(self, name: Hashable, claim: _Claim) -> PinResult:
        """Replace the claim of that name, with as many blocks as the budget allows."""
        retained = self._put(name, claim)
        self._settle()
        return retained

    def _put(self, name: Hashable, claim: _Claim) -> PinResult:
        self._end(name)
        wanted, claim.keys = claim.keys, []
        for key in wanted:
            if key not in self._wanted and not self._make_room(claim):
                break
            self._add(key, claim)
        if not claim.keys:
            return PinResult(0, "budget")
        self._claims.setdefault(claim.priority, OrderedDict())[name] = claim
        self._priorities[name] = claim.priority
        self._num_made += 1
        heappush(self._ends, (claim.until_ns, self._num_made, name))
        if len(self._ends) > _ENDS_MAX:
            self._forget_ends()
        self._mark(claim.keys)
        if len(self._priorities) > CLAIMS_MAX:
            self._end(self._least()[0])
        return PinResult(len(claim.keys), "budget" if len(claim.keys) < len(wanted) else "")

    def _make_room(self, claim: _Claim) -> bool:
        """Trim lower or older claims until one more block fits; False if there are none."""
        while (
            self._num_bytes + claim.size > self._budget_bytes()
            or len(self._wanted) >= KEPT_BLOCKS_MAX
        ):
            if not self._priorities:
                return False
            name, least = self._least()
            if least.priority > claim.priority:
                return False
            self._trim(name, least)
        return True

    def _forget_ends(self) -> None:
        """Forget the ends of claims that were renewed or given up since."""
        ends: dict[tuple[Hashable, int], tuple[int, int, Hashable]] = {}
        for end in self._ends:
            claim = self._find(end[2])
            if claim is not None and claim.until_ns == end[0]:
                ends[end[2], end[0]] = end
        self._ends = sorted(ends.values())

    def _least(self) -> tuple[Hashable, _Claim]:
        claims = self._claims[min(self._claims)]
        name = next(iter(claims))
        return name, claims[name]

    def _find(self, name: Hashable) -> _Claim | None:
        priority = self._priorities.get(name)
        return None if priority is None else self._claims[priority][name]

    def _add(self, key: bytes, claim: _Claim) -> None:
        if key not in self._wanted:
            self._sizes[key] = claim.size
            self._num_bytes += claim.size
        self._wanted[key] += 1
        claim.keys.append(key)

    def _num_until_free(self, size: int) -> tuple[int, bool]:
        """Return how many blocks to give up until one of ``size`` is evictable, and if one is."""
        index, named = self._cache.index, Counter[bytes]()
        leaving = (
            (key, claim.size)
            for priority in sorted(self._claims)
            for claim in self._claims[priority].values()
            for key in reversed(claim.keys)
        )
        while batch := list(islice(leaving, _LOOKED_AT_ONCE)):
            rows = index.find(as_keys(b"".join(key for key, _ in batch)))
            is_free = (rows >= 0) & (index.residency(rows, TierName.CPU) == Residency.READY)
            is_free &= index.pins[rows] == 0
            for (key, its_size), can_go in zip(batch, is_free.tolist(), strict=True):
                named[key] += 1
                if can_go and its_size == size and named[key] == self._wanted[key]:
                    return named.total(), True
        return named.total(), False

    def _trim(self, name: Hashable, claim: _Claim) -> None:
        """Give up a claim's last block."""
        self._let_go(claim.keys.pop())
        if not claim.keys:
            self._end(name)

    def _end(self, name: Hashable) -> None:
        """Give up the claim of that name, if there is one."""
        claim = self._find(name)
        if claim is None:
            return
        priority = self._priorities.pop(name)
        del self._claims[priority][name]
        if not self._claims[priority]:
            del self._claims[priority]
        for key in claim.keys:
            self._let_go(key)

    def _let_go(self, key: bytes) -> None:
        """Remove one claim on a block."""
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._num_bytes -= self._sizes.pop(key)
            self._given_up[key] = None

    def _settle(self) -> bool:
        """Offer blocks that lost their last claim to eviction; True if any can be evicted now.

        All at once: one by one, a chain of thousands of blocks would block the node.
        """
        keys = [key for key in self._given_up if key not in self._wanted]
        self._given_up.clear()
        if not keys:
            return False
        cache, rows = self._cache, self._rows(keys)
        cache.index.flags[rows] &= ~np.uint8(IS_KEPT)
        free = rows[cache.index.evictable(rows)].tolist()
        for row in free:
            cache.eviction.offer(cache.index, row)
        return bool(free)

    def _mark(self, keys: Sequence[bytes]) -> None:
        """Mark rows in the CPU tier as kept; those that come later are marked on arrival."""
        index = self._cache.index
        rows = self._rows(keys)
        index.flags[rows[index.residency(rows, TierName.CPU) != Residency.ABSENT]] |= IS_KEPT

    def _rows(self, keys: Sequence[bytes]) -> Rows:
        rows = self._cache.index.find(as_keys(b"".join(keys)))
        found: Rows = rows[rows >= 0]
        return found


def _is_announced(name: Hashable, session: str) -> bool:
    return isinstance(name, tuple) and name[:2] == ("announced", session)
