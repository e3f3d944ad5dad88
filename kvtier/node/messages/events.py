"""The node's input: calls from clients, completions from tiers, requests of operators, and time.

Calls carry a ``call`` number chosen by the driver; exactly one ``CallReply``, or one final
``LoadUpdate``, answers each.
"""

from dataclasses import dataclass, field

from kvtier.core.identity import EVERYTHING, Headers, Selection
from kvtier.core.layout import KVLayout
from kvtier.core.plan import EngineLoad, ModelFlops, PlanOutcome, StepSample
from kvtier.core.request import NO_TRAITS, LoadPurpose, RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.slow_tier import AdminState, SlowTier
from kvtier.tiers.base import MissReason, Removed, WriteOutcome

__all__ = [
    "Announce",
    "AnnouncedRequest",
    "BlocksLost",
    "BlocksRecovered",
    "BlocksVerified",
    "ChainCall",
    "CompleteStore",
    "ConfigureTier",
    "DaemonStopping",
    "Drop",
    "EngineTierReport",
    "Event",
    "ExistsQueryDone",
    "ForgetRows",
    "Load",
    "Lookup",
    "MarkUnverified",
    "PinBlocks",
    "PrepareStore",
    "PurgeDone",
    "ReadDone",
    "Register",
    "Release",
    "SessionCall",
    "SessionEnded",
    "SetAdminState",
    "SetWriteAllowance",
    "SettingsChanged",
    "SlabsReserved",
    "Tick",
    "TierUp",
    "Warm",
    "WriteDone",
]


class Event:
    """Base class of all events."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SessionCall(Event):
    """A call of a registered engine."""

    call: int
    session: str


@dataclass(frozen=True, slots=True)
class ChainCall(SessionCall):
    """A call about the blocks of a chain from ``first`` on; ``hashes`` are joined."""

    tenant: bytes
    hashes: bytes
    first: int


@dataclass(frozen=True, slots=True)
class Register(Event):
    """An engine registers; ``ticket`` ties its session to its arena connection."""

    call: int
    ticket: str
    key_space: bytes
    layout: KVLayout
    engine: str
    transport: str
    pid: int
    flops: ModelFlops = field(default_factory=ModelFlops)
    can_split: bool = False
    """Whether the engine can compute the front of a prompt while the back is loaded."""
    rank: int = 0
    """Rank among the workers that serve a request together."""


@dataclass(frozen=True, slots=True)
class AnnouncedRequest:
    """A request that is queued, or that the engine serves from its own GPU tier."""

    traits: RequestTraits
    tenant: bytes
    hashes: bytes
    first: int
    """The engine holds the blocks before this index itself."""


@dataclass(frozen=True, slots=True)
class Announce(SessionCall):
    """Announces new requests, each once and before its lookup, and reports finished ones.

    Uses are counted here. Blocks that a request lacks are prefetched into the CPU tier and kept
    there until its turn.
    """

    requests: tuple[AnnouncedRequest, ...]
    over: tuple[str, ...] = ()
    """Ids of requests that ended, or will not be looked up."""


@dataclass(frozen=True, slots=True)
class Lookup(ChainCall):
    """Asks which blocks from ``first`` on can be loaded, and how many of them are worth restoring.

    Counts as a use of the chain unless its request was announced.
    """

    deadline_ns: int
    traits: RequestTraits = NO_TRAITS
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class Load(ChainCall):
    """Leases as many leading blocks from ``first`` on as possible in the arena.

    With ``from_back`` they are announced from the last block on, while the engine computes the
    first ones; the engine does not wait for blocks that it has computed by then.
    """

    deadline_ns: int
    decision: int = 0
    """Number of the decision that led to this load, or 0."""
    from_back: bool = False
    purpose: LoadPurpose = LoadPurpose.COPY


@dataclass(frozen=True, slots=True)
class Release(Event):
    """Ends a load's lease. ``call`` is None if no caller waits for the answer.

    ``corrupt`` lists blocks whose bytes failed their check, as indexes in the order announced.
    """

    call: int | None
    session: str
    lease: int
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareStore(ChainCall):
    """Leases slots for the blocks from ``first`` on that are neither cached nor refused."""

    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks from this index on hold generated tokens; -1 if none does."""


