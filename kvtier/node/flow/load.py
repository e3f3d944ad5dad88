"""Loads: lease leading blocks in the arena, and announce each as soon as it is ready.

A load covers the leading run of blocks that some tier has. Blocks in the CPU tier are ready at
once; the others are claimed and read. Blocks that another load or store is bringing are waited for:
each block is read once, however many loads wait for it. A block that does not arrive ends the run.
A load from the back does the same in reverse order while its engine computes the front.

The lease pins all its blocks until it is released or expires. The leases of an engine together may
hold at most twice what they leave free for others: a load that asks for more gets what fits, and
ends with ``no_room``.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from kvtier.core.fate import Fate
from kvtier.core.identity import HASH_BYTES
from kvtier.core.limits import ENGINE_SHARE, LEASES_PER_SESSION_MAX
from kvtier.core.plan import RestorePlan
from kvtier.core.residency import Residency, TierName
from kvtier.core.table import Rows
from kvtier.node.flow.cpu_allocator import CpuAllocator
from kvtier.node.flow.miss_fates import MissFates
from kvtier.node.flow.token_counters import count_load
from kvtier.node.messages.actions import Action, CallReply, LoadUpdate, Refused, ReleaseResult
from kvtier.node.messages.events import Load
from kvtier.node.state.block_run import BlockRun
from kvtier.node.state.session import LoadLease, Session
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import MISS_BLOCKS, TRANSFER_BYTES, TransferRoute

__all__ = ["Loads"]


class Loads:
    """All open loads."""

    def __init__(
        self,
        allocator: CpuAllocator,
        transfers: TierTransfers,
        miss_fates: MissFates,
    ) -> None:
        self._cache = allocator.cache
        self._allocator = allocator
        self._transfers = transfers
        self._miss_fates = miss_fates
        self._metrics = self._cache.metrics
        self._num_leases = 0
        self._waiting: dict[int, dict[int, LoadLease]] = defaultdict(dict)
        """By row, the leases that wait for it, by their numbers."""
        self._remaining: dict[int, list[TierName]] = {}
        """By row being read, the tiers to try if this read misses."""

    def start(
        self,
        event: Load,
        session: Session,
        before: Rows,
        run: BlockRun,
        plan: RestorePlan | None = None,
        *,
        now_ns: int,
    ) -> list[Action]:
        """Lease the blocks of ``run``; ``before`` are the rows of the chain's blocks before it.

        Waits at most until the client's deadline, and at most as long as the plan says.
        """
        if len(session.loads) >= LEASES_PER_SESSION_MAX:
            return [CallReply(event.call, Refused("too_many", "release loads that are done"))]
        self._num_leases += 1
        deadline_ns = event.deadline_ns
        if plan is not None and plan.wait_ns:
            deadline_ns = min(deadline_ns, now_ns + plan.wait_ns)
        if plan is not None and plan.part_blocks:
            self._transfers.limit_reads(self._num_leases, plan.part_blocks)
        lease = LoadLease(
            number=self._num_leases,
            call=event.call,
            leased=session.leased,
            rows=[],
            tiers=[],
            decision=event.decision,
            num_found=len(run),
            num_ordered=len(event.hashes) // HASH_BYTES - event.first,
            block_tokens=session.layout.block_tokens,
            deadline_ns=deadline_ns,
            expires_ns=event.deadline_ns + session.lease_ns,
            end=run.reason,
            purpose=event.purpose,
            is_of_first_rank=session.is_of_first_rank,
        )
        session.loads[lease.number] = lease
        places = range(len(run))
        self._gather(lease, before, run, places[::-1] if event.from_back else places, now_ns)
        # The first message is sent at once, so that the client knows the lease's number.
        return self._advance(lease) or [self._progress(lease, (), (), ())]

    def release(
        self,
        session: Session,
        number: int,
        corrupt: Sequence[int] = (),
        outcome: str = "complete",
    ) -> tuple[ReleaseResult, list[Action]]:
        """End a lease. Blocks that the client found corrupt are no longer served.

        A load in progress gets its last message. ``outcome`` is the metric label of the blocks
        that were handed out.
        """
        lease = session.loads.pop(number, None)
        if lease is None:
            return ReleaseResult(held=False), []
        for place in corrupt:
            if place < lease.num_sent:
                self._metrics.add(MISS_BLOCKS, tier=TierName.CPU, reason="checksum")
                self._cache.condemn(lease.rows[place])
        self._count_copied(lease, outcome)
        actions: list[Action] = []
        if not lease.is_ended:
            lease.end = "released"
            self._finish(lease)
            actions = [self._progress(lease, (), (), (), lease.end)]
        self._cut(lease, 0)
        return ReleaseResult(held=True), actions

    def block_ready(self, row: int) -> list[Action]:
        """Note that a row became ready in the CPU tier."""
        self._remaining.pop(row, None)
        actions: list[Action] = []
        for lease in list(self._waiting.pop(row, {}).values()):
            actions += self._advance(lease)
        return actions

    def block_missed(self, row: int, fate: Fate, now_ns: int) -> list[Action]:
        """Note that the read of a claimed row missed: try the next tier, or end the loads there.

        Afterwards the row is either claimed and being read from another tier, or abandoned.
        """
        while self._waiting.get(row) and self._remaining.get(row):
            tier = self._remaining[row].pop(0)
            lane = self._transfers.lanes.get(tier)
            if lane and lane.is_usable(now_ns):
                for lease in self._waiting[row].values():
                    lease.tiers[lease.rows.index(row)] = tier
                    self._transfers.read(row, tier, lease.number, now_ns)
                return []
        return self.block_lost(row, "failed", fate)

    def block_stuck(self, row: int, fate: Fate = Fate.DEADLINE) -> list[Action]:
        """End every load that waits for a row whose read may never end, and keeps its slot.

        No other tier is tried: its bytes would need the same slot.
        """
        actions: list[Action] = []
        for lease in list(self._waiting.pop(row, {}).values()):
            self._count_late(lease)
            self._end_at(lease, lease.rows.index(row), "late", fate)
            actions += self._advance(lease)
        return actions

    def block_lost(self, row: int, end: str, fate: Fate = Fate.NOT_OFFERED) -> list[Action]:
        """End every load that waits for a claimed row, and abandon the row."""
        self._remaining.pop(row, None)
        actions: list[Action] = []
        for lease in list(self._waiting.pop(row, {}).values()):
            self._end_at(lease, lease.rows.index(row), end, fate)
            actions += self._advance(lease)
        self._cache.abandon(row)
        return actions

    def expire(self, sessions: Iterable[Session], now_ns: int) -> list[Action]:
        """End loads past their deadline, and leases past their expiry."""
        actions: list[Action] = []
        for session in sessions:
            for lease in list(session.loads.values()):
                if not lease.is_ended and lease.deadline_ns <= now_ns:
                    self._count_late(lease)
                    self._end_at(lease, lease.num_ready, "late", Fate.DEADLINE)
                    actions += self._advance(lease)
                if lease.expires_ns <= now_ns:
                    del session.loads[lease.number]
                    self._count_copied(lease, "late")
                    self._cut(lease, 0)
        return actions

    def _gather(
        self, lease: LoadLease, before: Rows, run: BlockRun, places: range, now_ns: int
    ) -> None:
        """Pin blocks in the CPU tier, claim and queue the others; stop where there is no room."""
        used = np.concatenate([before, run.rows])
        mark = self._allocator.touch(used, run.payload_bytes, now_ns)
        self._cache.note_loaded(run.rows)
        for place in places:
            row, tiers = int(run.rows[place]), run.sources(place)
            if not self._may_hold(lease, row) or not self._bring(lease, row, tiers, mark, now_ns):
                lease.end = "no_room"
                self._miss_fates.count_load(
                    lease.decision, Fate.REFUSED_FULL, len(run) - len(lease.rows)
                )
                break
            self._cache.pin(row)
            lease.leased.add(row, self._cache.size_of(row))
            lease.rows.append(row)
            if self._is_ready(row):
                lease.tiers.append(TierName.CPU)
                continue
            # A block being read counts for the tier it is read from, even if another load asked.
            lease.tiers.append(self._transfers.reading(row) or tiers[0])
            self._waiting[row][lease.number] = lease

    def _may_hold(self, lease: LoadLease, row: int) -> bool:
        """Return whether one more block is within the engine's share."""
        if self._cache.is_held(row):
            return True
        slots, size, num_bytes = self._cache.slots, self._cache.size_of(row), lease.leased.num_bytes
        left_bytes = slots.reserved_bytes - slots.held_bytes - size
        return not num_bytes or num_bytes + size <= ENGINE_SHARE * left_bytes

    def _bring(
        self, lease: LoadLease, row: int, tiers: tuple[TierName, ...], mark: int, now_ns: int
    ) -> bool:
        if self._cache.state(row, TierName.CPU) != Residency.ABSENT:
            self._transfers.join_read(row, lease.number, now_ns)
            return True
        if not self._allocator.claim(row, mark):
            return False
        self._remaining[row] = list(tiers[1:])
        self._transfers.read(row, tiers[0], lease.number, now_ns)
        return True

    def _advance(self, lease: LoadLease) -> list[Action]:
        """Announce the blocks that became ready since the last message, if any."""
        if lease.is_ended:
            return []
        rows = lease.rows
        while lease.num_ready < len(rows) and self._is_ready(rows[lease.num_ready]):
            lease.num_ready += 1
        if lease.num_ready < len(rows) and self._is_condemned(rows[lease.num_ready]):
            self._end_at(lease, lease.num_ready, "failed", Fate.FAILED_CHECK)
        is_last = lease.num_ready == len(rows)
        if lease.num_ready == lease.num_sent and not is_last:
            return []
        fresh = rows[lease.num_sent : lease.num_ready]
        tiers = tuple(lease.tiers[lease.num_sent : lease.num_ready])
        lease.num_sent = lease.num_ready
        if is_last:
            self._finish(lease)
        offsets = self._cache.offsets(fresh)
        checksums = tuple(self._cache.checksum(row) for row in fresh)
        end = lease.end if is_last else ""
        return [self._progress(lease, offsets, checksums, tiers, end)]

    @staticmethod
    def _progress(
        lease: LoadLease,
        offsets: tuple[int, ...],
        checksums: tuple[bytes, ...],
        tiers: tuple[TierName, ...],
        end: str = "",
    ) -> LoadUpdate:
        return LoadUpdate(
            lease.call, lease.number, offsets, checksums, tiers, end, num_blocks=lease.num_found
        )

    def _is_ready(self, row: int) -> bool:
        return self._cache.state(row, TierName.CPU) == Residency.READY

    def _is_condemned(self, row: int) -> bool:
        return self._cache.state(row, TierName.CPU) == Residency.EVICTING

    def _end_at(self, lease: LoadLease, length: int, end: str, fate: Fate) -> None:
        """End a load after its first ``length`` rows; ``fate`` is that of the next row."""
        lease.end = end
        self._miss_fates.count_load(lease.decision, fate, len(lease.rows) - length)
        self._cut(lease, length)

    def _cut(self, lease: LoadLease, length: int) -> None:
        """Remove a lease's rows from ``length`` on.

        Reads in flight go on, as promotions; queued reads that no lease wants any more are
        cancelled.
        """
        for row in lease.rows[length:]:
            waiting = self._waiting.get(row, {})
            waiting.pop(lease.number, None)
            lease.leased.remove(row, self._cache.size_of(row))
            self._cache.unpin(row)
            if waiting:
                continue
            self._waiting.pop(row, None)
            if self._transfers.cancel_read(row):
                self._remaining.pop(row, None)  # none for a prefetched row
                self._cache.abandon(row)
        del lease.rows[length:], lease.tiers[length:]
        if lease.num_ready >= length:
            self._transfers.forget_load(lease.number)

    def _finish(self, lease: LoadLease) -> None:
        """Note that no more blocks are handed out."""
        lease.is_ended = True
        count_load(self._metrics, lease)

    def _count_copied(self, lease: LoadLease, outcome: str) -> None:
        """Count the bytes that were handed to the engine to copy."""
        if not lease.purpose.copies:
            return
        num_bytes = self._cache.payload_bytes(lease.rows[: lease.num_sent])
        self._metrics.add(
            TRANSFER_BYTES, num_bytes, route=TransferRoute.CPU_TO_GPU, outcome=outcome
        )

    def _count_late(self, lease: LoadLease) -> None:
        for tier in lease.tiers[lease.num_ready :]:
            self._metrics.add(MISS_BLOCKS, tier=tier, reason="late")
