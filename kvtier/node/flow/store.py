"""Stores: lease slots that clients fill, and publish the blocks when they are complete.

Prepare, copy, complete: until a store is completed its blocks are in state writing, and are not
served. A store's lease does not expire while its client lives, because the client may still be
writing into the slots; it counts against the client's share of the arena instead.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.admission import Admission, Admit, Offer, RefusalRule, Reject
from kvtier.core.fate import Fate
from kvtier.core.index import NewBlocks, Scope
from kvtier.core.limits import CHAIN_BLOCKS_MAX, ENGINE_SHARE, INDEX_ROWS_MAX, STORE_ARENA_SHARE
from kvtier.core.residency import Residency, TierName
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.history import History, Use
from kvtier.core.slots import slot_bytes
from kvtier.core.table import Rows
from kvtier.node.flow.cpu_allocator import CpuAllocator
from kvtier.node.flow.load import Loads
from kvtier.node.messages.actions import Action, StoreGrant
from kvtier.node.messages.events import CompleteStore
from kvtier.node.state.block_run import PromptChain, find_own
from kvtier.node.state.session import Session, StoreLease
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import (
    ADMISSION_BLOCKS,
    REFUSED_BLOCKS,
    TRANSFER_BYTES,
    TransferRoute,
)

__all__ = ["Stores"]

_FATES: Mapping[RefusalRule, Fate] = {
    RefusalRule.WORTH: Fate.REFUSED_WORTH,
    RefusalRule.DEPTH: Fate.REFUSED_DEPTH,
    RefusalRule.FULL: Fate.REFUSED_FULL,
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """How many of the leading lacking blocks are admitted, and the rule that refuses the next."""

    num_blocks: int
    rule: RefusalRule = RefusalRule.FULL
    reason: str = ""
    """Reason in the answer to the client, if it is not the rule's name."""


