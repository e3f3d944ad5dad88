"""How the node uses the tiers below the CPU tier: administrative state, write mode, limits."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.core.limits import TRANSFER_BYTES
from kvtier.core.residency import TierName

__all__ = ["AdminState", "SlowTier", "WriteMode"]


class AdminState(StrEnum):
    """How far a tier is in use, as its operator decides."""

    ACTIVE = "active"
    """Blocks are read and written."""
    READ_ONLY = "read_only"
    """No new writes are queued; queued writes still run, and reads go on."""
    DETACHING = "detaching"
    """No new reads or writes are queued; those queued or in flight still run."""
    DETACHED = "detached"
    """Not used at all: another process may own the device, or its contents are not known yet."""


class WriteMode(StrEnum):
    """When blocks are written to a tier."""

    DEMOTE = "demote"
    """When the CPU tier is about to let them go, and the admission takes them."""
    SECOND_USE = "second_use"
    """Once they are asked for a second time."""
    STORE = "store"
    """As soon as they are stored."""


@dataclass(frozen=True, slots=True)
class SlowTier:
    """What the node must know of a tier below the CPU."""

    name: TierName
    num_workers: int
    deadline_ns: int
    """For the answer; a transfer gets the time for its bytes on top."""
    queue_bytes_max: int
    """Bytes that may wait to be written; each of them is pinned in the arena."""
    min_tokens: int = 0
    """A lookup asks a shared tier only where at least so many are missing."""
    transfer_bytes: int = TRANSFER_BYTES
    """What a transfer of small blocks may take together."""
    write: WriteMode = WriteMode.STORE
    flush_after_ns: int = 0
    """With ``DEMOTE``: after so long in the CPU tier blocks are written too; 0: never."""
    is_kept: bool = True
    """False: what is in it does not outlive the daemon."""