@dataclass(frozen=True, slots=True)
class CompleteStore(SessionCall):
    """Publishes the leading ``len(checksums)`` blocks of a store's lease, and drops the others."""

    lease: int
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EngineTierReport(SessionCall):
    """An engine reports its GPU tier; ``order`` is the command that this answers, or 0."""

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    hit_tokens: int
    order: int = 0
    removed: Removed = field(default_factory=Removed)
    refusal: str = ""
    """Why the engine did not empty its tier."""
    steps: tuple[StepSample, ...] = ()
    """Duration and load of the engine's steps since its last report."""
    outcomes: tuple[PlanOutcome, ...] = ()
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class SessionEnded(Event):
    """A ticket's connection is closed, so the client no longer maps the arena."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Drop(Event):
    """Drops a selection of blocks from tiers, after transfers of them to these tiers have ended."""

    call: int
    tiers: tuple[TierName, ...]
    deadline_ns: int
    selection: Selection = EVERYTHING


@dataclass(frozen=True, slots=True)
class PinBlocks(Event):
    """Keeps a chain's blocks for ``ttl_ns`` within the budget for pins; 0 unpins them."""

    call: int
    key_space: bytes
    tenant: bytes
    hashes: bytes
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Warm(Event):
    """Prefetches a chain's blocks into the CPU tier."""

    call: int
    key_space: bytes
    tenant: bytes
    hashes: bytes
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ReadDone(Event):
    """A read ended, with the checksum or miss reason of each block, or ``fault`` for all."""

    transfer: int
    results: tuple[bytes | MissReason, ...]
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class WriteDone(Event):
    """A write ended. A result of None marks a block whose bytes in the arena failed their check."""

    transfer: int
    results: tuple[WriteOutcome | None, ...]
    evicted: bytes
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ExistsQueryDone(Event):
    """A shared tier reported which blocks it may have; empty if it did not answer."""

    query: int
    present: tuple[bool | None, ...]


@dataclass(frozen=True, slots=True)
class PurgeDone(Event):
    """A selection of blocks was removed from a tier, or removing it failed with ``fault``."""

    tier: TierName
    selection: Selection
    removed: Removed
    fault: str = ""


@dataclass(frozen=True, slots=True)
class BlocksLost(Event):
    """A tier can no longer serve these blocks; ``hashes`` are joined."""

    tier: TierName
    hashes: bytes
    reason: str
    """``corrupt``, ``expired`` or ``lost``."""


@dataclass(frozen=True, slots=True)
class MarkUnverified(Event):
    """A shared tier may have lost blocks in this range of index rows: they become unverified."""

    tier: TierName
    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class BlocksVerified(Event):
    """A shared tier was queried for unverified blocks; ``hashes`` are joined."""

    tier: TierName
    hashes: bytes
    present: tuple[bool | None, ...]
    """For each block whether the tier has it; None if that is still unknown."""


@dataclass(frozen=True, slots=True)
class TierUp(Event):
    """A tier started or stopped answering."""

    tier: TierName
    is_up: bool


@dataclass(frozen=True, slots=True)
class SetAdminState(Event):
    """Sets the administrative state of a tier."""

    tier: TierName
    admin_state: AdminState


@dataclass(frozen=True, slots=True)
class ConfigureTier(Event):
    """Sets the settings of a detached or new tier that is about to be attached.

    ``BlocksRecovered`` with its contents follows before the tier becomes active.
    """

    settings: SlowTier


@dataclass(frozen=True, slots=True)
class ForgetRows(Event):
    """Forgets the blocks that a detached tier held in this range of index rows."""

    tier: TierName
    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class SetWriteAllowance(Event):
    """Limits the writes to a tier until further notice; None removes the limit."""

    tier: TierName
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """The configuration was reloaded."""

    lease_ns: int
    """Lease time of engines that register from now on."""
    pin_share: float
    tiers: tuple[SlowTier, ...]


@dataclass(frozen=True, slots=True)
class DaemonStopping(Event):
    """The daemon is about to stop: no more calls come, and valuable blocks are flushed."""


@dataclass(frozen=True, slots=True)
class SlabsReserved(Event):
    """The first ``num_slabs`` slabs of the arena are backed by memory."""

    num_slabs: int


@dataclass(frozen=True, slots=True)
class BlocksRecovered(Event):
    """A tier was found to hold these blocks when it was opened; each block is reported once."""

    tier: TierName
    headers: Headers


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""
