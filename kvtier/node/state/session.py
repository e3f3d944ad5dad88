"""Sessions: the registered engines, their leases and their request counters.

A session is bound to a ticket: the connection over which the client got the arena. When the kernel
closes that connection, the client's process is gone and cannot touch the arena any more, so all its
leases end at once. A client that merely hangs keeps its connection: its load leases expire at their
deadline (it is notified, and discards what it copied), while the slots of its unfinished stores
stay reserved, since it may still be writing to them.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvtier.core.layout import KVLayout
from kvtier.core.plan import EngineLoad, PlanEvaluation, PlanOutcome, PlanRequest
from kvtier.core.request import LoadPurpose
from kvtier.core.residency import TierName

__all__ = ["EngineReport", "Leased", "LoadLease", "RequestCounters", "Session", "StoreLease"]


@dataclass(slots=True)
class RequestCounters:
    """Counters of one engine since it registered; rates are computed from two readings."""

    requests: int = 0
    """Lookups answered; engines do not look up requests that are completely in the GPU tier."""
    prompt_tokens: int = 0
    gpu_tokens: int = 0
    """Prompt tokens that the engine had in its GPU tier."""
    found_tokens: int = 0
    restored_tokens: int = 0
    stored_tokens: int = 0
    first_tokens: int = 0
    """Requests for which the engine reported an outcome."""
    first_token_s: float = 0.0
    """Sum of their times to first token."""
    saved_s: float = 0.0
    lost_s: float = 0.0

    def count_lookup(self, ask: PlanRequest) -> None:
        """Count a lookup."""
        self.requests += 1
        self.prompt_tokens += ask.num_tokens
        self.gpu_tokens += ask.first_token
        self.found_tokens += ask.num_found * ask.block_tokens

    def count_outcome(
        self, ask: PlanRequest, outcome: PlanOutcome, evaluation: PlanEvaluation
    ) -> None:
        """Count the reported outcome of a request."""
        self.first_tokens += 1
        self.first_token_s += outcome.ttft_s
        self.restored_tokens += sum(length for _, length in outcome.tiers) * ask.block_tokens
        self.saved_s += sum(evaluation.saved_s.values())
        self.lost_s += sum(evaluation.lost_s.values())


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's last report of its own tier."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    used_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True)
class Leased:
    """The rows that one engine's loads hold; a row shared by several loads counts once."""

    counts: Counter[int] = field(default_factory=Counter)
    """Number of leases that hold each row."""
    num_bytes: int = 0

    def add(self, row: int, size: int) -> None:
        """Note that one more lease holds a row."""
        self.counts[row] += 1
        if self.counts[row] == 1:
            self.num_bytes += size

    def remove(self, row: int, size: int) -> None:
        """Note that one lease fewer holds a row."""
        self.counts[row] -= 1
        if not self.counts[row]:
            del self.counts[row]
            self.num_bytes -= size


@dataclass(slots=True)
class LoadLease:
    """Blocks leased to be copied out of the arena; all of them are pinned."""

    number: int
    call: int
    leased: Leased
    """Totals of the session that the lease belongs to."""
    rows: list[int]
    """Rows in the order in which they are announced: that of the chain, or the reverse."""
    tiers: list[TierName]
    decision: int
    num_found: int
    """Blocks of the run that the lease was made for; some may not have found room."""
    num_ordered: int
    """Blocks that the engine asked for."""
    block_tokens: int
    deadline_ns: int
    expires_ns: int
    end: str
    """Why the run ends where it does; sent in the last message."""
    purpose: LoadPurpose
    is_of_first_rank: bool
    num_ready: int = 0
    num_sent: int = 0
    is_ended: bool = False
    """The last message was sent; the lease lasts until it is released or expires."""


@dataclass(slots=True)
class StoreLease:
    """Blocks leased to be copied into the arena, in chain order; all of them in state writing."""

    number: int
    rows: list[int]
    num_bytes: int


@dataclass(slots=True)
class Session:
    """One registered engine."""

    token: str
    ticket: str
    key_space: bytes
    layout: KVLayout
    engine: str
    transport: str
    pid: int
    lease_ns: int
    """Lease time at registration, which the client relies on."""
    can_split: bool = False
    """Whether the engine can compute the front of a prompt while the back is loaded."""
    rank: int = 0
    """Rank among the workers that serve a request together, each with its own session."""
    report: EngineReport = EngineReport()
    load: EngineLoad = field(default_factory=EngineLoad)
    """The engine's load when it last reported."""
    loads: dict[int, LoadLease] = field(default_factory=dict)
    stores: dict[int, StoreLease] = field(default_factory=dict)
    leased: Leased = field(default_factory=Leased)
    counters: RequestCounters = field(default_factory=RequestCounters)

    @property
    def is_of_first_rank(self) -> bool:
        """Return whether requests are counted for this rank; their tokens span all ranks."""
        return self.rank == 0

    @property
    def store_bytes(self) -> int:
        """Return the arena bytes held by unfinished stores."""
        return sum(lease.num_bytes for lease in self.stores.values())
