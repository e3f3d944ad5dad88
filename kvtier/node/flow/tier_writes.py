"""Writes blocks from the CPU tier to the slower tiers.

Theory
------
Every write goes through ``TierWrites.offer``. Its trigger depends on the write mode of the tier
(``WriteMode``)::

    Stores.complete      -> TierWrites.stored     store: at once; second_use: if used before
    UseCounter (a hit)   -> TierWrites.used       second_use
    slots given out      -> Demotion.advance      demote, and blocks that mode store missed
    CpuAllocator evicts  -> Demotion.hold_back    demote: the last chance of a victim
    idle tier, timer     -> Flush.advance         demote with flush_after_ns
    daemon stops         -> Flush.close           demote, persistent tiers only
    tier lost blocks     -> TierWrites.lost       store, second_use; demote offers them again

    offer: admission judges -> TierTransfers.write: rows are pinned and queued in the tier's lane
        -> TierTransfers.pump: ``Write`` action -> a tier thread copies the bytes
        -> ``WriteDone`` -> Completions.written: unpins the rows, updates the index

Rules
-----
* A block is found through its parent. So once a block was written to a tier, its parent is needed
  there too, and the parent's offer says so.
* Refusals are counted here, by rule.
"""

from collections.abc import Sequence

import numpy as np

from kvtier.core.admission import Admission, Admit, Offer, OfferReason, RefusalRule, Throttle
from kvtier.core.index import NEEDED_BY, WAS_DEMOTED, WAS_FLUSHED, WAS_REFUSED, Scope
from kvtier.core.layout import KVLayout
from kvtier.core.limits import KEY_SPACES_MAX, WANTED_BLOCKS_MAX
from kvtier.core.residency import Residency, TierName
from kvtier.core.slow_tier import AdminState, WriteMode
from kvtier.core.table import Keys, Rows
from kvtier.node.messages.events import SetWriteAllowance
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import ADMISSION_BLOCKS, REFUSED_BLOCKS

__all__ = ["TierWrites"]

_UNKNOWN_TOKENS = 64
"""Assumed tokens of a block that no engine has described: the default block size."""


