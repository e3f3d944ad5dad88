"""A client and a daemon behind it without processes: what is stored, and which leases are open."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.client import Announcement, ClientDeadlines, FoundBlocks, HeldBlocks
from kvtier.core.identity import BlockHash
from kvtier.core.plan import EngineLoad, Estimate, PlanOutcome, PlanReason, RestorePlan, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import DaemonUnavailable

LEASE_S = 3600.0


@dataclass
class RecordedDaemon:
    """Of all ranks."""

    stored: dict[tuple[bytes, BlockHash], object] = field(default_factory=dict)
    """By tenant and hash, which ranks have of their own."""
    open_leases: set[int] = field(default_factory=set)
    is_away: bool = False
    lease_s: float = LEASE_S
    hold_most: int = 1000
    """Blocks that a load brings up, before it ends."""
    advised_tokens: int | None = None
    empty_s: float = 0.0
    """For how long who asks is told that there is nothing, where that is so."""
    num_decisions: int = 0
    outcomes: list[PlanOutcome] = field(default_factory=list)
    num_leases: int = 0


class RecordingClient:
    """As much of ``Client`` as the scheduler half uses."""

    def __init__(self, daemon: RecordedDaemon) -> None:
        self.daemon = daemon
        self.deadlines = ClientDeadlines(60.0, 60.0, 60.0, 1.0)
        self.is_closed = False

    @property
    def is_attached(self) -> bool:
        return not self.daemon.is_away

    def wait_attached(self, timeout_s: float) -> bool:
        assert timeout_s >= 0
        return self.is_attached

    def announce(self, announced: Sequence[Announcement], over: Sequence[str] = ()) -> None:
        pass

    def lookup(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        traits: RequestTraits,
        load: EngineLoad,
    ) -> FoundBlocks:
        self._reach()
        tiers = self._run(tenant, hashes, first)
        self.daemon.num_decisions += 1
        reason = PlanReason.ALL if tiers else PlanReason.NOTHING
        none = Estimate(0.0, 0.0)
        plan = RestorePlan(
            self.daemon.num_decisions, len(tiers), reason, restore=none, recompute=none
        )
        empty_s = 0.0 if self.daemon.stored else self.daemon.empty_s
        return FoundBlocks(tuple(tiers), "complete", plan, self.daemon.advised_tokens, empty_s)

    def hold(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        *,
        decision: int = 0,
        timeout_s: float | None = None,
    ) -> HeldBlocks:
        assert decision, "the plan's number is told"
        self._reach()
        tiers = self._run(tenant, hashes, first)[: self.daemon.hold_most]
        if not tiers:
            return HeldBlocks((), "late", 0.0, lambda: None)
        self.daemon.num_leases += 1
        number = self.daemon.num_leases
        self.daemon.open_leases.add(number)
        good_until_s = time.monotonic() + self.daemon.lease_s
        return HeldBlocks(
            tuple(tiers), "complete", good_until_s, lambda: self.daemon.open_leases.remove(number)
        )

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        assert load.waiting_tokens >= 0
        assert load.num_running >= 0

    def note_outcome(self, outcome: PlanOutcome) -> None:
        self.daemon.outcomes.append(outcome)

    def close(self) -> None:
        self.is_closed = True

    def _reach(self) -> None:
        if self.daemon.is_away:
            raise DaemonUnavailable("no daemon")

    def _run(self, tenant: bytes, hashes: Sequence[BlockHash], first: int) -> list[TierName]:
        tiers: list[TierName] = []
        for block_hash in hashes[first:]:
            if (tenant, block_hash) not in self.daemon.stored:
                break
            tiers.append(TierName.CPU if len(tiers) % 2 else TierName.SSD)
        return tiers
