"""Handles completions: the results of reads, writes and checks that tiers report exactly once.

A failed transfer says nothing about the tier's speed, unless it took longer than a whole one was
expected to: then that is a lower bound. So a tier that hangs counts as slow, and one that refuses
at once does not count as fast.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kvtier.core.fate import Fate
from kvtier.core.identity import HASH_BYTES
from kvtier.core.plan import TransferSample
from kvtier.core.planner import Planner
from kvtier.core.residency import Residency, TierName
from kvtier.core.table import Rows, as_keys
from kvtier.node.flow.load import Loads
from kvtier.node.flow.pending_lookup import PendingLookups
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.messages.actions import Action
from kvtier.node.messages.events import BlocksLost, BlocksVerified, ReadDone, WriteDone
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import InFlightTransfer, TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import (
    EVICTED_BLOCKS,
    MISS_BLOCKS,
    QUARANTINED_BLOCKS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
)
from kvtier.tiers.base import MissReason, WriteOutcome

__all__ = ["Completions", "Measurements"]

_DAMAGE = frozenset(
    {MissReason.CHECKSUM, MissReason.HEADER, MissReason.LENGTH, MissReason.SEAL},
)
"""Reasons why a read missed although the tier had bytes: they are not those that were written."""

_FATES: Mapping[str, Fate] = {
    "corrupt": Fate.FAILED_CHECK,
    MissReason.EXPIRED: Fate.EXPIRED,
    MissReason.IDENTITY: Fate.IDENTITY,
} | dict.fromkeys(_DAMAGE, Fate.FAILED_CHECK)
"""Fate of blocks by the reason why a tier lost or missed them; otherwise they were evicted."""


class Measurements:
    """Reports each transfer to the planner, once."""

    def __init__(self, cache: Cache, planner: Planner | None) -> None:
        self._cache = cache
        self._planner = planner

    def ended(
        self,
        lane: TransferLane,
        transfer: InFlightTransfer,
        event: ReadDone | WriteDone,
        now_ns: int,
    ) -> None:
        """Report a transfer that ended; one that was overdue before is ignored."""
        if self._planner is None or transfer.is_overdue:
            return
        if event.fault:
            self.overdue(lane, transfer, now_ns)
            return
        # A block that was absent or refused took hardly any time.
        results = zip(transfer.rows, event.results, strict=True)
        moved = [row for row, result in results if _has_moved(result)]
        if moved:
            sample = self._sample(transfer, moved, event.seconds)
            self._planner.note_transfer(lane.tier.name, transfer.is_read, sample, now_ns)

    def overdue(self, lane: TransferLane, transfer: InFlightTransfer, now_ns: int) -> None:
        """Report a transfer that took at least this long, and may never end."""
        if self._planner is None:
            return
        sample = self._sample(transfer, transfer.rows, (now_ns - transfer.started_ns) / 1e9)
        self._planner.note_unfinished(lane.tier.name, transfer.is_read, sample, now_ns)

    def _sample(
        self, transfer: InFlightTransfer, rows: Sequence[int], seconds: float
    ) -> TransferSample:
        num_bytes = sum(self._cache.size_of(row) for row in rows)
        return TransferSample(len(rows), num_bytes, transfer.depth, seconds)


class Completions:
    """Keeps the index consistent with the tiers, and resumes the loads that waited for them."""

    def __init__(
        self,
        cache: Cache,
        transfers: TierTransfers,
        writes: TierWrites,
        loads: Loads,
        pending_lookups: PendingLookups,
        measurements: Measurements,
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._writes = writes
        self._loads = loads
        self._pending_lookups = pending_lookups
        self._measurements = measurements
        self._metrics = cache.metrics

    def read(self, event: ReadDone, now_ns: int) -> list[Action]:
        """Handle the end of a read: publish blocks that arrived, and end loads of the others."""
        orphan = self._transfers.end_orphan(event.transfer)
        if orphan is not None:
            lost = [self._loads.block_lost(row, "failed", Fate.DETACHED) for row in orphan.rows]
            return [action for each in lost for action in each]
        lane, transfer = self._transfers.end(event.transfer)
        tier, rows = lane.tier.name, transfer.rows
        actions: list[Action] = []
        self._measurements.ended(lane, transfer, event, now_ns)
        if event.fault:
            self._metrics.add(MISS_BLOCKS, len(rows), tier=tier, reason="fault")
            self._count_bytes(f"{tier}_to_cpu", rows, "failed")
            for row in rows:
                actions += self._loads.block_missed(row, Fate.TIER_DOWN, now_ns)
            return actions
        self._metrics.observe(TRANSFER_SECONDS, event.seconds, route=f"{tier}_to_cpu")
        outcome = "late" if transfer.is_overdue else "complete"
        for row, result in zip(rows, event.results, strict=True):
            if isinstance(result, MissReason):
                actions += self._missed(tier, row, result, now_ns)
            else:
                self._count_bytes(f"{tier}_to_cpu", (row,), outcome)
                self._cache.publish(row, result)
                actions += self._loads.block_ready(row)
        return actions

    def written(self, event: WriteDone, now_ns: int) -> None:
        """Handle the end of a write: record which blocks the tier has now."""
        if self._transfers.end_orphan(event.transfer) is not None:
            return
        lane, transfer = self._transfers.end(event.transfer)
        tier, rows, index = lane.tier.name, transfer.rows, self._cache.index
        self._measurements.ended(lane, transfer, event, now_ns)
        if event.fault:
            self._count_bytes(f"cpu_to_{tier}", rows, "failed")
            index.move(np.array(rows), tier, Residency.ABSENT)
            index.forget_absent(np.array(rows))
            return
        self._metrics.observe(TRANSFER_SECONDS, event.seconds, route=f"cpu_to_{tier}")
        for row, result in zip(rows, event.results, strict=True):
            is_stored = result is WriteOutcome.STORED
            index.move(row, tier, Residency.READY if is_stored else Residency.ABSENT)
            self._count_bytes(f"cpu_to_{tier}", (row,), "complete" if is_stored else "failed")
            if result is None:
                self._metrics.add(MISS_BLOCKS, tier=TierName.CPU, reason="checksum")
                self._cache.condemn(row)
        if tier.is_shared:
            self._pending_lookups.note_stored(index.hash_of(row) for row in rows)
        # A condemned block may have left the CPU tier when this write unpinned it.
        index.forget_absent(np.array(rows))
        self._forget(lane, event.evicted, "capacity")

    def lost(self, event: BlocksLost, now_ns: int) -> None:
        """Record blocks that a tier can no longer serve."""
        lane = self._transfers.lanes[event.tier]
        rows = self._forget(lane, event.hashes, event.reason)
        if event.reason != "expired":
            self._writes.lost(lane, rows, now_ns)

    def verified(self, event: BlocksVerified, now_ns: int) -> None:
        """Record which unverified blocks a tier still has; ignores blocks written since."""
        lane, index = self._transfers.lanes[event.tier], self._cache.index
        rows = index.find(as_keys(event.hashes))
        is_meant = rows >= 0
        is_meant &= index.residency(rows, event.tier) == Residency.UNVERIFIED
        present = np.array([is_there is True for is_there in event.present], bool)
        absent = np.array([is_there is False for is_there in event.present], bool)
        index.move(rows[is_meant & present], event.tier, Residency.READY)
        lost = rows[is_meant & absent]
        index.move(lost, event.tier, Residency.ABSENT)
        self._metrics.add(EVICTED_BLOCKS, len(lost), tier=event.tier, reason="lost")
        self._writes.lost(lane, lost, now_ns)
        index.forget_absent(lost)

    def _missed(self, tier: TierName, row: int, reason: MissReason, now_ns: int) -> list[Action]:
        self._metrics.add(MISS_BLOCKS, tier=tier, reason=reason)
        self._metrics.add(QUARANTINED_BLOCKS, reason in _DAMAGE, tier=tier)
        fate = _FATES.get(reason, Fate.EVICTED)
        # Before the row may be forgotten: until then it is in state writing in the CPU tier.
        with self._cache.residency_listener.leaving(fate):
            self._cache.index.move(row, tier, Residency.ABSENT)
        return self._loads.block_missed(row, fate, now_ns)

    def _forget(self, lane: TransferLane, hashes: bytes, reason: str) -> Rows:
        """Record which blocks a tier no longer has; returns rows of those in other tiers."""
        if not hashes:
            return np.zeros(0, np.int64)
        if reason == "corrupt":
            num_blocks = len(hashes) // HASH_BYTES
            self._metrics.add(QUARANTINED_BLOCKS, num_blocks, tier=lane.tier.name)
        index, tier = self._cache.index, lane.tier.name
        rows = index.find(as_keys(hashes))
        rows = rows[rows >= 0]
        rows = rows[index.residency(rows, tier) == Residency.READY]
        with self._cache.residency_listener.leaving(_FATES.get(reason, Fate.EVICTED)):
            index.move(rows, tier, Residency.ABSENT)
        self._metrics.add(EVICTED_BLOCKS, len(rows), tier=tier, reason=reason)
        kept: Rows = rows[(index.state[rows] != Residency.ABSENT).any(axis=1)]
        index.forget_absent(rows)
        return kept

    def _count_bytes(self, route: str, rows: Sequence[int], outcome: str) -> None:
        num_bytes = self._cache.payload_bytes(rows)
        self._metrics.add(TRANSFER_BYTES, num_bytes, route=route, outcome=outcome)


def _has_moved(result: bytes | MissReason | WriteOutcome | None) -> bool:
    return result is WriteOutcome.STORED or isinstance(result, bytes)
