"""The one interface of every tier below the CPU: real, fake and wrapped.

Contract (tests/contract runs it over every implementation)
-----------------------------------------------------------
* Calls block, may come from several threads at once, and take whole batches.
* ``write`` publishes a block only when it is complete; one that fails leaves no trace. Writing a
  hash that is there already is ``STORED`` and changes nothing.
* ``read`` fills a buffer and returns a header only for bytes whose header names the very block that
  was asked for and whose checksum holds. Anything else is a ``MissReason``; the buffer is then
  garbage. A block that is found damaged is forgotten, and may be written again at once. A question
  that names the wrong key space, tenant or length is a miss and changes nothing.
* Outcomes are values. A fault of the medium (no disk, no server, no answer) raises ``TierError``
  for the whole batch; nothing in the tier is then more wrong than before. Blocks of the batch may
  have been stored all the same; what was evicted for them is reported by the next write.
* Each call ends by its ``deadline_ns`` (on the monotonic clock), or raises ``TierTimeout``. A
  system call cannot be interrupted, so a medium that hangs may keep its caller: run calls on
  threads that may be lost.
* Once a call has returned or raised, the tier touches the memory it was given no more.
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
    """Facts of the medium, so that callers never switch on a tier's type."""

    name: TierName
    is_persistent: bool
    """Blocks outlive the process."""
    is_shared: bool
    """Other nodes read and write it too, so only the tier itself knows what it holds."""
    num_workers: int
    """How many calls may usefully be in flight at once."""


class MissReason(StrEnum):
    """Why a block was not served; a closed set, each one a metric label."""

    ABSENT = "absent"
    IDENTITY = "identity"
    CHECKSUM = "checksum"
    LENGTH = "length"
    HEADER = "header"
    SEAL = "seal"
    """Encrypted or signed with a key that is not ours, not at all where it should be, or altered
    since."""
    EXPIRED = "expired"
    """Older than the tier may serve it."""


class WriteOutcome(StrEnum):
    """What became of one block of a write."""

    STORED = "stored"
    REJECTED = "rejected"
    """No room, or larger than this tier takes."""


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One block to keep: its header with checksum, and its payload."""

    header: BlockHeader
    payload: memoryview


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block to fetch: who it must be, and where its payload goes.

    ``key_space`` and ``tenant`` must equal those of the stored header, or the read is a miss.
    ``into`` is at least as long as the payload; if it is longer, the rest is left alone or
    overwritten with padding.
    """

    block_hash: BlockHash
    key_space: bytes
    tenant: bytes
    payload_bytes: int
    into: memoryview


@dataclass(frozen=True, slots=True)
class WriteReport:
    """Per block what became of it, in the order given, and which blocks were evicted for them."""

    outcomes: tuple[WriteOutcome, ...]
    evicted: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal took away; bytes are those of payloads."""

    num_blocks: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Removed") -> "Removed":
        return Removed(self.num_blocks + other.num_blocks, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What one step of a scrub saw; of a pass, the steps add up."""

    num_blocks: int = 0
    num_bytes: int = 0
    """Read from the medium."""
    damaged: tuple[BlockHash, ...] = ()
    """Blocks that failed their check: quarantined, no longer served, free to be stored again."""
    expired: tuple[BlockHash, ...] = ()
    """Blocks forgotten because of their age."""
    evicted: tuple[BlockHash, ...] = ()
    """Blocks that went otherwise, and of which no write has told: with files that somebody took."""
    is_pass_over: bool = True
    """The next step begins anew with the first block."""


class HealthState(StrEnum):
    """How well a tier does; a closed set, each one a metric label."""

    UP = "up"
    DEGRADED = "degraded"
    """It serves, but not all of what it is for: read-only, say."""
    OUT = "out"
    """Nothing is asked of it but, now and then, whether it is back."""
    DRAINED = "drained"
    """It is read, and an operator lets nothing new be written to it."""
    DETACHED = "detached"
    """An operator took it off: nothing is asked of it, and others may have its medium."""


@dataclass(frozen=True, slots=True)
class Health:
    """How well a tier does and, unless it is up, why, in words for an operator."""

    state: HealthState = HealthState.UP
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Occupancy; bytes are those that the medium has allocated, padding and headers included.

    A shared tier reports zeros: only its server knows.
    """

    num_blocks: int
    used_bytes: int
    capacity_bytes: int
    detail: dict[str, str | int | float | bool] = field(default_factory=dict)
    generation: int = 0
    """Changes when the medium may have lost blocks, because a server restarted or failed over."""


class Tier(Protocol):
    """A place for blocks. See the module's contract."""

    @property
    def properties(self) -> TierProperties:
        """Return the facts of this medium."""

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Keep blocks; publish each one only when it is complete."""

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Fetch blocks: for each its verified header, or why it is a miss."""

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Sequence[bool | None]:
        """Tell for each hash whether a read may hit, None if unknown; changes nothing."""

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Forget blocks; unknown hashes are ignored."""

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Forget all blocks of a selection, and let none of their bytes be read again.

        An operator's verb: may take long, and may need all of its deadline. Raises TierTimeout with
        what was removed until then removed.
        """

    def probe(self, deadline_ns: int) -> None:
        """Touch the medium as reads and writes do; raises TierError if that fails."""

    def scratch(
        self, block_bytes: int, num_blocks: int, deadline_ns: int
    ) -> "AbstractContextManager[Tier]":
        """Open a temporary tier on the same medium, to measure transfers with.

        It has room for ``num_blocks`` blocks of ``block_bytes`` without evicting any block of this
        tier, and its blocks do not count as blocks of this tier. Raises TierFull if there is not
        enough free room. Blocks that are left in it are removed soon after the end of the context,
        even if that is a crash.
        """

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify the next blocks, about ``max_bytes`` of them, and quarantine damaged ones.

        Goes on where the last step ended; with 0 nothing is verified, only what is due is done, and
        told. A shared tier has nothing to scrub.
        """

    def health(self) -> Health:
        """Return how the tier does, from memory; never blocks."""

    def headers(self) -> Iterator[Headers]:
        """Yield what is kept, in batches, older blocks first; nothing for a shared tier."""

    def usage(self) -> TierUsage:
        """Return occupancy from memory; never blocks."""

    def close(self) -> None:
        """Make kept blocks durable where that is meant, and let go of the medium. Idempotent."""
