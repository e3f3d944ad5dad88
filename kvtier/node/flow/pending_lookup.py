"""Lookups that wait for a shared tier to report which blocks it may have.

Other nodes also write to a shared tier, so only the tier knows its contents. A query delays every
lookup, and few gain from it. So it is sent only if enough blocks are missing, the tier answers in
time, and it did not just answer that the next block is absent.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvtier.core.identity import BlockHash, Selection, split_hashes
from kvtier.core.index import NewBlocks
from kvtier.core.limits import (
    ABSENT_HASHES_MAX,
    ABSENT_NS,
    EXISTENCE_CHECK_BLOCKS_MAX,
    EXISTENCE_CHECK_GRACE_NS,
    EXISTENCE_CHECK_PAUSE_MAX_NS,
    EXISTENCE_CHECK_PAUSE_NS,
    EXISTENCE_CHECKS_LATE_MAX,
    EXISTENCE_CHECKS_MAX,
)
from kvtier.core.residency import Residency, TierName
from kvtier.node.messages.actions import ExistsQuery
from kvtier.node.messages.events import ExistsQueryDone, Lookup
from kvtier.node.state.block_run import PromptChain
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TransferLane
from kvtier.observe.daemon_metrics import PROBED_LOOKUPS

__all__ = ["PendingLookup", "PendingLookups"]


@dataclass(frozen=True, slots=True)
class PendingLookup:
    """A lookup that is answered once its existence query is answered, or at its deadline."""

    event: Lookup
    chain: PromptChain
    tier: TierName
    """The shared tier that was asked."""
    first: int
    """Index of the first block in the query."""
    deadline_ns: int
    is_late: bool = False
    """The shared tier did not answer in time."""


class PendingLookups:
    """All lookups that wait for a shared tier."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pending: dict[int, PendingLookup] = {}
        self._num_queries = 0
        self._absent = _Absent()
        self._num_late = 0
        """Number of queries in a row that were answered late."""
        self._paused_until_ns = 0

    def start(
        self,
        event: Lookup,
        chain: PromptChain,
        first: int,
        block_tokens: int,
        *,
        lane: TransferLane,
        now_ns: int,
    ) -> ExistsQuery | None:
        """Query ``lane`` for the blocks from ``first`` on; None if that cannot pay off."""
        deadline_ns = event.deadline_ns - EXISTENCE_CHECK_GRACE_NS
        asked = split_hashes(chain.keys[first : first + EXISTENCE_CHECK_BLOCKS_MAX].tobytes())
        num_tokens = (len(chain.keys) - first) * block_tokens
        if num_tokens < lane.tier.min_tokens:
            refusal = "too_few"
        elif not lane.is_usable(now_ns) or lane.is_closed(chain.scope):
            refusal = "out"
        elif deadline_ns <= now_ns:
            refusal = "late"
        elif self._absent.has(asked[0], now_ns):
            refusal = "known_absent"
        elif len(self._pending) >= EXISTENCE_CHECKS_MAX or now_ns < self._paused_until_ns:
            refusal = "busy"
        else:
            self._num_queries += 1
            self._pending[self._num_queries] = PendingLookup(
                event, chain, lane.tier.name, first, deadline_ns
            )
            return ExistsQuery(self._num_queries, lane.tier.name, tuple(asked), deadline_ns)
        self._count(refusal)
        return None

    def end(self, event: ExistsQueryDone, now_ns: int) -> PendingLookup | None:
        """Record the answer of a shared tier; returns the lookup if it still waits."""
        lookup = self._pending.pop(event.query, None)
        if lookup is None:
            return None
        self._num_late = 0
        if not event.present:
            self._count("out")
            return lookup
        length = next((i for i, is_there in enumerate(event.present) if not is_there), None)
        if length is None:
            length = len(event.present)
        elif event.present[length] is False:
            gap = lookup.chain.keys[lookup.first + length]
            self._absent.add(BlockHash(gap.tobytes()), now_ns)
        self._count("found" if length else "absent")
        self._learn(lookup, length)
        return lookup

    def expire(self, now_ns: int) -> list[PendingLookup]:
        """Return the lookups whose deadline has come."""
        late = self._take(lambda lookup: lookup.deadline_ns <= now_ns)
        late = [replace(lookup, is_late=True) for lookup in late]
        self._count("late", len(late))
        self._num_late += len(late)
        if late and self._num_late >= EXISTENCE_CHECKS_LATE_MAX:
            doublings = min(self._num_late - EXISTENCE_CHECKS_LATE_MAX, 10)
            pause_ns = min(EXISTENCE_CHECK_PAUSE_NS << doublings, EXISTENCE_CHECK_PAUSE_MAX_NS)
            self._paused_until_ns = now_ns + pause_ns
        return late

    def interrupt(self, selection: Selection) -> list[PendingLookup]:
        """Return the lookups of a selection that is being dropped, whose answers are outdated."""
        dropped = self._take(
            lambda lookup: selection.has(lookup.chain.scope.key_space, lookup.chain.scope.tenant)
        )
        self._count("out", len(dropped))
        return dropped

    def note_stored(self, hashes: Iterable[BlockHash]) -> None:
        """Note blocks that this node wrote to the tier: they may be queried again."""
        for block_hash in hashes:
            self._absent.discard(block_hash)

    def next_deadline_ns(self) -> int | None:
        """Return when the next lookup must be answered."""
        return min((lookup.deadline_ns for lookup in self._pending.values()), default=None)

    def _learn(self, lookup: PendingLookup, length: int) -> None:
        """Add the blocks that the shared tier has to the index, as far as there is room."""
        length = min(length, self._cache.make_rows(length))
        first, end = lookup.first, lookup.first + length
        if not length:
            return
        index = self._cache.index
        rows = index.add(
            NewBlocks(
                keys=lookup.chain.keys[first:end],
                parents=lookup.chain.parents[first:end],
                first_position=first,
                scope=index.scope_id(lookup.chain.scope),
                payload_bytes=lookup.chain.payload_bytes,
            )
        )
        fresh = rows[index.lacks(rows, lookup.tier)]
        index.move(fresh, lookup.tier, Residency.READY)

    def _take(self, is_meant: Callable[[PendingLookup], bool]) -> list[PendingLookup]:
        numbers = [number for number, lookup in self._pending.items() if is_meant(lookup)]
        return [self._pending.pop(number) for number in numbers]

    def _count(self, outcome: str, count: int = 1) -> None:
        self._cache.metrics.add(PROBED_LOOKUPS, count, outcome=outcome)


class _Absent:
    """Hashes that a shared tier recently did not have."""

    def __init__(self) -> None:
        self._until_ns: dict[BlockHash, int] = {}
        """When each hash expires, in order of expiry."""

    def add(self, block_hash: BlockHash, now_ns: int) -> None:
        self._until_ns.pop(block_hash, None)
        self._until_ns[block_hash] = now_ns + ABSENT_NS
        if len(self._until_ns) > ABSENT_HASHES_MAX:
            del self._until_ns[next(iter(self._until_ns))]

    def has(self, block_hash: BlockHash, now_ns: int) -> bool:
        until_ns = self._until_ns.get(block_hash)
        if until_ns is None or until_ns > now_ns:
            return until_ns is not None
        del self._until_ns[block_hash]
        return False

    def discard(self, block_hash: BlockHash) -> None:
        self._until_ns.pop(block_hash, None)
