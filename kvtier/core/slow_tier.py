"""How the node uses a tier below the CPU tier: settings, write mode and administrative state."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.core.limits import TRANSFER_BYTES
from kvtier.core.residency import TierName

__all__ = ["AdminState", "SlowTier", "WriteMode"]


class AdminState(StrEnum):
    """Whether a tier is read and written, as set by its operator."""

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
    """When the CPU tier is about to evict them, if admission takes them."""
    SECOND_USE = "second_use"
    """When they are used for the second time."""
    STORE = "store"
    """When they are stored."""


@dataclass(frozen=True, slots=True)
class SlowTier:
    """Settings of a tier below the CPU tier."""

    name: TierName
    num_workers: int
    deadline_ns: int
    """Time limit for an answer; a transfer also gets the time for its bytes."""
    queue_bytes_max: int
    """Bytes that may be queued for writing; all of them are pinned in the arena."""
    min_tokens: int = 0
    """A lookup asks a shared tier only if at least this many tokens are missing."""
    transfer_bytes: int = TRANSFER_BYTES
    """Bytes that small blocks may take together in one transfer."""
    write: WriteMode = WriteMode.STORE
    flush_after_ns: int = 0
    """In mode ``demote``, blocks this old are written while the tier is idle; 0 for never."""
    is_kept: bool = True
    """Whether the tier's contents outlive the daemon."""
