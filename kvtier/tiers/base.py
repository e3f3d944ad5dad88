"""The interface of every tier below the CPU tier, real, fake or wrapped.

Contract (tests/contract runs it against every implementation)
--------------------------------------------------------------
* Calls block, may come from several threads at once, and take whole batches.
* ``write`` publishes a block only when it is complete; a failed write leaves no trace. Writing a
  hash that is already stored returns ``STORED`` and changes nothing.
* ``read`` fills a buffer and returns a header only if the stored header identifies the requested
  block and the checksum matches. Anything else is a ``MissReason`` and leaves the buffer undefined.
  A damaged block is forgotten and may be written again at once. A request with the wrong key space,
  tenant or length is a miss and changes nothing.
* Outcomes are values. A device fault (no disk, no server, no answer) raises ``TierError`` for the
  whole batch and corrupts nothing. Some blocks of the batch may have been stored; the next write
  reports what was evicted for them.
* Each call ends by its ``deadline_ns`` (monotonic clock) or raises ``TierTimeout``. A system call
  cannot be interrupted, so a hung device may block its caller: run calls on expendable threads.
* After a call has returned or raised, the tier no longer touches the memory it was given.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtier.core.identity import BlockHash, BlockHeader, Headers, Selection
from kvtier.core.residency import TierName

__all__ = [
    "BlockRead",
    "BlockWrite",
    "Health",
    "HealthState",
    "MissReason",
    "Removed",
    "Scrubbed",
    "Tier",
    "TierProperties",
    "TierUsage",
    "WriteOutcome",
    "WriteReport",
]


@dataclass(frozen=True, slots=True)
class TierProperties:
    """Properties of the device, so that callers never switch on a tier's type."""

    name: TierName
    is_persistent: bool
    """Blocks survive the process."""
    is_shared: bool
    """Other nodes read and write the tier too, so only the tier itself knows what it holds."""
    num_workers: int
    """Number of calls that may usefully be in flight at once."""


class MissReason(StrEnum):
    """Why a block was not served. A closed set; each value is a metric label."""

    ABSENT = "absent"
    IDENTITY = "identity"
    CHECKSUM = "checksum"
    LENGTH = "length"
    HEADER = "header"
    SEAL = "seal"
    """The block is not protected as required, its key is unknown, or it was altered."""
    EXPIRED = "expired"
    """The block is older than the tier may serve."""


class WriteOutcome(StrEnum):
    """Result of writing one block."""

    STORED = "stored"
    REJECTED = "rejected"
    """The tier has no room, or the block is larger than it accepts."""


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """A block to store: its header with checksum, and its payload."""

    header: BlockHeader
    payload: memoryview


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block to read: its expected identity and the buffer for its payload.

    ``key_space`` and ``tenant`` must equal those of the stored header, or the read is a miss.
    ``into`` is at least as long as the payload; bytes beyond it are unchanged or overwritten with
    padding.
    """

    block_hash: BlockHash
    key_space: bytes
    tenant: bytes
    payload_bytes: int
    into: memoryview


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The outcome of each block in the order given, and the blocks evicted to make room."""

    outcomes: tuple[WriteOutcome, ...]
    evicted: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """Number and payload bytes of removed blocks."""

    num_blocks: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Removed") -> "Removed":
        return Removed(self.num_blocks + other.num_blocks, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """Result of one scrub step. Results of the steps of a pass add up."""

    num_blocks: int = 0
    num_bytes: int = 0
    """Bytes read from the device."""
    damaged: tuple[BlockHash, ...] = ()
    """Blocks that failed verification: quarantined, no longer served, free to be stored again."""
    expired: tuple[BlockHash, ...] = ()
    """Blocks forgotten because of their age."""
    evicted: tuple[BlockHash, ...] = ()
    """Other lost blocks that no write has reported, such as those in deleted files."""
    is_pass_over: bool = True
    """The next step starts a new pass with the first block."""


class HealthState(StrEnum):
    """State of a tier. A closed set; each value is a metric label."""

    UP = "up"
    DEGRADED = "degraded"
    """The tier serves some operations only; it may be read-only, for example."""
    OUT = "out"
    """The tier receives no calls except occasional health checks."""
    DRAINED = "drained"
    """An operator stopped new writes; reads continue."""
    DETACHED = "detached"
    """An operator detached the tier: it receives no calls, and others may use its device."""


@dataclass(frozen=True, slots=True)
class Health:
    """State of a tier and, unless it is up, the reason for an operator to read."""

    state: HealthState = HealthState.UP
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Occupancy of a tier. Bytes are those allocated on the device, with padding and headers.

    A shared tier reports zeros: only its server knows.
    """

    num_blocks: int
    used_bytes: int
    capacity_bytes: int
    detail: dict[str, str | int | float | bool] = field(default_factory=dict)
    generation: int = 0
    """Changes when the device may have lost blocks, as after a server restart or failover."""


class Tier(Protocol):
    """Stores blocks. See the module's contract."""

    @property
    def properties(self) -> TierProperties:
        """Return the properties of the device."""

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Store blocks; publish each one only when it is complete."""

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read blocks. Returns the verified header of each one, or why it is a miss."""

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Sequence[bool | None]:
        """Return for each hash whether a read may hit; None if unknown. Changes nothing."""

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Remove blocks. Unknown hashes are ignored."""

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Remove all blocks of a selection so that none of their bytes can be read again.

        An operator's command: it may use its whole deadline. Raises TierTimeout; blocks removed
        until then stay removed.
        """

    def health_check(self, deadline_ns: int) -> None:
        """Access the device as reads and writes do. Raises TierError if that fails."""

    def scratch(
        self, block_bytes: int, num_blocks: int, deadline_ns: int
    ) -> "AbstractContextManager[Tier]":
        """Open a temporary tier on the same device, to measure transfers.

        It has room for ``num_blocks`` blocks of ``block_bytes`` without evicting any block of this
        tier, and its blocks do not count as blocks of this tier. Raises TierFull if there is not
        enough free room. Blocks left in it are removed soon after the context ends, even if it ends
        in a crash.
        """

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify the next ``max_bytes`` or so of blocks and quarantine damaged ones.

        Continues where the last step ended. With 0 it verifies nothing, but still expires and
        reports blocks that are due. A shared tier has nothing to scrub.
        """

    def health(self) -> Health:
        """Return the tier's state from memory. Never blocks."""

    def headers(self) -> Iterator[Headers]:
        """Yield the headers of stored blocks in batches, older first; nothing for a shared tier."""

    def usage(self) -> TierUsage:
        """Return occupancy from memory. Never blocks."""

    def close(self) -> None:
        """Make persistent blocks durable and release the device. Idempotent."""