class Stores:
    """All open stores."""

    def __init__(
        self,
        allocator: CpuAllocator,
        loads: Loads,
        transfers: TierTransfers,
        admission: Admission,
        *,
        history: History | None = None,
        depth: DepthCurves | None = None,
    ) -> None:
        self._cache = allocator.cache
        self._allocator = allocator
        self._loads = loads
        self._transfers = transfers
        self._admission = admission
        self._history = history
        self._depth = depth
        self._metrics = self._cache.metrics
        self._num_leases = 0
        self._held_bytes = 0
        """Bytes of all stores that are not completed."""

    def prepare(
        self,
        session: Session,
        chain: PromptChain,
        first: int,
        now_ns: int,
        *,
        use: Use | None = None,
    ) -> StoreGrant:
        """Lease slots for the blocks from ``first`` on that no local tier has, as far as admitted.

        Grants a prefix of the lacking blocks: a block behind a refused one could not be found.
        """
        before, rows = self._rows_of(chain, first)
        mark = self._allocator.touch(np.concatenate([before, rows]), chain.payload_bytes, now_ns)
        lacking = self._lacking(rows, chain.scope, now_ns)
        if use is not None and self._depth is not None:
            self._depth.note_generated(use, first, now_ns)
        answer = self._judge(session, lacking, first, use, now_ns)
        if self._cache.is_closed(chain.scope):
            answer = _Answer(0, reason="dropping")
        num_claimed = self._allocator.claim_all(rows[lacking[: answer.num_blocks]], mark)
        if num_claimed < answer.num_blocks:
            answer = _Answer(num_claimed, reason="no_room")
        claimed = lacking[:num_claimed]
        leased = rows[claimed].tolist()
        self._note_refused(rows, lacking[len(claimed) :], answer.rule)
        self._cache.index.forget_absent(rows)
        present, refused = len(rows) - len(lacking), len(lacking) - len(claimed)
        reason = (answer.reason or answer.rule) if refused else ""
        if num_foreign := len(chain.keys) - first - len(rows):
            reason = reason or "identity"
            refused += num_foreign
        self._count("present", present)
        self._count("admitted", len(claimed))
        return StoreGrant(
            lease=self._grant(session, leased).number if leased else 0,
            indexes=tuple(first + place for place in claimed),
            offsets=self._cache.offsets(leased),
            present_blocks=present,
            rejected_blocks=refused,
            reason=reason,
        )

    def complete(self, session: Session, event: CompleteStore) -> tuple[list[int], list[Action]]:
        """Publish the leading blocks of a lease that were copied completely; abandon the others.

        Returns the rows that were published.
        """
        lease = session.stores.pop(event.lease, None)
        if lease is None:
            return [], []
        self._held_bytes -= lease.num_bytes
        actions: list[Action] = []
        whole = lease.rows[: len(event.checksums)]
        # Blocks dropped meanwhile are not published, but loads that wait for them must end.
        ready = self._cache.publish_all(whole, event.checksums[: len(whole)])
        self._count_copied(session, len(ready), "complete")
        self._count_copied(session, len(whole) - len(ready), "cancelled")
        self._count_copied(session, len(lease.rows) - len(whole), "failed")
        for row in whole:
            actions += self._loads.block_ready(row)
        for row in lease.rows[len(whole) :]:
            actions += self._loads.block_lost(row, "failed")
        return ready, actions

    def abandon(self, session: Session) -> list[Action]:
        """Abandon all stores of a client that is gone."""
        actions: list[Action] = []
        for lease in session.stores.values():
            self._held_bytes -= lease.num_bytes
            for row in lease.rows:
                actions += self._loads.block_lost(row, "failed")
        session.stores.clear()
        return actions

    def _rows_of(self, chain: PromptChain, first: int) -> tuple[Rows, Rows]:
        """Return the known rows before ``first``, and the rows from there on, added if new.

        Both end at a block whose hash is known with another identity.
        """
        index = self._cache.index
        self._cache.make_rows(len(chain.keys) - first)
        known, end = find_own(index, chain)
        before = known[: min(first, end)]
        new = NewBlocks(
            keys=chain.keys[first:end],
            parents=chain.parents[first:end],
            first_position=first,
            scope=index.scope_id(chain.scope),
            payload_bytes=chain.payload_bytes,
        )
        return before[before >= 0], index.add(new, known[first:end])

    def _lacking(self, rows: Rows, scope: Scope, now_ns: int) -> list[int]:
        """Return the indexes of rows that no local tier has, or is about to have."""
        index = self._cache.index
        outside = index.residency(rows, TierName.CPU) == Residency.ABSENT
        for name, lane in self._transfers.lanes.items():
            if not name.is_shared and lane.is_usable(now_ns) and not lane.is_closed(scope):
                outside &= index.residency(rows, name) != Residency.READY
        places: list[int] = np.flatnonzero(outside).tolist()
        return places

    def _judge(
        self,
        session: Session,
        lacking: Sequence[int],
        first: int,
        use: Use | None,
        now_ns: int,
    ) -> _Answer:
        """Return how many of the lacking blocks are admitted, and why the others are not."""
        size = slot_bytes(session.layout.block_bytes)
        if not lacking:
            return _Answer(0)
        if len(self._cache.index) >= INDEX_ROWS_MAX:
            return _Answer(0, reason="index_full")
        num_near = bisect_left(lacking, self._limit_blocks(use) - first)
        if not num_near:
            return _Answer(0, RefusalRule.DEPTH)
        held_bytes = session.store_bytes
        share_bytes = int(self._cache.slots.reserved_bytes * STORE_ARENA_SHARE)
        left_bytes = share_bytes - (self._held_bytes - held_bytes)
        decision = self._admission.decide(
            Offer(
                tier=TierName.CPU,
                num_blocks=num_near,
                first_position=first + lacking[0],
                payload_bytes=size,
                queued_bytes=held_bytes,
                # Twice what is left to others is two thirds of the share.
                queued_bytes_max=left_bytes * ENGINE_SHARE // (ENGINE_SHARE + 1),
                use=use,
                num_spare=min(num_near, self._cache.slots.num_free(size)),
                is_way_down=self._transfers.is_way_down(now_ns),
            )
        )
        if isinstance(decision, Admit):
            if decision.num_blocks == num_near:
                return _Answer(num_near, RefusalRule.DEPTH)
            reason = "throttled" if decision.rule is RefusalRule.FULL else ""
            return _Answer(decision.num_blocks, decision.rule, reason)
        if isinstance(decision, Reject):
            return _Answer(0, decision.rule)
        return _Answer(0, reason=decision.reason)

    def _limit_blocks(self, use: Use | None) -> int:
        """Return the maximum number of leading blocks of a request to admit."""
        if use is None:
            return CHAIN_BLOCKS_MAX
        if self._depth is not None:
            most_tokens = self._depth.max_offload_tokens(use)
        else:
            most_tokens = use.traits.max_offload_tokens
        return CHAIN_BLOCKS_MAX if most_tokens is None else most_tokens // use.block_tokens

    def _note_refused(self, rows: Rows, places: Sequence[int], rule: RefusalRule) -> None:
        """Count refused blocks, and record why they were refused."""
        self._metrics.add(REFUSED_BLOCKS, len(places), tier=TierName.CPU, rule=rule)
        self._count("throttled" if rule is RefusalRule.FULL else "rejected", len(places))
        if self._history is not None and places:
            hashes = self._cache.index.hashes_of(rows[list(places)])
            self._history.note_fate(hashes, _FATES[rule])

    def _grant(self, session: Session, rows: list[int]) -> StoreLease:
        self._num_leases += 1
        lease = StoreLease(
            number=self._num_leases,
            rows=rows,
            num_bytes=len(rows) * slot_bytes(session.layout.block_bytes),
        )
        session.stores[lease.number] = lease
        self._held_bytes += lease.num_bytes
        return lease

    def _count_copied(self, session: Session, num_blocks: int, outcome: str) -> None:
        num_bytes = num_blocks * session.layout.block_bytes
        self._metrics.add(
            TRANSFER_BYTES, num_bytes, route=TransferRoute.GPU_TO_CPU, outcome=outcome
        )

    def _count(self, outcome: str, num_blocks: int) -> None:
        self._metrics.add(ADMISSION_BLOCKS, num_blocks, tier=TierName.CPU, outcome=outcome)
