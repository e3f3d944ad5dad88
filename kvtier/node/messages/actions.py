"""The node's output: answers to calls, and work for tiers and engines."""

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
    """A block to transfer, and the offset of its slot in the arena."""

    header: BlockHeader
    offset: int

    @property
    def slot_bytes(self) -> int:
        """Return the size of the slot: the payload rounded up to whole pages."""
        return slot_bytes(self.header.payload_bytes)


@dataclass(frozen=True, slots=True)
class _Transfer:
    transfer: int
    tier: TierName
    blocks: tuple[TransferBlock, ...]
    deadline_ns: int


class Read(_Transfer):
    """Reads blocks from a tier into arena slots; ends in ``ReadDone``."""

    __slots__ = ()


class Write(_Transfer):
    """Writes blocks from arena slots to a tier; ends in ``WriteDone``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ExistsQuery:
    """Asks a shared tier which blocks it may have; ends in ``ExistsQueryDone``."""

    query: int
    tier: TierName
    hashes: tuple[BlockHash, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Purge:
    """Removes a selection of blocks from a tier; ends in ``PurgeDone``."""

    tier: TierName
    selection: Selection
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class EmptyEngineTier:
    """Asks an engine to empty its own tier; it answers with an ``EngineTierReport``."""

    session: str
    order: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that cannot be served: ``kind`` is from a closed set, ``message`` is for people."""

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
    """Where the leading blocks are, why the run ends, and how many blocks to restore."""

    runs: tuple[tuple[TierName, int], ...]
    """Consecutive runs of blocks: the tier that would serve each run, and its number of blocks."""
    reason: str
    plan: RestorePlan | None = None
    """How many blocks to restore and how; None restores all of them."""
    max_offload_tokens: int | None = None
    """How many tokens of the request are worth offering; None for all."""
    is_empty: bool = False
    """No tier has any block of the key space."""

    @property
    def num_blocks(self) -> int:
        """Return how many blocks can be loaded."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Whether the lease was still valid."""

    held: bool


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Slots to copy blocks into: ``indexes`` in the chain and ``offsets`` in the arena."""

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
    """The number of leading blocks that are kept, and why no more are."""

    num_blocks: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WarmResult:
    """The number of leading blocks in the CPU tier or being read, and why no more are."""

    num_ready: int
    num_coming: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineNotEmptied:
    """An engine that did not empty its own tier when asked to."""

    engine: str
    pid: int
    why: str


@dataclass(frozen=True, slots=True)
class TierDropped:
    """The blocks that one tier dropped, and those it kept because they were still in use."""

    tier: TierName
    num_blocks: int
    num_bytes: int
    kept_blocks: int = 0
    error: str = ""
    keeping: tuple[EngineNotEmptied, ...] = ()
    """Engines whose GPU tier still holds its blocks."""


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
    """The next blocks of a load that are in place; only the last message has an ``end``."""

    call: int
    lease: int
    offsets: tuple[int, ...]
    checksums: tuple[bytes, ...]
    tiers: tuple[TierName, ...]
    end: str = ""
    num_blocks: int = 0
    """Number of blocks that the lease was made for; a load from the back starts with the last one.
    0: as many as requested."""


Action = CallReply | LoadUpdate | Read | Write | ExistsQuery | Purge | EmptyEngineTier
