"""What happens to a node: calls from clients, completions from tiers, and the passing of time.

Calls carry a ``call`` number chosen by the driver; exactly one ``Reply`` (or one final
``Progress``) goes back for each.
"""

from dataclasses import dataclass, field

from kvtier.core.identity import EVERYTHING, Headers, Selection
from kvtier.core.layout import KVLayout
from kvtier.core.plan import EngineLoad, ModelFlops, PlanOutcome, StepSample
from kvtier.core.request import NO_TRAITS, LoadPurpose, RequestTraits
from kvtier.core.residency import TierName
from kvtier.node.messages.slow_tier import AdminState, SlowTier
from kvtier.tiers.base import MissReason, Removed, WriteOutcome

__all__ = [
    "Announce",
    "AnnouncedRequest",
    "BlocksLost",
    "BlocksRecovered",
    "BlocksVerified",
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


@dataclass(frozen=True, slots=True)
class Register:
    """An engine presents itself; ``ticket`` ties the session to its arena connection."""

    call: int
    ticket: str
    key_space: bytes
    layout: KVLayout
    engine: str
    transport: str
    pid: int
    flops: ModelFlops = field(default_factory=ModelFlops)
    can_split: bool = False
    """It can compute the front of a prompt while the back is loaded."""
    rank: int = 0
    """Of the workers that serve a request together."""


@dataclass(frozen=True, slots=True)
class AnnouncedRequest:
    """A request that waits for its turn, or that the engine's own tier answers."""

    traits: RequestTraits
    tenant: bytes
    hashes: bytes
    first: int
    """Blocks before this one the engine has itself."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Say which requests have come, each once, before it is looked up; and which are over.

    This is where uses are counted. What a request lacks is brought into the CPU tier, and kept
    there until its turn.
    """

    call: int
    session: str
    requests: tuple[AnnouncedRequest, ...]
    over: tuple[str, ...] = ()
    """Ids of requests that ended, or will not be looked up."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask which blocks from ``first`` on could be loaded, and how many of them should be.

    Counts as a use where its request was not announced.
    """

    call: int
    session: str
    tenant: bytes
    hashes: bytes
    first: int
    deadline_ns: int
    traits: RequestTraits = NO_TRAITS
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class Load:
    """Lease blocks from ``first`` on in the arena, as many leading ones as can be had.

    ``from_back``: they are announced from the last one on, while the engine computes the first
    ones; what it has computed by then it does not wait for.
    """

    call: int
    session: str
    tenant: bytes
    hashes: bytes
    first: int
    deadline_ns: int
    decision: int = 0
    """Of the plan that led to this load, or 0."""
    from_back: bool = False
    purpose: LoadPurpose = LoadPurpose.COPY


@dataclass(frozen=True, slots=True)
class Release:
    """End a load's lease. ``call`` is None where nobody waits for the answer.

    ``corrupt`` names the blocks, counted in the order announced, whose bytes failed their check.
    """

    call: int | None
    session: str
    lease: int
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareStore:
    """Lease slots for the blocks from ``first`` on that are neither here nor refused."""

    call: int
    session: str
    tenant: bytes
    hashes: bytes
    first: int
    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks from this one on hold generated tokens; -1: none does."""


@dataclass(frozen=True, slots=True)
class CompleteStore:
    """Publish the leading ``len(checksums)`` blocks of a store's lease, drop the others."""

    call: int
    session: str
    lease: int
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EngineTierReport:
    """What an engine's own tier holds; ``order`` is the one this answers, or 0."""

    call: int
    session: str
    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    hit_tokens: int
    order: int = 0
    removed: Removed = field(default_factory=Removed)
    refusal: str = ""
    """Why the order was not followed."""
    steps: tuple[StepSample, ...] = ()
    """What the engine's steps took since the last report."""
    outcomes: tuple[PlanOutcome, ...] = ()
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The connection behind a ticket is gone, and with it the client's mapping of the arena."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Take a selection of blocks out of tiers, once what is on its way to them has arrived."""

    call: int
    tiers: tuple[TierName, ...]
    deadline_ns: int
    selection: Selection = EVERYTHING


@dataclass(frozen=True, slots=True)
class PinBlocks:
    """Keep a chain's blocks for a time, or no longer (``ttl_ns`` 0), within the budget for that."""

    call: int
    key_space: bytes
    tenant: bytes
    hashes: bytes
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Warm:
    """Bring a chain's blocks into the CPU tier."""

    call: int
    key_space: bytes
    tenant: bytes
    hashes: bytes
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A transfer up ended: for each block its checksum or why it is a miss; or ``fault``."""

    transfer: int
    results: tuple[bytes | MissReason, ...]
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A transfer down ended; ``None`` marks a block whose bytes in the arena failed their check."""

    transfer: int
    results: tuple[WriteOutcome | None, ...]
    evicted: bytes
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ExistsQueryDone:
    """A shared tier answered which blocks it may have; empty if it did not answer."""

    query: int
    present: tuple[bool | None, ...]


@dataclass(frozen=True, slots=True)
class PurgeDone:
    """A selection of blocks was taken out of a tier, or could not be."""

    tier: TierName
    selection: Selection
    removed: Removed
    fault: str = ""


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """A tier found that it can no longer serve these blocks; ``hashes`` are joined."""

    tier: TierName
    hashes: bytes
    reason: str
    """``corrupt``, ``expired`` or ``lost``."""


@dataclass(frozen=True, slots=True)
class MarkUnverified:
    """A shared tier may have lost its blocks in these rows of the index: they become unverified."""

    tier: TierName
    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class BlocksVerified:
    """A shared tier was asked for unverified blocks; ``hashes`` are joined."""

    tier: TierName
    hashes: bytes
    present: tuple[bool | None, ...]
    """Whether the tier has each block; None if that is still unknown."""


@dataclass(frozen=True, slots=True)
class TierUp:
    """A tier began or stopped answering."""

    tier: TierName
    is_up: bool


@dataclass(frozen=True, slots=True)
class SetAdminState:
    """An operator wants a tier used for this."""

    tier: TierName
    admin_state: AdminState


@dataclass(frozen=True, slots=True)
class ConfigureTier:
    """A tier that is off duty, or new, is about to be put on; what it holds comes first."""

    settings: SlowTier


@dataclass(frozen=True, slots=True)
class ForgetRows:
    """A tier that is off duty held some of these rows of the index, and they are lost to us."""

    tier: TierName
    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class SetWriteAllowance:
    """So much may be written to a tier for the time being; None: as much as there is."""

    tier: TierName
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """The operator wants the node to go by these settings from now on."""

    lease_ns: int
    """For engines that register from now on."""
    pin_share: float
    tiers: tuple[SlowTier, ...]


@dataclass(frozen=True, slots=True)
class DaemonStopping:
    """The daemon is about to stop: no more calls come, and what is worth it is written below."""


@dataclass(frozen=True, slots=True)
class SlabsReserved:
    """The first ``num_slabs`` slabs of the arena have memory behind them."""

    num_slabs: int


@dataclass(frozen=True, slots=True)
class BlocksRecovered:
    """A persistent tier was found to hold these blocks; each is told once."""

    tier: TierName
    headers: Headers


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Register
    | Announce
    | Lookup
    | Load
    | Release
    | PrepareStore
    | CompleteStore
    | EngineTierReport
    | SessionEnded
    | Drop
    | PinBlocks
    | Warm
    | ReadDone
    | WriteDone
    | ExistsQueryDone
    | PurgeDone
    | BlocksLost
    | MarkUnverified
    | BlocksVerified
    | TierUp
    | SetAdminState
    | ConfigureTier
    | ForgetRows
    | SetWriteAllowance
    | DaemonStopping
    | SettingsChanged
    | SlabsReserved
    | BlocksRecovered
    | Tick
)