class TierWrites:
    """Offers blocks to lanes, and queues those that admission accepts."""

    def __init__(self, cache: Cache, transfers: TierTransfers, admission: Admission) -> None:
        self._cache = cache
        self._transfers = transfers
        self._admission = admission
        self._metrics = cache.metrics
        self._layouts: dict[bytes, KVLayout] = {}
        """Layout of each key space; the oldest is forgotten first."""
        self._wanted: dict[bytes, None] = {}
        """Blocks used for a second time while absent; the oldest is forgotten first."""

    def note_layout(self, key_space: bytes, layout: KVLayout) -> None:
        """Record the layout of a key space's blocks."""
        self._layouts[key_space] = layout
        if len(self._layouts) > KEY_SPACES_MAX:
            del self._layouts[next(iter(self._layouts))]

    def payload_bytes_of(self, key_space: bytes) -> int:
        """Return the block size of a key space; 0 if no engine has registered it."""
        layout = self._layouts.get(key_space)
        return layout.block_bytes if layout else 0

    def set_allowance(self, event: SetWriteAllowance, _now_ns: int) -> None:
        """Limit the writes to a tier for the time being."""
        self._admission.note_allowance(event.tier, event.bytes_per_s)

    def stored(self, rows: Sequence[int], now_ns: int) -> None:
        """Offer newly published blocks of one chain to the tiers that are written at once."""
        for lane in self._transfers.lanes.values():
            if lane.admin_state is not AdminState.ACTIVE:
                continue
            if lane.tier.write is WriteMode.STORE:
                self.offer(lane, rows, OfferReason.STORED, now_ns)
            elif lane.tier.write is WriteMode.SECOND_USE:
                again = [row for row in rows if self._cache.index.hash_of(row) in self._wanted]
                self.offer(lane, again, OfferReason.USED, now_ns)
                self._count_refused(lane, RefusalRule.SECOND_USE, len(rows) - len(again))
        for row in rows if self._wanted else ():
            self._wanted.pop(self._cache.index.hash_of(row), None)

    def used(self, keys: Keys, now_ns: int) -> None:
        """Note that the leading blocks of a chain were used again."""
        lanes = self._lanes(WriteMode.SECOND_USE)
        if not lanes:
            return
        rows = self._cache.index.find(keys)
        is_here = rows >= 0
        is_here[is_here] = (
            self._cache.index.residency(rows[is_here], TierName.CPU) == Residency.READY
        )
        for lane in lanes:
            self.offer(lane, rows[is_here].tolist(), OfferReason.USED, now_ns)
        for key in keys[rows < 0]:
            self._wanted[key.tobytes()] = None
        while len(self._wanted) > WANTED_BLOCKS_MAX:
            del self._wanted[next(iter(self._wanted))]

    def offer(
        self, lane: TransferLane, rows: Sequence[int], reason: OfferReason, now_ns: int
    ) -> int:
        """Offer rows, consecutive in one chain, to a tier; returns how many will be written."""
        name = lane.tier.name
        lacking = [
            row
            for row in rows
            if self._cache.state(row, TierName.CPU) == Residency.READY
            and self._cache.lacks(row, name)
        ]
        if not lacking or lane.is_closed(self._cache.index.scope_of(lacking[0])):
            return 0
        if lane.admin_state is not AdminState.ACTIVE:
            return 0
        if not lane.is_working(now_ns):
            self._count_refused(lane, RefusalRule.FULL, len(lacking))
            return 0
        decision = self._admission.decide(self._offer(lane, lacking, reason, now_ns))
        taken = decision.num_blocks if isinstance(decision, Admit) else 0
        self._metrics.add(ADMISSION_BLOCKS, taken, tier=name, outcome="admitted")
        if reason is not OfferReason.LINGERING:  # such a block is offered again before eviction
            rule = RefusalRule.FULL if isinstance(decision, Throttle) else decision.rule
            self._count_refused(lane, rule, len(lacking) - taken)
        self._transfers.write(lane, lacking[:taken], now_ns)
        self.note_needed(lane, lacking[:taken])
        return taken

    def lost(self, lane: TransferLane, rows: Rows, now_ns: int) -> None:
        """Offer lost blocks that the CPU tier still has again, now or before their eviction."""
        index = self._cache.index
        rows = rows[index.residency(rows, TierName.CPU) == Residency.READY]
        index.flags[rows] &= ~np.uint8(WAS_DEMOTED | WAS_FLUSHED | WAS_REFUSED)
        if lane.tier.write is not WriteMode.DEMOTE:
            for row in rows.tolist():
                self.offer(lane, [row], OfferReason.STORED, now_ns)

    def would_take(self, lane: TransferLane, row: int, now_ns: int) -> bool:
        """Return whether admission would take a row at shutdown if there were room for it."""
        offer = self._offer(lane, [row], OfferReason.CLOSING, now_ns, has_room=True)
        return isinstance(self._admission.decide(offer), Admit)

    def note_written(self, lane: TransferLane, row: int, now_ns: int) -> None:
        """Charge admission for a row that is about to be evicted and was written long ago."""
        offer = self._offer(lane, [row], OfferReason.LEAVING, now_ns, has_room=True, is_needed=True)
        self._admission.decide(offer)

    def note_needed(self, lane: TransferLane, rows: Sequence[int]) -> None:
        """Note that the parents of rows written to a tier are needed there."""
        if not rows or lane.tier.write is WriteMode.STORE:
            return
        index = self._cache.index
        parents = index.parent_rows(np.array(rows))
        parents = parents[parents >= 0]
        parents = parents[index.lacks(parents, lane.tier.name)]
        index.flags[parents] |= NEEDED_BY[lane.tier.name]
        # A parent that was offered and refused before is offered again.
        index.flags[parents] &= ~np.uint8(WAS_DEMOTED | WAS_REFUSED)

    def _lanes(self, mode: WriteMode) -> list[TransferLane]:
        return [lane for lane in self._transfers.lanes.values() if lane.tier.write is mode]

    def _offer(
        self,
        lane: TransferLane,
        rows: Sequence[int],
        reason: OfferReason,
        now_ns: int,
        *,
        has_room: bool = False,
        is_needed: bool = False,
    ) -> Offer:
        index, size = self._cache.index, self._cache.size_of(rows[0])
        scope: Scope = index.scope_of(rows[0])
        room_bytes = len(rows) * size if has_room else self._transfers.room_bytes(lane)
        needed = index.flags[rows[-1]] & NEEDED_BY[lane.tier.name]
        layout = self._layouts.get(scope.key_space)
        return Offer(
            tier=lane.tier.name,
            num_blocks=len(rows),
            first_position=int(index.position[rows[0]]),
            payload_bytes=size,
            queued_bytes=lane.queued_bytes,
            queued_bytes_max=lane.queued_bytes + room_bytes,
            reason=reason,
            keys=[index.hash_of(row) for row in rows],
            block_tokens=layout.block_tokens if layout else _UNKNOWN_TOKENS,
            key_space=scope.key_space,
            is_needed=is_needed or bool(needed),
            now_ns=now_ns,
        )

    def _count_refused(self, lane: TransferLane, rule: RefusalRule, num_blocks: int) -> None:
        name = lane.tier.name
        outcome = "throttled" if rule is RefusalRule.FULL else "rejected"
        self._metrics.add(ADMISSION_BLOCKS, num_blocks, tier=name, outcome=outcome)
        self._metrics.add(REFUSED_BLOCKS, num_blocks, tier=name, rule=rule)
