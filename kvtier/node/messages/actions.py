"""What a node wants done: answers to calls, and work for tiers and sessions."""

from dataclasses import dataclass

from kvtier.core.identity import BlockHash, BlockHeader, Selection
from kvtier.core.plan import RestorePlan
from kvtier.core.residency import TierName
from kvtier.core.slots import slot_bytes

__all__ = [
    "Action",
    "Answer",
    "CallReply",
    "EmptyEngineTier",
    "EngineNotEmptied",
    "ExistsQuery",
    "LoadUpdate",
    "LookupResult",
    "PinResult",
    "Purge",
    "Read",
    "Refused",
    "Registration",
    "ReleaseResult",
    "StoreGrant",
    "StoreResult",
    "TierDropped",
    "TransferBlock",
    "WarmResult",
    "Write",
]


@dataclass(frozen=True, slots=True)
class TransferBlock:
    """One block on its way: who it is, and its slot's offset in the arena."""

    header: BlockHeader
    offset: int

    @property
    def slot_bytes(self) -> int:
        """Return the size of the slot: the payload in whole pages."""
        return slot_bytes(self.header.payload_bytes)


@dataclass(frozen=True, slots=True)
class Read:
    """Fill arena slots from a tier; ends in ``ReadDone``."""

    transfer: int
    tier: TierName
    blocks: tuple[TransferBlock, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Write:
    """Copy arena slots to a tier; ends in ``WriteDone``."""

    transfer: int
    tier: TierName
    blocks: tuple[TransferBlock, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ExistsQuery:
    """Ask a shared tier what it may have; ends in ``ExistsQueryDone``."""

    query: int
    tier: TierName
    hashes: tuple[BlockHash, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Purge:
    """Take a selection of blocks out of a tier; ends in ``PurgeDone``."""

    tier: TierName
    selection: Selection
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class EmptyEngineTier:
    """Have a session's engine empty its own tier; it answers with a ``Report``."""

    session: str
    order: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that cannot be served: ``kind`` is a closed set, ``message`` is for people."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Registration:
    """A new session."""

    session: str
    boot: str
    lease_ns: int
    """How long a load's blocks stay in place after its deadline."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Where the leading blocks are, and why the run ends."""

    runs: tuple[tuple[TierName, int], ...]
    """Consecutive blocks that one tier would serve, with how many they are."""
    reason: str
    plan: RestorePlan | None = None
    """What to do with them; without one all of them are restored."""
    max_offload_tokens: int | None = None
    """What it pays to offer of this request; None: all of it."""
    is_empty: bool = False
    """No tier has any block of the key space."""

    @property
    def num_blocks(self) -> int:
        """Return how many blocks could be loaded."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Whether the lease held until now."""

    held: bool


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Slots to copy blocks into: ``indexes`` of the chain and ``offsets`` in the arena."""

    lease: int
    indexes: tuple[int, ...]
    offsets: tuple[int, ...]
    present_blocks: int
    rejected_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class StoreResult:
    """How many blocks were published."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class PinResult:
    """How many leading blocks are kept, and why not the others."""

    num_blocks: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WarmResult:
    """How many leading blocks are in the CPU tier or on their way there, and why not the others."""

    num_ready: int
    num_coming: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineNotEmptied:
    """An engine that did not empty its own tier when it was told to."""

    engine: str
    pid: int
    why: str


@dataclass(frozen=True, slots=True)
class TierDropped:
    """What one tier lost, and what it kept because it was in use until the deadline."""

    tier: TierName
    num_blocks: int
    num_bytes: int
    kept_blocks: int = 0
    error: str = ""
    keeping: tuple[EngineNotEmptied, ...] = ()
    """Engines that still have what they had; of the GPU tier."""


Answer = (
    Refused
    | Registration
    | LookupResult
    | ReleaseResult
    | StoreGrant
    | StoreResult
    | PinResult
    | WarmResult
    | tuple[TierDropped, ...]
    | None
)


@dataclass(frozen=True, slots=True)
class CallReply:
    """The one answer to a call."""

    call: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class LoadUpdate:
    """The next blocks of a load that are in place; the last message has an ``end``."""

    call: int
    lease: int
    offsets: tuple[int, ...]
    checksums: tuple[bytes, ...]
    tiers: tuple[TierName, ...]
    end: str = ""
    num_blocks: int = 0
    """Of the lease as it was made: a load from the back begins with the last of them. 0: as many
    as were asked for."""


Action = CallReply | LoadUpdate | Read | Write | ExistsQuery | Purge | EmptyEngineTier
