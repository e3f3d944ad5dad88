"""Measurements: what the cost model learns from transfers, be they whole, failed or late.

A transfer that failed says nothing of how fast it would have been, except where it took longer than
one expects of a whole one: then it took at least that. So a tier that hangs is slow, and one that
refuses at once is not fast.
"""

from collections.abc import Sequence

from kvtier.core.plan import TransferSample
from kvtier.core.planner import Planner
from kvtier.node.messages.events import ReadDone, WriteDone
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import InFlightTransfer, TransferLane
from kvtier.tiers.base import MissReason, WriteOutcome

__all__ = ["Measurements"]


class Measurements:
    """Hands each transfer to the planner, once."""

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
        """Take in a transfer that ended; one that was late before counts no more."""
        if self._planner is None or transfer.is_overdue:
            return
        if event.fault:
            self._at_least(lane, transfer, now_ns)
            return
        # A block that was not there, or not wanted, took no time to speak of.
        results = zip(transfer.rows, event.results, strict=True)
        moved = [row for row, result in results if _has_moved(result)]
        if moved:
            sample = self._sample(transfer, moved, event.seconds)
            self._planner.note_transfer(lane.tier.name, transfer.is_read, sample, now_ns)

    def overdue(self, lane: TransferLane, transfer: InFlightTransfer, now_ns: int) -> None:
        """Take in a transfer that is past its deadline, and may never end."""
        self._at_least(lane, transfer, now_ns)

    def _at_least(self, lane: TransferLane, transfer: InFlightTransfer, now_ns: int) -> None:
        if self._planner is None:
            return
        sample = self._sample(transfer, transfer.rows, (now_ns - transfer.started_ns) / 1e9)
        self._planner.note_unfinished(lane.tier.name, transfer.is_read, sample, now_ns)

    def _sample(
        self, transfer: InFlightTransfer, rows: Sequence[int], seconds: float
    ) -> TransferSample:
        num_bytes = sum(self._cache.size_of(row) for row in rows)
        return TransferSample(len(rows), num_bytes, transfer.depth, seconds)


def _has_moved(result: bytes | MissReason | WriteOutcome | None) -> bool:
    return result is WriteOutcome.STORED or isinstance(result, bytes)
